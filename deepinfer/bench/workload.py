"""What is asked: prompts of a file, or ours. Natural text: on random tokens drafts are never right."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILTIN = "builtin"


@dataclass(frozen=True, slots=True)
class Prompt:
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    """None = as the whole run has it."""


QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Sort these words alphabetically: pear, apple, fig, cherry",
    "How much is 17 plus 25?",
    "Tell me a short story about a lighthouse.",
    "Explain what a hash table is, and when it is slow.",
    "Write a Python function that reverses a list in place.",
    "What is the capital of Japan?",
    "Translate into French: the weather is fine today.",
    "Reverse this list: red, green, blue, yellow",
    "There are 48 apples in a box. Anna takes out 19. How many stay in the box?",
    "Describe how a river is made, from the spring to the sea.",
    "Write a Python function that counts the vowels in a text.",
    "Which number is larger, 713 or 371?",
    "Give me three reasons to write tests before the code.",
    "What does a compiler do?",
)

RULES = """\
You are the assistant of a small library. These are its rules; answer every question by them. The reading room opens
at nine in the morning and closes at eight in the evening, on Saturdays at four. On Sundays and on holidays the
house is closed. A card costs nothing for children, for students and for people without work; all others pay twelve
a year. A reader may take ten books home for four weeks, and newspapers and magazines for one. A loan can be made
longer twice, by telephone, by letter or at the desk, as long as nobody else waits for the book. Who brings a book
back late pays ten cents a day; who loses one pays what it costs, or brings another copy. Maps, manuscripts and
books from before 1850 are read in the reading room only, at the tables near the window, with pencils and without
drinks. Films and records may be heard and seen in the three rooms of the cellar, which are given out by the hour.
Whoever looks for a book that the house does not have may ask for it at the desk: it comes from another library
within two weeks, for two. Dogs wait outside, but for those who lead the blind. Speak softly, switch off what rings,
and leave the shelves as you found them. For school classes there is a tour on Tuesday mornings, which a teacher
books a week before. Gifts of books are welcome if they are clean and not older than ten years. The director is Mrs.
Okafor, the desk is led by Mr. Lindqvist, and the children's room by Ms. Tanaka, who reads aloud every Wednesday at
three. Copies cost five cents a page, in colour twenty. There are eight computers; an hour at one is free of charge
and may be repeated if nobody waits."""

ABOUT_RULES = (
    "When does the reading room close on Saturdays?",
    "How many books may a reader take home?",
    "Who leads the children's room?",
    "What does a copy in colour cost?",
    "May I bring my dog?",
    "How long does it take to get a book from another library?",
    "When are tours for school classes?",
    "What happens if I lose a book?",
)


def builtin() -> list[Prompt]:
    """24 prompts: two thirds are short questions, one third share a system message of about 400 tokens, so that a
    prefix cache has something to do, as it has in service."""
    short = [Prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    system = {"role": "system", "content": RULES.replace("\n", " ")}
    long = [Prompt([system, {"role": "user", "content": question}]) for question in ABOUT_RULES]
    return short + long


def read(name: str) -> list[Prompt]:
    """`builtin`, or a file: a prompt per line, or, if the first line is a JSON object, one object per line with
    "prompt" (text) or "messages" (as in Chat Completions), and perhaps "max_tokens". ValueError naming the line;
    OSError."""
    if name == BUILTIN:
        return builtin()
    try:
        text = Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: is not UTF-8 text ({error})") from None
    lines = [(number, line) for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{name}: holds no prompt")
    if not lines[0][1].lstrip().startswith("{"):
        return [Prompt([{"role": "user", "content": line.rstrip("\r")}]) for _, line in lines]
    prompts = []
    for number, line in lines:
        try:
            prompts.append(_prompt(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} line {number}: {error}") from None
    return prompts


def _prompt(record: Any) -> Prompt:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if unknown := set(record) - {"prompt", "messages", "max_tokens"}:
        raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
    limit = record.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"max_tokens must be a whole number above 0, got {limit!r}")
    if ("prompt" in record) == ("messages" in record):
        raise ValueError('needs either "prompt" or "messages"')
    if "prompt" in record:
        if not isinstance(record["prompt"], str):
            raise ValueError(f"prompt must be a text, got {record['prompt']!r}")
        return Prompt([{"role": "user", "content": record["prompt"]}], limit)
    messages = record["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of objects")
    return Prompt(messages, limit)


def drawn(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` of them in an order that depends on the seed alone: all once, then all once more, ..."""
    random_order = random.Random(seed)
    chosen: list[Prompt] = []
    while len(chosen) < count:
        round_ = list(prompts)
        random_order.shuffle(round_)
        chosen += round_
    return chosen[:count]
