"""Random answers that masks allow, and what they must be."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np

from deepinfer.grammar.compiler import build_parts
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.prototype import Prototype
from deepinfer.grammar.structure import Structure
from deepinfer.grammar.vocabulary import Vocabulary

NANO = Path(__file__).resolve().parents[2] / "models/nano"
EOS = 1
# Tokens that move a text on; uniform choices among thousands of words would never close a quote.
STRUCTURAL = [*'"}],:{[ 015</\n>-.=@abcgnxyZ', "</"]
CLOSING = [*'"}]</)=@.,truecnd', '"}', "</"]


@cache
def nano() -> Vocabulary:
    return Vocabulary.from_tokenizer_file(NANO / "tokenizer.json", 8192, EOS)


def prototype(structure: Structure) -> Prototype:
    """Compiled here and now."""
    return Prototype(structure, nano(), build_parts(structure, nano()))


def ids_of(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def allows(row: np.ndarray, token: int) -> bool:
    return bool(int(row[token // 32]) >> token % 32 & 1)


class Walk(NamedTuple):
    ids: list[int]  # without the end token
    ends: list[bool]  # whether the answer might end behind ids[:n]
    rows: np.ndarray  # [len(ids) + 1, words]
    ended: bool  # it came to an end by itself


def walk(start: Matcher, chance: random.Random, most: int = 200) -> Walk:
    """An answer of tokens that the masks allow; behind half of `most` what closes is preferred."""
    matcher = start.copy()
    structural = {nano().tokenize(text)[0] for text in STRUCTURAL} | {nano().dsml, nano().end_think}
    closing = {nano().tokenize(text)[0] for text in CLOSING} | {nano().dsml, nano().end_think}
    ids: list[int] = []
    ends: list[bool] = []
    rows = []
    while True:
        row = matcher.masks([])[0]
        assert matcher.error is None
        rows.append(row)
        allowed = ids_of(row)
        assert allowed, "a row without any token"
        ends.append(EOS in allowed)
        if ends[-1] and (allowed == [EOS] or chance.random() < 0.3 or len(ids) >= most):
            return Walk(ids, ends, np.stack(rows), True)
        if len(ids) >= most:
            return Walk(ids, ends, np.stack(rows), False)
        late = len(ids) > most // 2
        few = [t for t in allowed if t in (closing if late else structural)]
        if late and chance.random() < 0.6:
            few = [t for t in (nano().dsml, *nano().tokenize("</"), *nano().tokenize('"')) if t in allowed][:1] or few
        token = chance.choice(few if few and chance.random() < 0.7 else [t for t in allowed if t != EOS])
        matcher.accept([token])
        assert matcher.error is None, matcher.error
        ids.append(token)


def check_ends(walked: Walk, is_valid: Callable[[str], bool]) -> None:
    """Wherever the answer might have ended, it is valid; and it is no answer that cannot be decoded."""
    for end, may_end in enumerate(walked.ends):
        if may_end:
            text = nano().tokenizer.decode_bytes(walked.ids[:end]).decode("utf-8")
            assert is_valid(text), text


def matches_schema(schema: Any) -> Callable[[str], bool]:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())

    def is_valid(text: str) -> bool:
        return validator.is_valid(json.loads(text))

    return is_valid


# -- blocks of calls -------------------------------------------------------------------------------------------------

MARK = "\x00"  # stands for the DSML token in texts here; no walk produces a NUL


def rendered(ids: list[int]) -> str:
    """Text of ids, the DSML token as MARK."""
    parts: list[bytes] = [MARK.encode() if token == nano().dsml else nano().token_bytes(token) for token in ids]
    return b"".join(parts).decode("utf-8")


def encoded(text: str) -> list[int]:
    """Ids of such a text."""
    ids: list[int] = []
    for number, part in enumerate(text.split(MARK)):
        ids += ([nano().dsml] if number else []) + nano().tokenize(part)
    return ids


def block(*calls: tuple[str, dict[str, Any]]) -> str:
    """A block of calls, written as spec/codec.md 3 has it."""
    return f"\n\n<{MARK} calls>\n" + "\n".join(_invoke(name, values) for name, values in calls) + f"\n</{MARK} calls>"


def _invoke(name: str, values: dict[str, Any]) -> str:
    lines = [
        f'<{MARK} parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</{MARK} parameter>\n"
        for key, value in values.items()
    ]
    return f'<{MARK} invoke name="{name}">\n' + ("".join(lines) or "\n") + f"</{MARK} invoke>"


def parse_block(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a block; ValueError for a text that is not exactly one."""
    begin, end = f"\n\n<{MARK} calls>\n", f"\n</{MARK} calls>"
    if not (text.startswith(begin) and text.endswith(end)):
        raise ValueError("no block of calls")
    calls = []
    for part in text[len(begin) : -len(end)].split(f"</{MARK} invoke>")[:-1]:
        match = re.fullmatch(rf'\n?<{MARK} invoke name="([^"]+)">\n(.*)', part, re.DOTALL)
        if match is None:
            raise ValueError(f"no call: {part!r}")
        values: dict[str, Any] = {}
        pieces = match[2].split(f"</{MARK} parameter>\n")
        if pieces != ["\n"] and pieces[-1] != "":
            raise ValueError(f"text between parameters: {pieces[-1]!r}")
        for piece in pieces[:-1]:
            found = re.fullmatch(rf'<{MARK} parameter name="([^"]+)" string="(true|false)">(.*)', piece, re.DOTALL)
            if found is None:
                raise ValueError(f"no parameter: {piece!r}")
            key, is_text, value = found.groups()
            values[key] = value if is_text == "true" else json.loads(value)
            if is_text == "false" and isinstance(values[key], str):
                raise ValueError(f"a text written as JSON: {piece!r}")
        calls.append((match[1], values))
    return calls
