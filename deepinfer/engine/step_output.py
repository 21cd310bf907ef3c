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


class Rounds(msgspec.Struct, kw_only=True, eq=False):
    """One entry per sequence that decoded: a round verifies drafts, 0 of them where none were at hand."""

    numbers: np.ndarray
    """int64 [m], of the requests."""
    indices: np.ndarray
    """int32 [m], which completion."""
    drafted: np.ndarray
    """int64 [m] drafts that were verified."""
    accepted: np.ndarray
    """int64 [m] of them, those that became output: accepted, and not behind the end of the sequence."""
    predicted: np.ndarray
    """float32 [m * k], round by round: the probability that draft i and all before it are accepted, as it stood before.
    NaN where a draft was not verified, or lies behind the end."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def predictions(self) -> np.ndarray:
        """`predicted` as [m, k]."""
        return self.predicted.reshape(len(self), -1)

    def take(self, rows: np.ndarray, numbers: np.ndarray) -> Rounds:
        """These rounds [n] alone, under other numbers [n]."""
        return Rounds(
            numbers=numbers,
            indices=self.indices[rows],
            drafted=self.drafted[rows],
            accepted=self.accepted[rows],
            predicted=self.predictions[rows].ravel(),
        )


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
    rounds: Rounds | None = None
    """None if nobody decoded, or nothing is drafted."""

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
