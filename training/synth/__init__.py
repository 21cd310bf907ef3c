"""Synthetic chats, tool calls and look-ups; every generator takes a random.Random and a split ("train" or "valid")."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def pick(rng: random.Random, options: Sequence[T], split: str) -> T:
    """A wording: the last quarter of the options (at least one) is kept for "valid", the rest is for "train"."""
    held = max(1, len(options) // 4)
    return rng.choice(options[-held:] if split == "valid" else options[:-held])
