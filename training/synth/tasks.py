"""Short exercises: arithmetic, strings, lists, JSON extraction, simple Python, remembering what was said."""

from __future__ import annotations

import json
import random
from typing import Any

from training.synth import pick
from training.synth import words as w

Sample = tuple[str, str, str]  # question, reasoning, answer


def arithmetic(rng: random.Random, split: str) -> Sample:
    """Sums, differences and products of small numbers."""
    kind = rng.randrange(5)
    if kind <= 1:
        top = rng.choice([10, 20, 100, 1000])
        a, b = rng.randrange(top), rng.randrange(top)
        if kind == 1 and b > a:
            a, b = b, a
        sign, word, value = ("+", "plus", a + b) if kind == 0 else ("-", "minus", a - b)
        wordings = [
            f"What is {a} {sign} {b}?", f"{a} {sign} {b} = ?", f"Calculate {a} {sign} {b}.", f"{a}{sign}{b}",
            f"How much is {a} {word} {b}?", f"Compute {a} {sign} {b}", f"What's {a} {word} {b}?", f"Work out {a} {sign} {b} for me.",
        ]  # fmt: skip
        return pick(rng, wordings, split), f"{a} {sign} {b} = {value}.", f"{a} {sign} {b} = {value}"
    if kind == 2:
        a, b = rng.randrange(2, 13), rng.randrange(2, 13)
        wordings = [
            f"What is {a} times {b}?",
            f"{a} * {b} = ?",
            f"Multiply {a} by {b}.",
            f"Calculate {a} * {b}.",
            f"{a} x {b}?",
            f"How much is {a} times {b}?",
        ]
        return pick(rng, wordings, split), f"{a} * {b} = {a * b}.", f"{a} * {b} = {a * b}"
    if kind == 3:
        name, item = rng.choice(w.FIRST), rng.choice(w.ITEMS)
        a, b = rng.randrange(2, 60), rng.randrange(2, 40)
        if rng.random() < 0.5:
            wordings = [
                f"{name} has {a} {item} and gets {b} more. How many {item} does {name} have now?",
                f"{name} owns {a} {item}. A friend gives {name} {b} {item}. How many are there in total?",
                f"There are {a} {item} on a shelf, and {name} adds {b}. How many {item} are on the shelf?",
                f"Starting with {a} {item}, {name} receives another {b}. What is the total?",
            ]
            return (
                pick(rng, wordings, split),
                f"Add the two numbers: {a} + {b} = {a + b}.",
                f"{a} + {b} = {a + b}, so there are {a + b} {item}.",
            )
        a += b
        wordings = [
            f"{name} has {a} {item} and gives away {b}. How many {item} are left?",
            f"{name} had {a} {item} but lost {b}. How many {item} remain?",
            f"There are {a} {item} in a box. {name} takes out {b}. How many stay in the box?",
            f"From {a} {item}, {name} sells {b}. What is left?",
        ]
        return (
            pick(rng, wordings, split),
            f"Subtract: {a} - {b} = {a - b}.",
            f"{a} - {b} = {a - b}, so {a - b} {item} are left.",
        )
    a, b = rng.sample(range(1000), 2)
    wordings = [
        f"Which number is larger, {a} or {b}?",
        f"What is bigger: {a} or {b}?",
        f"Compare {a} and {b}. Which is larger?",
        f"Is {a} or {b} the greater number?",
    ]
    return pick(rng, wordings, split), f"{max(a, b)} is larger than {min(a, b)}.", f"{max(a, b)} is larger."


