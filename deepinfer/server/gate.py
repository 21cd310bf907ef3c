"""The door of the server: who may come in, how much of it, and how much there is inside already.

    gate = Gate(keys=KeyRing.load(path), max_queued_tokens=...)      # keys=None: everybody may
    principal = gate.authenticate(headers)                           # before the body is read; Refusal 401
    async with gate.admit(headers, prompt_tokens_estimate=len(body) // 4, kind="messages") as admission:
        prompt = ...                                                 # render, encode
        admission.resize(len(prompt), max_tokens)                    # now it is known
        ... tenant=admission.tenant, salt=admission.cache_salt(request.cache_salt)
        admission.started()                                          # first token: it waits no more
        admission.settle(usage)                                      # in a `finally`, as far as it came

`admit` takes a Principal in place of headers. Its answers are Refusals: 401; 429 with Retry-After and the x-ratelimit
headers where a quota of the key is used up; 503 (529 with kind="messages") where the whole server is. All carry
`.headers` (`refusal.headers_of`); `admission.headers()` are those of an answer that succeeds.

Nobody waits here: requests that are let in wait in the engine, which knows their order. So what is bounded is the
number and the prompt tokens of requests that have no first token yet. One event loop keeps a Gate.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

from deepinfer.codec.generation import Usage
from deepinfer.server.keys import NOBODY, HeaderSource, KeyRing, Principal
from deepinfer.server.quota import UNLIMITED, Account, KeyLimits
from deepinfer.server.refusal import Headers, Refusal

_KEPT_ACCOUNTS = 1000  # idle ones beyond are forgotten
_MEMORY = 0.1  # weight of the latest request in the mean time in the queue


class GateStats(NamedTuple):
    """For /metrics."""

    running: int  # requests inside
    queued: int  # those of them without a first token
    queued_tokens: int  # of the prompts of those
    refused: Mapping[
        str, int
    ]  # by reason: authentication, requests, input_tokens, output_tokens, concurrency, queue...


class Admission:
    """A request that was let in. What it reserved goes back when the `async with` ends."""

    def __init__(self, gate: Gate, principal: Principal, account: Account, prompt_tokens: int, max_tokens: int) -> None:
        self.principal = principal
        self.tenant, self.salt, self.limits, self.key_id = principal
        self.cache_salt = principal.cache_salt
        self._gate = gate
        self._account = account
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._reserved = {"input_tokens": 0.0, "output_tokens": 0.0}
        self._arrival = gate._now()
        self._waits = True
        self._settled = False

    def resize(self, prompt_tokens: int, max_tokens: int | None = None) -> None:
        """The prompt is encoded: reserves what it really has. Never refuses: a debt delays the key's next request."""
        if self._settled:
            return
        if self._waits:
            self._gate._queued_tokens += prompt_tokens - self._prompt_tokens
        self._prompt_tokens = prompt_tokens
        self._max_tokens = self._max_tokens if max_tokens is None else max_tokens
        self._reserve(*self._account.expected(self._prompt_tokens, self._max_tokens))

    def started(self) -> None:
        """It has its first token (or needs none): it leaves the queue. Further calls do nothing."""
        self._leave_queue(self._gate._now() - self._arrival)

    def settle(self, usage: Usage) -> None:
        """What it took in truth: input tokens that were computed, output tokens of all completions. Once."""
        if self._settled:
            return
        self._settled = True
        computed = max(0, usage.prompt_tokens - usage.cached_tokens)
        self._reserve(computed, usage.completion_tokens)
        self._account.learn(usage.prompt_tokens, computed, usage.completion_tokens)

    def headers(self) -> Headers:
        """x-ratelimit-* of the key, as things stand."""
        return self._account.headers(self._gate._now())

    def _reserve(self, input_tokens: float, output_tokens: float) -> None:
        """In place of what is reserved."""
        amounts = {"input_tokens": input_tokens, "output_tokens": output_tokens}
        difference = {name: amount - self._reserved[name] for name, amount in amounts.items()}
        self._account.take(difference, self._gate._now())
        self._reserved = amounts

    def _leave_queue(self, seconds: float | None) -> None:
        if self._waits:
            self._waits = False
            self._gate._leave_queue(self._prompt_tokens, seconds)

    def _close(self) -> None:
        if self._waits and not self._settled:  # it never reached a token: only the request itself counts
            self._reserve(0, 0)
        self._leave_queue(None)
        self._settled = True


