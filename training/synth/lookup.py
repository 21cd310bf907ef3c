"""Rows of fixed length in which facts are planted in running text and asked for later.

The running text comes from already encoded documents, so only the short sentences are encoded here.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from training.synth import pick
from training.synth import words as w
from training.tokenizer import ASSISTANT, BOS, EOS, THINK_END, USER

Encode = Callable[[str], list[int]]

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


class Fact:
    """One planted fact."""

    def __init__(self, rng: random.Random):
        self.kind = rng.choice(list(KINDS))
        self.key = f"{rng.choice(w.ADJECTIVES)} {rng.choice(w.NOUNS)}"
        self.value = {
            "code": lambda: str(rng.randrange(1000, 100000)),
            "number": lambda: str(rng.randrange(10, 10000)),
            "owner": lambda: f"{rng.choice(w.FIRST)} {rng.choice(w.LAST)}",
            "color": lambda: rng.choice(w.COLORS),
            "city": lambda: rng.choice(w.CITIES),
            "password": lambda: f"{rng.choice(w.ADJECTIVES)}-{rng.choice(w.NOUNS)}",
        }[self.kind]()

    def statement(self, rng: random.Random, split: str) -> str:
        return pick(rng, KINDS[self.kind][0], split).format(key=self.key, value=self.value)

    def question(self, rng: random.Random, split: str) -> str:
        return pick(rng, KINDS[self.kind][1], split).format(key=self.key)

    def answer(self) -> str:
        return KINDS[self.kind][2].format(key=self.key, value=self.value)


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
    facts = _facts(rng, max(2, length // 220))
    tail: list[int] = []
    asked = rng.sample(facts, len(facts))
    for fact in asked:
        turn = f"{fact.question(rng, split)}{ASSISTANT}{THINK_END}{fact.answer()}{EOS}"
        piece = encode((USER if tail else "\n\n") + turn)
        if len(tail) + len(piece) > length * 0.45:
            break
        tail += piece
    head = encode(f"{BOS}{USER}" + rng.choice(["", "Read this text.\n\n", "Here is a text.\n\n"]))
    space = length - len(tail) - len(head)
    body = _mix(rng, space, facts, hay, encode, split)
    return (head + body + tail)[:length]


def stream_row(rng: random.Random, length: int, hay: Haystack, encode: Encode, split: str) -> list[int]:
    """Plain text in which statements, and questions about earlier statements, interrupt the running text."""
    row, known = encode(BOS), []
    while len(row) < length:
        row += hay.cut(rng, rng.randrange(10, max(20, length // 16)))
        for _ in range(rng.randrange(1, 4)):
            if known and rng.random() < 0.6:
                fact = rng.choice(known)
                row += encode(f"\nQuestion: {fact.question(rng, split)}\nAnswer: {fact.answer()}\n")
            else:
                fact = _fresh(rng, known)
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
        keys = rng.sample(list(pairs), len(pairs))
        row += encode("\n" + "".join(f'>>> data["{k}"]\n{pairs[k]!r}\n' for k in keys))
    return row[:length]


def copy_row(rng: random.Random, length: int, hay: Haystack, encode: Encode, split: str) -> list[int]:
    """Random words or a stretch of text, something else, then the same again."""
    row = encode(BOS)
    while len(row) < length:
        size = rng.randrange(20, max(40, length // 8))
        piece = hay.cut(rng, size)
        if rng.random() < 0.6:
            piece = encode(" ".join(rng.choice(rng.choice([w.NOUNS, w.ADJECTIVES, w.LAST])) for _ in range(size // 3)))
        row += (
            encode("\nText:\n")
            + piece
            + hay.cut(rng, rng.randrange(0, length // 4))
            + encode("\nThe same text again:\n")
            + piece
        )
    return row[:length]


def row(rng: random.Random, length: int, hay: Haystack, encode: Encode, split: str = "train") -> list[int]:
    """One row of exactly `length` ids."""
    kind = rng.choices([chat_row, stream_row, table_row, copy_row], [0.45, 0.25, 0.17, 0.13])[0]
    out = kind(rng, length, hay, encode, split)
    return out + [2] * (length - len(out))


def probe(rng: random.Random, distance: int, hay: Haystack, encode: Encode) -> tuple[list[int], list[int], str]:
    """(prompt ids, answer ids with EOS, value): one fact about `distance` tokens before the held-out question."""
    target, others = Fact(rng), _facts(rng, 6)
    fact = encode("\n" + target.statement(rng, "valid") + "\n")
    before = _mix(rng, rng.randrange(40, 200), others[:2], hay, encode, "valid")
    after = _mix(rng, distance, [f for f in others[2:] if f.key != target.key], hay, encode, "valid")
    prompt = encode(f"{BOS}{USER}") + before + fact + after
    prompt += encode(f"\n\n{target.question(rng, 'valid')}{ASSISTANT}{THINK_END}")
    return prompt, encode(target.answer() + EOS), target.value


def _fresh(rng: random.Random, known: list[Fact]) -> Fact:
    keys = {f.key for f in known}
    while True:
        fact = Fact(rng)
        if fact.key not in keys:
            return fact


def _facts(rng: random.Random, count: int) -> list[Fact]:
    facts: list[Fact] = []
    for _ in range(count):
        facts.append(_fresh(rng, facts))
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
