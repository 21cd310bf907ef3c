"""What the front end hands to the engine core: token ids and parameters, no text. In one process as it is, between
processes as msgpack.

Sampling parameters travel whole and are checked again where they arrive: `SamplingParams` is built from the fields, so
its own rules hold on both sides of a socket.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import numpy as np

from deepinfer.engine.errors import InvalidRequestError
from deepinfer.engine.sampling_params import SamplingParams

_ARRAY_KINDS = "biuf"  # plain numbers: no objects, whose bytes would be addresses


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request that passed the door (engine/admission.py)."""

    number: int
    """Unique in one core and growing with the order of submission."""
    request_id: str
    prompt_token_ids: np.ndarray
    """int32 [n], n >= 1."""
    params: SamplingParams
    max_tokens: int
    """Most tokens that each completion may have; params.max_tokens, cut at the end of the context."""
    age: float = 0.0
    """Seconds since submission, when this was handed over: clocks of two processes need not agree. Deadlines and queue
    times count from (clock on arrival - age)."""
    tenant: str = ""
    """Whose share it counts against under the queue policy "fair"."""
    salt: str = ""
    """Requests share cached prefixes only with those of the same salt."""

    def __post_init__(self) -> None:
        ids = self.prompt_token_ids
        if ids.dtype != np.int32 or ids.ndim != 1 or not len(ids):
            raise InvalidRequestError(
                "prompt_token_ids", f"must be int32 [n], n >= 1, got {ids.dtype} {list(ids.shape)}"
            )


def encode_request(request: EngineRequest) -> bytes:
    """msgpack; token ids as their raw little-endian bytes, 4 per id."""
    return msgspec.msgpack.encode(request, enc_hook=encode_array)


def decode_request(message: bytes) -> EngineRequest:
    """The other way. msgspec.ValidationError (a ValueError) names the field that is missing or wrong."""
    return _request_decoder().decode(message)


@cache
def _request_decoder() -> msgspec.msgpack.Decoder[EngineRequest]:
    return msgspec.msgpack.Decoder(EngineRequest, dec_hook=decode_array)


def encode_array(value: Any) -> Any:
    """enc_hook: a numpy array of one dimension as (dtype, bytes), subclasses of plain types as what they stand for."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _ARRAY_KINDS or value.ndim != 1:
            raise TypeError(f"only arrays of numbers with one dimension travel, got {value.dtype} {list(value.shape)}")
        little = value.astype(value.dtype.newbyteorder("<"), copy=False)
        return little.dtype.str, little.tobytes()
    for plain in (int, float, str):  # int before float; msgpack knows these three only by their exact type
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def decode_array(kind: type, value: Any) -> Any:
    """dec_hook: the array of `encode_array`, read-only, on the message's own memory."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind.__name__} cannot be received")
    name, raw = value
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"only arrays of numbers travel, got {dtype}")
    return np.frombuffer(raw, dtype=dtype)