class Gate:
    """max_running: requests inside at once. max_queued_requests and max_queued_tokens: those without a first token; a
    single request may have more tokens than that, when nobody else waits. default_limits: of a key whose line names
    none. now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        keys: KeyRing | None = None,
        *,
        max_running: int = 4096,
        max_queued_requests: int = 1024,
        max_queued_tokens: int = 4_000_000,
        default_limits: KeyLimits = UNLIMITED,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (
            ("max_running", max_running),
            ("max_queued_requests", max_queued_requests),
            ("max_queued_tokens", max_queued_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name}: must be at least 1, is {value}")
        self._keys = keys
        self._max_running = max_running
        self._max_queued_requests = max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._default_limits = default_limits
        self._now = now
        self._accounts: dict[str, Account] = {}
        self._running = 0
        self._queued = 0
        self._queued_tokens = 0
        self._queue_seconds = 1.0  # mean of those that left it
        self._refused: Counter[str] = Counter()

    @property
    def has_keys(self) -> bool:
        """Whether somebody without a key is refused."""
        return self._keys is not None

    def authenticate(self, headers: HeaderSource) -> Principal:
        """Raises Refusal 401. Cheap: do it before the body is read."""
        if self._keys is None:
            return NOBODY._replace(limits=self._default_limits)
        try:
            principal = self._keys.authenticate(headers)
        except Refusal:
            self._refused["authentication"] += 1
            raise
        limits = (given if given is not None else default for given, default in self._limit_pairs(principal))
        return principal._replace(limits=KeyLimits(*limits))

    @contextlib.asynccontextmanager
    async def admit(
        self,
        who: HeaderSource | Principal,
        *,
        prompt_tokens_estimate: int = 0,
        max_tokens: int = 0,
        kind: str = "chat",
    ) -> AsyncIterator[Admission]:
        """max_tokens: the output's, 0 = no output. kind: the route's protocol; "messages" is overloaded with 529."""
        principal = who if isinstance(who, Principal) else self.authenticate(who)
        account = self._account(principal)
        now = self._now()
        input_tokens, output_tokens = account.expected(prompt_tokens_estimate, max_tokens)
        amounts = {"requests": 1.0, "input_tokens": input_tokens, "output_tokens": output_tokens}
        if (shortage := account.shortage(amounts, now)) is not None:
            raise self._over_quota(*shortage, account, now)
        self._check_capacity(prompt_tokens_estimate, kind)
        account.take({"requests": 1.0}, now)
        admission = Admission(self, principal, account, prompt_tokens_estimate, max_tokens)
        account.running += 1
        self._running += 1
        self._queued += 1
        self._queued_tokens += prompt_tokens_estimate
        admission.resize(prompt_tokens_estimate, max_tokens)
        try:
            yield admission
        finally:
            admission._close()
            account.running -= 1
            self._running -= 1

    def stats(self) -> GateStats:
        return GateStats(self._running, self._queued, self._queued_tokens, dict(self._refused))

    def _limit_pairs(self, principal: Principal) -> zip[tuple[int | None, int | None]]:
        return zip(principal.limits, self._default_limits, strict=True)

    def _account(self, principal: Principal) -> Account:
        now = self._now()
        account = self._accounts.get(principal.key_id)
        if account is None:
            if len(self._accounts) >= _KEPT_ACCOUNTS:
                self._accounts = {id: kept for id, kept in self._accounts.items() if not kept.is_idle(now)}
            account = self._accounts[principal.key_id] = Account(principal.limits, now)
        elif account.limits != principal.limits:
            account.change_limits(principal.limits, now)
        return account

    def _over_quota(self, name: str, seconds: float, account: Account, now: float) -> Refusal:
        self._refused[name] += 1
        if name == "concurrency":
            limit = f"{account.limits.concurrency} requests of this key run already"
        else:
            limit = (
                f"this key may use {getattr(account.limits, name + '_per_minute')} {name.replace('_', ' ')} a minute"
            )
        return Refusal(
            f"Rate limit reached: {limit}. Try again in {max(seconds, 0.1):.1f} s.",
            status=429,
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after=seconds,
            headers=account.headers(now),
        )

    def _check_capacity(self, prompt_tokens: int, kind: str) -> None:
        if self._running >= self._max_running:
            reason = "running"
        elif self._queued >= self._max_queued_requests:
            reason = "queue"
        elif self._queued and self._queued_tokens + prompt_tokens > self._max_queued_tokens:
            reason = "queue_tokens"
        else:
            return
        self._refused[reason] += 1
        raise Refusal(
            "The server is overloaded: too many requests wait already. Try again later.",
            status=529 if kind == "messages" else 503,
            kind="overloaded_error",
            code="overloaded",
            retry_after=min(60.0, max(1.0, self._queue_seconds)),
        )

    def _leave_queue(self, prompt_tokens: int, seconds: float | None) -> None:
        """seconds: how long it waited for its first token; None = it gave up."""
        self._queued -= 1
        self._queued_tokens -= prompt_tokens
        if seconds is not None:
            self._queue_seconds += _MEMORY * (seconds - self._queue_seconds)
