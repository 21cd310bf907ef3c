"""What `deepinfer serve` is told besides the engine's arguments, checked once, when the object is made."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

SAMPLING_POLICIES = ("honour", "hosted")
ANY_MODEL = "*"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Times in seconds. ValueError naming the field."""

    host: str = "127.0.0.1"
    """Address to listen on. One that other machines reach needs `keys`."""
    port: int = 8000
    """0 = any free one, printed at start."""
    keys: Path | None = None
    """File of API keys (`deepinfer keys`); None = everybody on this machine may."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which requests may call a server without keys, besides those of this machine."""
    model_names: tuple[str, ...] = ()
    """Names that requests may use, the first one in lists; "*" = any name. () = the model's own."""

    sampling_policy: str = "honour"
    """honour: requests choose temperature and top_p. hosted: as the vendor's own service, which fixes them (thinking:
    temperature 1 and top_p of at least 0.95; else top_p 1)."""
    promote_unterminated: bool = False
    """An answer that never ends its reasoning is sent as content instead."""
    tool_grammar: bool = True
    """What begins as a call is held to the form of one, whatever tool_choice says."""

    max_running: int = 1024
    """Requests inside at once."""
    max_queued_requests: int = 512
    """Those of them without a first token."""
    max_queued_tokens: int = 4_000_000
    """Prompt tokens of those."""
    max_body_bytes: int = 8 << 20
    """Of a request."""
    grammar_seconds: float = 2.0
    """Longest time that a grammar may take to compile."""
    grammar_workers: int = 1
    """Processes that try grammars out before the engine gets them."""
    encode_threads: int = 2
    """Threads that make token ids of long prompts."""

    request_timeout: float = 3600.0
    """Longest time of an answer; it ends with what it has."""
    first_token_timeout: float = 60.0
    """A request that cannot have its first token by then is dropped without any work."""
    stall_timeout: float = 60.0
    """A client that takes nothing of its stream for so long is given up."""
    heartbeat: float = 15.0
    """Longest silence of a stream; 10 at most for Anthropic's protocol."""
    hang_timeout: float = 300.0
    """An engine that has work and ends no step for so long is killed and started again."""
    drain_timeout: float = 300.0
    """What SIGTERM leaves to open requests."""
    drain_grace: float = 0.0
    """Between the moment when /ready says no and the end, at least: for balancers that must notice."""

    store: Path | None = None
    """SQLite file of stored responses; None = in memory, gone with the server."""
    store_bytes: int = 256 << 20
    """Most bytes of them; the oldest go first."""
    access_log: bool = True
    """One line per request on stderr."""
    log_content: bool = False
    """With the prompt's beginning in it."""
    trace_endpoint: str | None = None
    """OTLP over HTTP; None = no traces."""
    trace_share: float = 0.01
    """Of the requests that neither failed nor were slow; all of those are traced."""

    def __post_init__(self) -> None:
        if self.sampling_policy not in SAMPLING_POLICIES:
            raise ValueError(f"sampling_policy: {self.sampling_policy!r} is not one of {', '.join(SAMPLING_POLICIES)}")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port: must be from 0 to 65535, got {self.port}")
        for name in ("max_running", "max_queued_requests", "max_queued_tokens", "max_body_bytes", "store_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("grammar_workers", "encode_threads"):
            if not 1 <= getattr(self, name) <= 256:
                raise ValueError(f"{name}: must be from 1 to 256, got {getattr(self, name)}")
        for name in (
            "grammar_seconds", "request_timeout", "first_token_timeout", "stall_timeout", "heartbeat", "hang_timeout",
        ):  # fmt: skip
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be a number of seconds above 0, got {getattr(self, name)}")
        for name in ("drain_timeout", "drain_grace"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: must be a number of seconds, got {getattr(self, name)}")
        if not 0 <= self.trace_share <= 1:
            raise ValueError(f"trace_share: must be from 0 to 1, got {self.trace_share}")
        if any(not name or len(name) > 256 for name in self.model_names):
            raise ValueError("model_names: each needs 1 to 256 characters")
        if not is_loopback(self.host) and self.keys is None:
            raise ValueError(
                f"host: {self.host} can be reached from other machines, so requests need keys: make a file with "
                "`deepinfer keys add` and give it as keys, or listen on 127.0.0.1"
            )

    def describe(self) -> Iterator[str]:
        """Lines for the start: what is in force."""
        yield f"API keys from {self.keys}" if self.keys is not None else "no API keys: this machine's users may ask"
        if self.sampling_policy == "honour":
            yield "sampling: as requests ask"
        else:
            yield "sampling: hosted, temperature and top_p of requests are replaced"
        yield (
            f"at most {self.max_running} requests, {self.max_queued_requests} of them or "
            f"{self.max_queued_tokens:,} prompt tokens without a first token, bodies of {self.max_body_bytes >> 20} MiB"
        )
        yield (
            f"an answer has {self.request_timeout:g} s, its first token {self.first_token_timeout:g} s, a drain "
            f"{self.drain_timeout:g} s; streams are kept open every {self.heartbeat:g} s"
        )
        yield f"stored responses in {self.store or 'memory'}, traces {self.trace_endpoint or 'off'}"
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default and f.name not in _SHOWN]
        if changed:
            yield "also set: " + ", ".join(f"{f.name} {getattr(self, f.name)}" for f in changed)


_SHOWN = {
    "host", "port", "keys", "sampling_policy", "max_running", "max_queued_requests", "max_queued_tokens",
    "max_body_bytes", "request_timeout", "first_token_timeout", "drain_timeout", "heartbeat", "store",
    "trace_endpoint", "model_names",
}  # fmt: skip


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches an address. Names other than localhost are taken for public ones."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