def strings(rng: random.Random, split: str) -> Sample:
    """Operations on short word or number lists."""
    items = rng.sample(rng.choice([w.NOUNS, w.ADJECTIVES, w.FIRST, w.COLORS, w.CITIES]), rng.randrange(3, 8))
    shown, kind = ", ".join(items), rng.randrange(8)
    if kind == 0:
        q = [
            f"Sort these words alphabetically: {shown}",
            f"Put these in alphabetical order: {shown}",
            f"Order alphabetically: {shown}",
            f"Arrange from A to Z: {shown}",
        ]
        value = ", ".join(sorted(items, key=str.lower))
    elif kind == 1:
        q = [
            f"Reverse this list: {shown}",
            f"Write this list backwards: {shown}",
            f"Give me this list in reverse order: {shown}",
            f"Turn this list around: {shown}",
        ]
        value = ", ".join(items[::-1])
    elif kind == 2:
        q = [
            f"How many words are in this list: {shown}?",
            f"Count the items: {shown}",
            f"How many items are there? {shown}",
            f"What is the number of entries in: {shown}?",
        ]
        value = str(len(items))
    elif kind == 3:
        n = rng.randrange(min(5, len(items)))
        name = "first second third fourth fifth".split()[n]
        q = [
            f"What is the {name} word in this list? {shown}",
            f"Give me the {name} item of: {shown}",
            f"Which word is {name}? {shown}",
            f"Pick the {name} entry: {shown}",
        ]
        value = items[n]
    elif kind == 4:
        q = [
            f"What is the last word in this list? {shown}",
            f"Give me the last item of: {shown}",
            f"Which word comes last? {shown}",
            f"Pick the final entry: {shown}",
        ]
        value = items[-1]
    elif kind == 5:
        q = [
            f"Write in upper case: {shown}",
            f"Convert to capital letters: {shown}",
            f"Make this uppercase: {shown}",
            f"Use capitals only: {shown}",
        ]
        value = shown.upper()
    elif kind == 6:
        q = [
            f"Repeat after me: {shown}",
            f"Repeat this exactly: {shown}",
            f"Copy the following text: {shown}",
            f"Say this again: {shown}",
        ]
        value = shown
    else:
        numbers = [rng.randrange(100) for _ in range(rng.randrange(3, 7))]
        listed = ", ".join(map(str, numbers))
        q = [
            f"Sort these numbers: {listed}",
            f"Order from smallest to largest: {listed}",
            f"Arrange in ascending order: {listed}",
            f"Sort ascending: {listed}",
        ]
        value = ", ".join(map(str, sorted(numbers)))
    return pick(rng, q, split), f"The result is {value}.", value


def person(rng: random.Random) -> dict[str, Any]:
    """Random fields of a person or an order."""
    return {
        "name": f"{rng.choice(w.FIRST)} {rng.choice(w.LAST)}",
        "age": rng.randrange(18, 90),
        "city": rng.choice(w.CITIES),
        "job": rng.choice(w.JOBS),
        "product": rng.choice(w.PRODUCTS),
        "price": rng.randrange(5, 900),
        "quantity": rng.randrange(1, 20),
        "color": rng.choice(w.COLORS),
    }


def extraction(rng: random.Random, split: str) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
    """(question, reasoning, value, schema): a sentence whose fields go into a JSON object."""
    p = person(rng)
    if rng.random() < 0.5:
        keys = ["name", "age", "city", "job"]
        text = pick(
            rng,
            [
                "{name} is a {age}-year-old {job} from {city}.", "My name is {name}. I am {age} years old, I live in {city} and work as a {job}.",
                "{name}, {age}, works as a {job} in {city}.", "In {city} lives {name}, a {job} aged {age}.",
                "The {job} {name} ({age}) moved to {city} last year.", "Meet {name}: {age} years old, {job}, based in {city}.",
            ],
            split,
        )  # fmt: skip
    else:
        keys = ["name", "product", "quantity", "price", "color"]
        text = pick(
            rng,
            [
                "{name} ordered {quantity} {color} {product}s for {price} dollars.", "Order: {quantity} x {product} ({color}), customer {name}, total {price} dollars.",
                "Please send {quantity} {color} {product}s to {name}; the price is {price} dollars.", "{name} paid {price} dollars for {quantity} {color} {product}s.",
                "The customer {name} wants {quantity} {product}s in {color} and pays {price} dollars.", "For {price} dollars, {name} bought {quantity} {product}s, all {color}.",
            ],
            split,
        )  # fmt: skip
    chosen = sorted(rng.sample(keys, rng.randrange(2, len(keys) + 1)), key=keys.index)
    value = {key: p[key] for key in chosen}
    properties = {key: {"type": "integer" if isinstance(p[key], int) else "string"} for key in chosen}
    ask = pick(
        rng,
        [
            "Extract {keys} as JSON: {text}", "Return {keys} as a JSON object.\n\n{text}", "{text}\n\nGive me {keys} as JSON.",
            "Read the text and answer in JSON with the keys {keys}.\n\n{text}", "{text} Write {keys} as a JSON object.",
            "Turn this into JSON with {keys}: {text}",
        ],
        split,
    )  # fmt: skip
    listed = ", ".join(chosen[:-1]) + " and " + chosen[-1]
    reasoning = "; ".join(f"{key} is {p[key]}" for key in chosen) + "."
    schema = {"type": "object", "properties": properties, "required": chosen}
    return ask.format(keys=listed, text=text.format(**p)), reasoning, value, schema


