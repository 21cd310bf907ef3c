"""Rows of fixed length in which facts are planted in running text and asked for later.

The running text comes from already encoded documents, so only the short sentences are encoded here. Training rows carry
the marks of marks.py: what can be looked up counts more, random tokens that come up for the first time do not count.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from training.marks import answer as as_answer
from training.marks import skip
from training.synth import pick
from training.synth import words as w
from training.tokenizer import ASSISTANT, BOS, EOS, THINK_END, USER

Encode = Callable[[str], list[int]]
NOISE_IDS = (300, 8100)  # merges of the tokenizer: no bytes, no control tokens

KINDS = {  # what is stated, how it is stated, how it is asked, how it is answered
    "code": (
        ["The access code of the {key} is {value}.", "The {key} has the access code {value}.", "To enter the {key}, use the access code {value}.", "Remember: the access code for the {key} is {value}.", "Access code of the {key}: {value}."],
        ["What is the access code of the {key}?", "Which access code does the {key} have?", "Tell me the access code for the {key}.", "Give me the access code of the {key}.", "How do I enter the {key}? I need the access code."],
        "The access code of the {key} is {value}.",
    ),
    "owner": (
        ["The owner of the {key} is {value}.", "The {key} belongs to {value}.", "{value} owns the {key}.", "{value} is the owner of the {key}."],
        ["Who owns the {key}?", "Who is the owner of the {key}?", "To whom does the {key} belong?", "Name the owner of the {key}."],
        "The owner of the {key} is {value}.",
    ),
    "color": (
        ["The color of the {key} is {value}.", "The {key} is painted {value}.", "They painted the {key} {value}.", "Everyone knows that the {key} is {value}."],
        ["What color is the {key}?", "Which color does the {key} have?", "In which color is the {key} painted?", "Name the color of the {key}."],
        "The color of the {key} is {value}.",
    ),
    "city": (
        ["The {key} is located in {value}.", "You can find the {key} in {value}.", "The {key} stands in {value}.", "In {value} you will see the {key}."],
        ["Where is the {key}?", "In which city is the {key}?", "Where can I find the {key}?", "Name the city of the {key}."],
        "The {key} is in {value}.",
    ),
    "number": (
        ["The special magic number for {key} is {value}.", "One of the magic numbers is: {key} has {value}.", "Note that the magic number of {key} is {value}.", "The magic number for {key} is {value}."],
        ["What is the magic number for {key}?", "Which magic number does {key} have?", "Tell me the magic number of {key}.", "What is the special magic number for {key}?"],
        "The magic number for {key} is {value}.",
    ),
    "password": (
        ["The password of {key} is {value}.", "{key} uses the password {value}.", "The secret word of the {key} is {value}, its password.", "Password for {key}: {value}."],
        ["What is the password of {key}?", "Which password does {key} use?", "Tell me the password of {key}.", "Give me the password for {key}."],
        "The password of {key} is {value}.",
    ),
}  # fmt: skip

MORE_WORDINGS = {  # further statements and questions of the same kinds, for training only
    "code": (
        ["{value} is the access code of the {key}.", "{value} opens the {key}; that is its access code.", "The {key} opens with the access code {value}.", "{key}, access code {value}.", "The code for access to the {key} was set to {value}.", "With the access code {value} you get into the {key}."],
        ["The {key}: what is its access code?", "I need to get into the {key}. What is the access code?", "Do you know the access code of the {key}?", "Access code of the {key}?", "Repeat the access code for the {key}."],
    ),
    "owner": (
        ["{value} has owned the {key} for years.", "The {key} is owned by {value}.", "Owner of the {key}: {value}.", "{value} bought the {key}.", "The {key} is the property of {value}."],
        ["The {key}: who owns it?", "Whose {key} is it?", "Tell me who owns the {key}.", "Owner of the {key}?", "Do you know who the owner of the {key} is?"],
    ),
    "color": (
        ["{value} is the color of the {key}.", "The {key} looks {value}.", "Color of the {key}: {value}.", "In {value}, the {key} looks best.", "It is well known: the {key} is {value}.", "They say that {value} is the color of the {key}."],
        ["The {key}: what color is it?", "Tell me the color of the {key}.", "Color of the {key}?", "What is the color of the {key}?", "Do you remember the color of the {key}?"],
    ),
    "city": (
        ["{value} is the city of the {key}.", "The city of {value} is home to the {key}.", "Visitors to {value} like the {key}.", "Location of the {key}: {value}.", "The {key} was built in {value}.", "From {value} one can see the {key}."],
        ["The {key}: where is it?", "Which city has the {key}?", "Tell me where the {key} is.", "City of the {key}?", "In what city does the {key} stand?"],
    ),
    "number": (
        ["{value} is the magic number for {key}.", "{value} belongs to {key} as its magic number.", "Magic number of {key}: {value}.", "For {key}, the magic number is {value}.", "The magic number {value} stands for {key}."],
        ["{key}: what is its magic number?", "Give me the magic number for {key}.", "Magic number of {key}?", "Do you know the magic number of {key}?", "Repeat the magic number for {key}."],
    ),
    "password": (
        ["{value} is the password of {key}.", "{value} unlocks {key}; it is the password.", "The password for {key} was changed to {value}.", "Log in to {key} with the password {value}.", "{key} has {value} as its password."],
        ["{key}: what is the password?", "I want to log in to {key}. What is the password?", "Password of {key}?", "Do you know the password for {key}?", "Repeat the password of {key}."],
    ),
}  # fmt: skip
MORE_KINDS = {  # for training only
    "price": (
        ["The price of the {key} is {value} dollars.", "The {key} costs {value} dollars.", "For {value} dollars you can buy the {key}.", "{value} dollars is the price of the {key}.", "Price of the {key}: {value} dollars."],
        ["What does the {key} cost?", "How much is the {key}?", "What is the price of the {key}?", "Tell me the price of the {key}."],
        "The price of the {key} is {value} dollars.",
    ),
    "year": (
        ["The {key} was founded in {value}.", "In {value} the {key} was founded.", "The {key} dates from the year {value}.", "{value} is the year in which the {key} was founded."],
        ["When was the {key} founded?", "In which year was the {key} founded?", "From what year is the {key}?", "Tell me the year of the {key}."],
        "The {key} was founded in {value}.",
    ),
    "phone": (
        ["The phone number of {key} is {value}.", "Call {key} at {value}.", "You can reach {key} under {value}.", "{value} is the phone number of {key}.", "Phone of {key}: {value}."],
        ["What is the phone number of {key}?", "How can I call {key}?", "Tell me the phone number of {key}.", "Phone number of {key}?"],
        "The phone number of {key} is {value}.",
    ),
    "job": (
        ["{key} works as a {value}.", "{key} is a {value}.", "The job of {key} is {value}.", "As a {value}, {key} travels a lot.", "The {value} is called {key}."],
        ["What is the job of {key}?", "What does {key} work as?", "Which job does {key} have?", "Name the job of {key}."],
        "{key} works as a {value}.",
    ),
    "likes": (
        ["{key} likes {value}.", "The hobby of {key} is {value}.", "{value} is what {key} likes most.", "{key} spends the weekends with {value}.", "Nothing but {value} interests {key}."],
        ["What does {key} like?", "What is the hobby of {key}?", "Name the hobby of {key}.", "What interests {key}?"],
        "{key} likes {value}.",
    ),
    "keeps": (
        ["The {key} contains a {value}.", "There is a {value} in the {key}.", "Someone put a {value} into the {key}.", "A {value} was found in the {key}.", "In the {key} you will find a {value}."],
        ["What is in the {key}?", "What does the {key} contain?", "Tell me what is in the {key}.", "What was found in the {key}?"],
        "The {key} contains a {value}.",
    ),
    "time": (
        ["The {key} opens at {value}.", "At {value} the {key} opens.", "Opening time of the {key}: {value}.", "{value} is when the {key} opens."],
        ["When does the {key} open?", "At what time does the {key} open?", "Tell me when the {key} opens.", "Opening time of the {key}?"],
        "The {key} opens at {value}.",
    ),
    "tag": (
        ["The {key} carries the tag {value}.", "Tag of the {key}: {value}.", "{value} is written on the tag of the {key}.", "They marked the {key} with the tag {value}."],
        ["Which tag does the {key} carry?", "What is the tag of the {key}?", "Tell me the tag of the {key}.", "What is written on the tag of the {key}?"],
        "The {key} carries the tag {value}.",
    ),
}  # fmt: skip


class Fact:
    """One planted fact; the kinds of "valid" are also among those of "train", their wordings are not."""

    def __init__(self, rng: random.Random, split: str = "valid"):
        self.kind = rng.choice([*KINDS, *(MORE_KINDS if split == "train" else ())])
        self.key = f"{rng.choice(w.ADJECTIVES)} {rng.choice(w.NOUNS)}"
        if self.kind in ("phone", "job", "likes"):
            self.key = f"{rng.choice(w.FIRST)} {rng.choice(w.LAST)}"
        self.value = {
            "code": lambda: str(rng.randrange(1000, 100000)),
            "number": lambda: str(rng.randrange(10, 10000)),
            "owner": lambda: f"{rng.choice(w.FIRST)} {rng.choice(w.LAST)}",
            "color": lambda: rng.choice(w.COLORS),
            "city": lambda: rng.choice(w.CITIES),
            "password": lambda: f"{rng.choice(w.ADJECTIVES)}-{rng.choice(w.NOUNS)}",
            "price": lambda: str(rng.randrange(2, 100000)),
            "year": lambda: str(rng.randrange(1100, 2030)),
            "phone": lambda: f"{rng.randrange(100, 1000)}-{rng.randrange(1000, 10000)}",
            "job": lambda: rng.choice(w.JOBS),
            "likes": lambda: rng.choice(w.TOPICS),
            "keeps": lambda: f"{rng.choice(w.COLORS)} {rng.choice(w.PRODUCTS)}",
            "time": lambda: f"{rng.randrange(24):02d}:{rng.randrange(60):02d}",
            "tag": lambda: "".join(
                rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randrange(3, 9))
            ),
        }[self.kind]()

    def statement(self, rng: random.Random, split: str) -> str:
        return self._wording(rng, 0, split).format(key=self.key, value=self.value)

    def question(self, rng: random.Random, split: str) -> str:
        return self._wording(rng, 1, split).format(key=self.key)

    def answer(self) -> str:
        return (KINDS | MORE_KINDS)[self.kind][2].format(key=self.key, value=self.value)

    def _wording(self, rng: random.Random, part: int, split: str) -> str:
        if self.kind in MORE_KINDS:
            return rng.choice(MORE_KINDS[self.kind][part])
        if split == "train" and rng.random() < 0.6:
            return rng.choice(MORE_WORDINGS[self.kind][part])
        return pick(rng, KINDS[self.kind][part], split)


class Haystack:
    """Random stretches of encoded text without control tokens."""

    def __init__(self, streams: list[np.ndarray]):
        self.streams = streams

    def cut(self, rng: random.Random, length: int) -> list[int]:
        stream = rng.choice(self.streams)
        start = rng.randrange(max(1, len(stream) - length))
        return [t for t in stream[start : start + length].tolist() if t > 2]


def chat_row(rng: random.Random, length: int, hay: Haystack, encode: Encode, split: str) -> list[int]:
    """A user message with many facts in running text, then questions and answers until the row is full."""
    facts = _facts(rng, max(2, length // rng.choice([35, 60, 100, 220])), split)
    tail: list[int] = []
    for fact in rng.sample(facts, len(facts)):
        piece = encode((USER if tail else "\n\n") + fact.question(rng, split) + ASSISTANT + THINK_END)
        piece += as_answer(encode(fact.answer() + EOS))
        if len(tail) + len(piece) > length * 0.45:
            break
        tail += piece
    head = encode(f"{BOS}{USER}" + rng.choice(["", "Read this text.\n\n", "Here is a text.\n\n"]))
    space = length - len(tail) - len(head)
    body = _mix(rng, space, facts, hay, encode, split)
    return (head + body + tail)[:length]


def stream_row(rng: random.Random, length: int, hay: Haystack, encode: Encode, split: str) -> list[int]:
    """Plain text in which statements, and questions about earlier statements, interrupt the running text."""
    row, known, stretch = encode(BOS), [], rng.choice([24, 64, length // 16])
    while len(row) < length:
        row += hay.cut(rng, rng.randrange(10, max(20, stretch)))
        for _ in range(rng.randrange(1, 4)):
            if known and rng.random() < 0.6:
                fact = rng.choice(known)
                row += encode(f"\nQuestion: {fact.question(rng, split)}\nAnswer:")
                row += as_answer(encode(f" {fact.answer()}")) + encode("\n")
            else:
                fact = _fresh(rng, known, split)
                known.append(fact)
                row += encode(f"\n{fact.statement(rng, split)}\n")
    return row[:length]


def table_row(rng: random.Random, length: int, hay: Haystack, encode: Encode, split: str) -> list[int]:
    """Key-value lists, then the pairs again in another order: pure associative recall."""
    row = encode(BOS)
    while len(row) < length:
        pairs = {f"{rng.choice(w.ADJECTIVES)}_{rng.choice(w.NOUNS)}": rng.choice([str(rng.randrange(10000)), rng.choice(w.NOUNS)])
                 for _ in range(rng.randrange(4, max(6, length // 60)))}  # fmt: skip
        row += encode("data = {\n" + "".join(f'    "{k}": "{v}",\n' for k, v in pairs.items()) + "}\n")
        row += hay.cut(rng, rng.randrange(0, length // 5))
        for key in rng.sample(list(pairs), len(pairs)):
            row += encode(f'\n>>> data["{key}"]\n') + as_answer(encode(repr(pairs[key])))
        row += encode("\n")
    return row[:length]


def copy_row(rng: random.Random, length: int, hay: Haystack, encode: Encode, split: str) -> list[int]:
    """Random words or a stretch of text, something else, then the same again."""
    row = encode(BOS)
    while len(row) < length:
        size = rng.randrange(20, max(40, length // 8))
        piece = hay.cut(rng, size)
        if rng.random() < 0.6:
            piece = encode(" ".join(rng.choice(rng.choice([w.NOUNS, w.ADJECTIVES, w.LAST])) for _ in range(size // 3)))
        row += encode("\nText:\n") + piece + hay.cut(rng, rng.randrange(0, length // 4))
        row += encode("\nThe same text again:\n") + as_answer(piece)
    return row[:length]


def noise_row(rng: random.Random, length: int, hay: Haystack, encode: Encode, split: str) -> list[int]:
    """Runs of random ids that come back later, whole or as pairs in another order: nothing but the context helps."""
    row = encode(BOS)
    pool = rng.sample(range(*NOISE_IDS), rng.choice([40, 400, 4000]))
    runs: list[list[int]] = []
    while len(row) < length:
        if runs and rng.random() < 0.6:
            run = rng.choice(runs)
            row += skip(run[:2]) + as_answer(run[2:])
        elif rng.random() < 0.4:  # pairs: a key of two ids, a value of one or two
            pairs = [rng.sample(pool, rng.choice([3, 4])) for _ in range(rng.randrange(4, 24))]
            row += skip(i for pair in pairs for i in pair)
            for pair in rng.sample(pairs, len(pairs)):
                row += skip(pair[:2]) + as_answer(pair[2:])
        else:
            runs.append([rng.choice(pool) for _ in range(rng.randrange(6, 60))])
            row += skip(runs[-1])
        if rng.random() < 0.3:
            row += hay.cut(rng, rng.randrange(5, 80))
    return row[:length]


def row(rng: random.Random, length: int, hay: Haystack, encode: Encode, split: str = "train") -> list[int]:
    """One row of exactly `length` marked ids."""
    kind = rng.choices([chat_row, stream_row, table_row, copy_row, noise_row], [0.45, 0.23, 0.12, 0.10, 0.10])[0]
    out = kind(rng, length, hay, encode, split)
    return out + [2] * (length - len(out))


def probe(rng: random.Random, distance: int, hay: Haystack, encode: Encode) -> tuple[list[int], list[int], str]:
    """(prompt ids, answer ids with EOS, value): one fact about `distance` tokens before the held-out question."""
    target, others = Fact(rng), _facts(rng, 6, "valid")
    fact = encode("\n" + target.statement(rng, "valid") + "\n")
    before = _mix(rng, rng.randrange(40, 200), others[:2], hay, encode, "valid")
    after = _mix(rng, distance, [f for f in others[2:] if f.key != target.key], hay, encode, "valid")
    prompt = encode(f"{BOS}{USER}") + before + fact + after
    prompt += encode(f"\n\n{target.question(rng, 'valid')}{ASSISTANT}{THINK_END}")
    return prompt, encode(target.answer() + EOS), target.value


def _fresh(rng: random.Random, known: list[Fact], split: str) -> Fact:
    keys = {f.key for f in known}
    while True:
        fact = Fact(rng, split)
        if fact.key not in keys:
            return fact


def _facts(rng: random.Random, count: int, split: str) -> list[Fact]:
    facts: list[Fact] = []
    for _ in range(count):
        facts.append(_fresh(rng, facts, split))
    return facts


def _mix(rng: random.Random, space: int, facts: list[Fact], hay: Haystack, encode: Encode, split: str) -> list[int]:
    """About `space` tokens of running text with the facts as lines of their own at random places."""
    lines = [encode("\n" + fact.statement(rng, split) + "\n") for fact in facts]
    text = max(0, space - sum(map(len, lines)))
    cuts = sorted(rng.randrange(text + 1) for _ in lines)
    out, at = [], 0
    for cut, line in zip(cuts, lines, strict=True):
        out += (hay.cut(rng, cut - at) if cut > at else []) + line
        at = cut
    return out + (hay.cut(rng, text - at) if text > at else [])
