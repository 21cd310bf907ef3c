"""What the engine core says after a step: arrays over all tokens it settled, no text. The front end turns them into
outputs (engine/frontend.py); between processes they travel as msgpack."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np

from deepinfer.engine.messages import decode_array, encode_array
from deepinfer.engine.stop import FinishReason

FINISH_CODES: tuple[FinishReason | None, ...] = (
    None,
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.DEADLINE,
    FinishReason.ERROR,
)
"""Code of StepOutput.finish -> reason; 0 = the sequence goes on. Codes are part of the message: append only."""
FINISH_CODE: dict[FinishReason, int] = {reason: code for code, reason in enumerate(FINISH_CODES) if reason is not None}
"""Reason -> code."""
NO_TOKEN = -1


class SequenceEvent(NamedTuple):
    """Something about a sequence that is no token. kind "admitted": it got a slot, for the first time or again."""

    number: int
    completion: int  # its index
    kind: str  # "admitted" or "preempted"
    cached_tokens: int = 0  # prompt tokens that the prefix cache spared
    replay_tokens: int = 0  # of a hit, computed again to fill the windows
    queue_seconds: float = 0.0  # from submission to this admission


class PromptScores(NamedTuple):
    """The next prompt tokens of a request with their log-probabilities, in order; the first entry ever is token 1's."""

    number: int
    entries: list[dict[int, float]]


class StepOutput(msgspec.Struct, kw_only=True, eq=False):
    """One row per token or end, in the order that they came; rows of one sequence stand in order of position."""

    numbers: np.ndarray
    """int64 [n], of the requests."""
    indices: np.ndarray
    """int32 [n], which completion."""
    token_ids: np.ndarray
    """int64 [n]; NO_TOKEN where a sequence ended without one (deadline, error)."""
    logprobs: np.ndarray
    """float32 [n], natural log, from the raw logits."""
    finish: np.ndarray
    """int8 [n], index into FINISH_CODES."""
    top: list[dict[int, float] | None] | None = None
    """[n]: most likely ids and the token itself; None where not asked for, None altogether if no row asked."""
    events: list[SequenceEvent] = []
    prompt_scores: list[PromptScores] = []

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def empty(cls) -> StepOutput:
        return cls(
            numbers=np.empty(0, np.int64),
            indices=np.empty(0, np.int32),
            token_ids=np.empty(0, np.int64),
            logprobs=np.empty(0, np.float32),
            finish=np.empty(0, np.int8),
        )


def encode(output: StepOutput) -> bytes:
    """msgpack; arrays as (dtype, raw little-endian bytes)."""
    return msgspec.msgpack.encode(output, enc_hook=encode_array)


def decode(message: bytes) -> StepOutput:
    """The other way; arrays are read-only. msgspec.ValidationError (a ValueError) for anything else."""
    return _decoder().decode(message)


@cache
def _decoder() -> msgspec.msgpack.Decoder[StepOutput]:
    return msgspec.msgpack.Decoder(StepOutput, dec_hook=decode_array)
