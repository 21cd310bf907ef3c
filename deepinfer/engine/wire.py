"""What clients and an engine process say to each other: msgpack of msgspec structs over ZeroMQ, never pickle.

A message is two frames: VERSION and the payload (in front of them, at the engine's ROUTER socket, the client's
identity). The version stands outside the payload, so that two releases that disagree can still say so. One that reads
another version answers `Refused` in its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from deepinfer.cache.events import CacheEvent
from deepinfer.engine.messages import EngineRequest, decode_array, decode_request, encode_array
from deepinfer.engine.step_output import StepOutput
from deepinfer.metrics import EngineStats

PROTOCOL = 3
VERSION = b"deepinfer-engine/%d" % PROTOCOL
BEAT_SECONDS = 0.25  # both sides say that they live this often,
SILENCE_SECONDS = 1.5  # and who was silent for this long is gone: noticed within two seconds, a beat and more to spare
LARGEST_MESSAGE = 64 << 20  # bytes; a prompt of a million tokens has 4 MB


class _Message(msgspec.Struct, tag=str.lower, kw_only=True, eq=False, forbid_unknown_fields=True):
    """Tagged with its class's name. Both sides have the same version, so a field too many is a mistake."""


# client -> engine


class Hello(_Message):
    """First message of a client; answered with Ready (or Fatal), while the model loads only with heartbeats."""

    client: str = ""  # a name for the log


class Add(_Message):
    """A new request. It is a message of its own, so that a bad one is refused under its number."""

    number: int  # this client's own, >= 0, never used before; takes the place of the request's
    request: msgspec.Raw


class Abort(_Message):
    number: int
    index: int | None = None  # which completion; None = all


class Drain(_Message):
    """Take nothing new, finish what there is, then end the process."""

    timeout: float | None = None  # seconds, after which the rest is aborted; None = the engine's own


class StatsRequest(_Message):
    tag: int  # comes back


class Subscribe(_Message):
    """Cache events from now on."""


class Pulse(_Message):
    """The client lives. Comes through a second socket, from a thread that a busy event loop does not stop."""

    client: bytes  # identity of its first socket


class Bye(_Message):
    """The client leaves; what it still has here is aborted."""


# engine -> client


class Ready(_Message):
    """The engine takes requests."""

    build: str  # version of the package
    pid: int
    max_model_len: int
    settings: dict[str, Any]  # EngineConfig, field by field


class Outputs(_Message):
    """All that one step brought to this client, under the client's numbers."""

    output: StepOutput


class Refused(_Message):
    """Nothing was done. number: the request, or None if it is about the connection or a message."""

    number: int | None
    field: str
    message: str
    draining: bool = False  # nothing is wrong with the request: another engine would take it


class Failed(_Message):
    """These requests ended without an answer, by no fault of theirs."""

    numbers: list[int]
    message: str


class Stats(_Message):
    tag: int
    stats: EngineStats


class Events(_Message):
    """What the prefix cache learnt and lost. first: number of the first one since the engine started."""

    first: int
    events: list[CacheEvent]


class Heartbeat(_Message):
    """The engine's process lives, says a thread that neither a long step nor loading stops."""

    state: str  # "loading", "ready" or "draining"
    stage: str = ""  # what is being loaded
    fraction: float | None = None  # of that stage
    last_step_age: float = 0.0  # seconds since the last step ended, 0 without work: a hung step shows here


class Drained(_Message):
    """Everything is finished; the process ends now."""


class Fatal(_Message):
    """The process ends now, with everything in it."""

    message: str


ToEngine = Hello | Add | Abort | Drain | StatsRequest | Subscribe | Pulse | Bye
ToClient = Ready | Outputs | Refused | Failed | Stats | Events | Heartbeat | Drained | Fatal


class ProtocolMismatchError(RuntimeError):
    """The other side speaks another version of these messages."""


def encode(message: ToEngine | ToClient) -> tuple[bytes, bytes]:
    """The two frames of a message."""
    return VERSION, msgspec.msgpack.encode(message, enc_hook=encode_array)


def encode_add(number: int, request: EngineRequest) -> tuple[bytes, bytes]:
    """A request as a message."""
    return encode(Add(number=number, request=msgspec.Raw(msgspec.msgpack.encode(request, enc_hook=encode_array))))


def decode_to_engine(frames: list[bytes]) -> ToEngine:
    """ProtocolMismatchError for another version, ValueError for what is no message."""
    return _to_engine().decode(_payload(frames))


def decode_to_client(frames: list[bytes]) -> ToClient:
    """ProtocolMismatchError for another version, ValueError for what is no message."""
    return _to_client().decode(_payload(frames))


def request_of(message: Add) -> EngineRequest:
    """The request inside, checked field by field. ValueError; its cause may be an InvalidRequestError."""
    return decode_request(bytes(message.request))


def _payload(frames: list[bytes]) -> bytes:
    if len(frames) != 2:
        raise ValueError(f"a message has 2 frames, got {len(frames)}")
    version, payload = frames
    if version != VERSION:
        theirs = version[:40].decode("ascii", "backslashreplace")
        raise ProtocolMismatchError(
            f"messages of {theirs!r} cannot be read here; this side speaks {VERSION.decode()!r}"
        )
    return payload


@cache
def _to_engine() -> msgspec.msgpack.Decoder[ToEngine]:
    return msgspec.msgpack.Decoder(ToEngine)


@cache
def _to_client() -> msgspec.msgpack.Decoder[ToClient]:
    return msgspec.msgpack.Decoder(ToClient, dec_hook=decode_array)
