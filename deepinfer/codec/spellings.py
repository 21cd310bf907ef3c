"""Control tokens of the V4.1 prompt (spec/codec.md 1.1), and the sign that keeps a picture's place in a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.codec.tokenizer import Tokenizer


class Control(str):
    """The spelling of a control token that is one: the same text in a plain str is only text."""

    __slots__ = ()


BOS = Control("<｜begin▁of▁sentence｜>")
EOS = Control("<｜end▁of▁sentence｜>")
SYSTEM = Control("<｜System｜>")
USER = Control("<｜User｜>")
ASSISTANT = Control("<｜Assistant｜>")
THINK = Control("<think>")
END_THINK = Control("</think>")
DSML = Control("｜DSML｜")
REMINDER = Control("<｜latest_reminder｜>")
PICTURE = Control("<｜image｜>")
CONTROL = (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML, REMINDER, PICTURE)

IMAGE = "\ufdd0"
"""Stands in `Turn.text` where a picture goes. A noncharacter of Unicode: no text that is meant to be read has it, and a
text that has it all the same cannot move a picture, for signs and pictures must be equally many."""

PICTURE_SPELLINGS = ("<｜deepseek_image｜>", str(PICTURE))  # of checkpoints, of the format's reference


def control_id(tokenizer: Tokenizer, spelling: str) -> int:
    """Id of a control token; of PICTURE however the tokenizer spells it. ValueError if the tokenizer lacks it."""
    if spelling == PICTURE:
        spelling = next((name for name in PICTURE_SPELLINGS if name in tokenizer.control_ids), spelling)
    return tokenizer.control_id(spelling)


def role_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that no answer has: what begins a prompt or a turn, and pictures. Those that the tokenizer lacks are left
    out."""
    names = (BOS, SYSTEM, USER, ASSISTANT, REMINDER, *PICTURE_SPELLINGS)
    return frozenset(tokenizer.control_ids[name] for name in names if name in tokenizer.control_ids)
