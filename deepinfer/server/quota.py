"""Quotas of a key: token buckets for requests, input tokens and output tokens a minute, and a number at a time.

What a request will probably cost is reserved when it is let in and settled when it ends, for input tokens without those
that the prefix cache had. A bucket may go below zero: one request of more than a minute's quota is let in when it is
full, and those after it wait until it is paid off. So the rate holds in the mean, and no request is impossible.
"""

from __future__ import annotations

from typing import NamedTuple


class KeyLimits(NamedTuple):
    """None = not limited."""

    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrency: int | None = None


UNLIMITED = KeyLimits()


class Bucket:
    """`per_minute` units flow in every minute, and at most as many wait in it. Times are seconds of one clock."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.capacity = float(per_minute)
        self._level = self.capacity
        self._seen = now

    def level(self, now: float) -> float:
        """Units at hand; negative while a debt is being paid off."""
        if now > self._seen:
            self._level = min(self.capacity, self._level + (now - self._seen) * self.capacity / 60)
            self._seen = now
        return self._level

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken, 0 for now; what exceeds the capacity waits for a full bucket only."""
        missing = min(amount, self.capacity) - self.level(now)
        return missing * 60 / self.capacity if missing > 1e-9 else 0.0

    def take(self, amount: float, now: float) -> None:
        """amount: negative gives back."""
        self._level = min(self.capacity, self.level(now) - amount)

    def full_in(self, now: float) -> float:
        """Seconds until it is full again."""
        return (self.capacity - self.level(now)) * 60 / self.capacity


NAMES = ("requests", "input_tokens", "output_tokens")
"""Of the buckets, as in the headers."""
EXPECTED_OUTPUT = 256.0
"""Output tokens that are reserved for the first request of a key; then the mean of what its requests made."""
_MEMORY = 0.1  # weight of the latest request in such means


class Account:
    """What one key has used. Not thread-safe: one event loop keeps it."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.limits = limits
        self.running = 0
        self._mean_output = EXPECTED_OUTPUT
        self._computed_share = 1.0  # of prompts, what the prefix cache did not have
        self._buckets = {
            name: Bucket(limit, now) for name, limit in zip(NAMES, limits[:3], strict=True) if limit is not None
        }

    def change_limits(self, limits: KeyLimits, now: float) -> None:
        """The key's line in the file changed: new buckets, each as full in proportion as its old one was."""
        old = self._buckets
        self.limits, self._buckets = limits, {}
        for name, limit in zip(NAMES, limits[:3], strict=True):
            if limit is not None:
                self._buckets[name] = bucket = Bucket(limit, now)
                if name in old:
                    bucket.take(bucket.capacity * (1 - old[name].level(now) / old[name].capacity), now)

    def expected(self, prompt_tokens: int, max_tokens: int) -> tuple[float, float]:
        """(input, output) tokens to reserve for a request, judged by the key's earlier ones. What it takes more in the
        end is a debt: a client whose prompts are mostly cached is not held to their full length, nor one that leaves
        max_tokens at its default to that.
        """
        return prompt_tokens * self._computed_share, min(self._mean_output, max_tokens)

    def learn(self, prompt_tokens: int, computed_tokens: int, output_tokens: int) -> None:
        """What a request took in truth; of one that never ran there is nothing to learn."""
        if not prompt_tokens:
            return
        self._computed_share += _MEMORY * (computed_tokens / prompt_tokens - self._computed_share)
        self._mean_output += _MEMORY * (output_tokens - self._mean_output)

    def shortage(self, amounts: dict[str, float], now: float) -> tuple[str, float] | None:
        """The quota that does not allow `amounts` now, with the seconds until it does: of several the one that takes
        longest. "concurrency" comes first, since no time can be given for it: 1 second.
        """
        if self.limits.concurrency is not None and self.running >= self.limits.concurrency:
            return "concurrency", 1.0
        waits = [(bucket.wait(amounts.get(name, 0), now), name) for name, bucket in self._buckets.items()]
        seconds, name = max(waits, default=(0.0, ""))
        return (name, seconds) if seconds > 0 else None

    def take(self, amounts: dict[str, float], now: float) -> None:
        for name, bucket in self._buckets.items():
            bucket.take(amounts.get(name, 0), now)

    def is_idle(self, now: float) -> bool:
        """Forgetting it changes nothing."""
        return self.running == 0 and all(bucket.level(now) >= bucket.capacity for bucket in self._buckets.values())

    def headers(self, now: float) -> tuple[tuple[str, str], ...]:
        """x-ratelimit-{limit,remaining,reset}-{requests,input-tokens,output-tokens}; reset: until full, as "1.5s"."""
        out = []
        for name, bucket in self._buckets.items():
            spelled = name.replace("_", "-")
            out += [
                (f"x-ratelimit-limit-{spelled}", str(int(bucket.capacity))),
                (f"x-ratelimit-remaining-{spelled}", str(max(0, int(bucket.level(now))))),
                (f"x-ratelimit-reset-{spelled}", f"{bucket.full_in(now):.1f}s"),
            ]
        if self.limits.concurrency is not None:
            out += [
                ("x-ratelimit-limit-concurrency", str(self.limits.concurrency)),
                ("x-ratelimit-remaining-concurrency", str(max(0, self.limits.concurrency - self.running))),
            ]
        return tuple(out)