def memory(rng: random.Random, split: str) -> list[Sample]:
    """A few turns: the user says something about themselves and asks for it later."""
    p, pet = person(rng), rng.choice(w.NOUNS)
    facts = {
        "name": ([f"My name is {p['name']}.", f"I am {p['name']}.", f"Hi, {p['name']} here.", f"You can call me {p['name']}."],
                 ["What is my name?", "Who am I?", "Do you remember my name?", "Tell me my name."], f"Your name is {p['name']}."),
        "city": ([f"I live in {p['city']}.", f"My home is {p['city']}.", f"I am from {p['city']}.", f"I just moved to {p['city']}."],
                 ["Where do I live?", "Which city do I live in?", "Where is my home?", "Name my city."], f"You live in {p['city']}."),
        "job": ([f"I work as a {p['job']}.", f"I am a {p['job']}.", f"My job: {p['job']}.", f"I earn my money as a {p['job']}."],
                ["What is my job?", "What do I do for a living?", "What do I work as?", "Name my job."], f"You work as a {p['job']}."),
        "color": ([f"My favorite color is {p['color']}.", f"I love the color {p['color']}.", f"I like {p['color']} best.", f"{p['color'].title()} is my favorite color."],
                  ["What is my favorite color?", "Which color do I like best?", "Which color do I love?", "Name my favorite color."], f"Your favorite color is {p['color']}."),
        "pet": ([f"My dog is called {pet.title()}.", f"I have a dog named {pet.title()}.", f"{pet.title()} is my dog.", f"The name of my dog is {pet.title()}."],
                ["What is my dog called?", "What is the name of my dog?", "How is my dog called?", "Name my dog."], f"Your dog is called {pet.title()}."),
    }  # fmt: skip
    chosen = rng.sample(list(facts), rng.randrange(2, 4))
    replies = ["Nice to know.", "I will remember that.", "Thank you for telling me.", "Got it."]
    turns = [(pick(rng, facts[key][0], split), "The user shares something.", rng.choice(replies)) for key in chosen]
    asked = rng.sample(chosen, rng.randrange(1, len(chosen) + 1))
    return turns + [(pick(rng, facts[key][1], split), facts[key][2], facts[key][2]) for key in asked]


FUNCTIONS = [  # name, what it does, parameter list, body
    ("fibonacci", "returns the n-th Fibonacci number", "n", "    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a"),
    ("fibonacci", "returns the n-th Fibonacci number recursively", "n", "    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)"),
    ("factorial", "returns the factorial of n", "n", "    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result"),
    ("factorial", "returns the factorial of n recursively", "n", "    if n <= 1:\n        return 1\n    return n * factorial(n - 1)"),
    ("is_prime", "checks if a number is prime", "n", "    if n < 2:\n        return False\n    for i in range(2, int(n ** 0.5) + 1):\n        if n % i == 0:\n            return False\n    return True"),
    ("is_even", "checks if a number is even", "n", "    return n % 2 == 0"),
    ("is_odd", "checks if a number is odd", "n", "    return n % 2 == 1"),
    ("reverse_string", "reverses a string", "text", "    return text[::-1]"),
    ("is_palindrome", "checks if a string is a palindrome", "text", "    return text == text[::-1]"),
    ("count_vowels", "counts the vowels in a string", "text", '    return sum(1 for c in text.lower() if c in "aeiou")'),
    ("count_words", "counts the words in a string", "text", "    return len(text.split())"),
    ("sum_list", "returns the sum of a list", "numbers", "    total = 0\n    for number in numbers:\n        total += number\n    return total"),
    ("average", "returns the average of a list", "numbers", "    return sum(numbers) / len(numbers)"),
    ("maximum", "returns the largest item of a list", "items", "    best = items[0]\n    for item in items[1:]:\n        if item > best:\n            best = item\n    return best"),
    ("minimum", "returns the smallest item of a list", "items", "    best = items[0]\n    for item in items[1:]:\n        if item < best:\n            best = item\n    return best"),
    ("gcd", "returns the greatest common divisor of two numbers", "a, b", "    while b:\n        a, b = b, a % b\n    return a"),
    ("add", "adds two numbers", "a, b", "    return a + b"),
    ("multiply", "multiplies two numbers", "a, b", "    return a * b"),
    ("square", "returns the square of a number", "x", "    return x * x"),
    ("power", "raises a number to a power", "base, exponent", "    return base ** exponent"),
    ("celsius_to_fahrenheit", "converts Celsius to Fahrenheit", "celsius", "    return celsius * 9 / 5 + 32"),
    ("fahrenheit_to_celsius", "converts Fahrenheit to Celsius", "fahrenheit", "    return (fahrenheit - 32) * 5 / 9"),
    ("unique", "removes duplicates from a list", "items", "    seen = set()\n    result = []\n    for item in items:\n        if item not in seen:\n            seen.add(item)\n            result.append(item)\n    return result"),
    ("flatten", "flattens a list of lists", "lists", "    return [item for sub in lists for item in sub]"),
    ("bubble_sort", "sorts a list with bubble sort", "items", "    for i in range(len(items)):\n        for j in range(len(items) - i - 1):\n            if items[j] > items[j + 1]:\n                items[j], items[j + 1] = items[j + 1], items[j]\n    return items"),
    ("binary_search", "finds an item in a sorted list with binary search", "items, target", "    low, high = 0, len(items) - 1\n    while low <= high:\n        middle = (low + high) // 2\n        if items[middle] == target:\n            return middle\n        if items[middle] < target:\n            low = middle + 1\n        else:\n            high = middle - 1\n    return -1"),
    ("read_lines", "reads the lines of a file", "path", "    with open(path) as file:\n        return file.read().splitlines()"),
    ("count_letters", "counts how often each letter occurs", "text", "    counts = {}\n    for letter in text:\n        counts[letter] = counts.get(letter, 0) + 1\n    return counts"),
    ("fizzbuzz", "prints FizzBuzz up to n", "n", '    for i in range(1, n + 1):\n        if i % 15 == 0:\n            print("FizzBuzz")\n        elif i % 3 == 0:\n            print("Fizz")\n        elif i % 5 == 0:\n            print("Buzz")\n        else:\n            print(i)'),
    ("clamp", "limits a value to a range", "value, low, high", "    return max(low, min(value, high))"),
]  # fmt: skip


def python_code(rng: random.Random, split: str) -> Sample:
    """A small Python function on request."""
    name, does, parameters, body = rng.choice(FUNCTIONS)
    wordings = [
        "Write a Python function that {does}.", "Write a function in Python which {does}.", "Give me Python code that {does}.",
        "How do I write a Python function that {does}?", "Python function that {does}, please.", "Show me a Python function that {does}.",
        "I need a Python function. It {does}.", "Please code a function in Python that {does}.",
    ]  # fmt: skip
    code = f"def {name}({parameters}):\n{body}"
    return pick(rng, wordings, split).format(does=does), f"A function {name} that {does}.", f"```python\n{code}\n```"


def raw_function(rng: random.Random) -> str:
    """The same functions as a source file, with or without a docstring."""
    chosen = rng.sample(FUNCTIONS, rng.randrange(1, 5))
    parts = []
    for name, does, parameters, body in chosen:
        doc = f'    """{does[0].upper() + does[1:]}."""\n' if rng.random() < 0.5 else ""
        parts.append(f"def {name}({parameters}):\n{doc}{body}\n")
    return "\n\n".join(parts)


def as_json(value: Any) -> str:
    """Compact answer text of a JSON task."""
    return json.dumps(value, ensure_ascii=False)
