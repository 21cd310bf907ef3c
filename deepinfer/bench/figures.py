"""Records of a run -> its figures. Definitions of spec/serving.md 7.1, as seen by the client:

TTFT: from the moment when a request was due to its first piece of reasoning, content or a call. TBT: the gap between
two tokens; tokens that come together share the gap before them. Gap: the same between two arrivals, however many
tokens they bring, which is what a reader sees of drafting. Latency: to the end of the answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.bench.load import Record
from deepinfer.client import Exposition

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds. NaN without values."""

    p50: float
    p95: float
    p99: float
    mean: float
    max: float
    count: int

    @classmethod
    def of(cls, values: Iterable[tuple[float, int]]) -> Spread:
        """values: (seconds, how often)."""
        ordered = sorted((value, weight) for value, weight in values if weight > 0)
        count = sum(weight for _, weight in ordered)
        if not count:
            return cls(math.nan, math.nan, math.nan, math.nan, math.nan, 0)
        mean = sum(value * weight for value, weight in ordered) / count
        p50, p95, p99 = (percentile(ordered, count, q) for q in PERCENTILES)
        return cls(p50, p95, p99, mean, ordered[-1][0], count)


def percentile(ordered: Sequence[tuple[float, int]], count: int, q: int) -> float:
    """The smallest value that at least q % of all are not above (nearest rank). ordered: (value, how often) by value;
    count: of all, at least 1."""
    rank = max(1, math.ceil(q * count / 100))
    for value, weight in ordered:
        rank -= weight
        if rank <= 0:
            return value
    raise ValueError(f"count {count} is more than there are values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """From the counters of /metrics: of the whole server while the run lasted."""

    rounds: int
    drafted: int
    accepted: int

    @classmethod
    def between(cls, before: Exposition | None, after: Exposition | None) -> Drafts | None:
        """None where nothing is drafted, or where the counters are not to be had."""
        if before is None or after is None:
            return None
        rounds, drafted, accepted = (
            int(after.growth(before, f"spec_decode_{name}_total"))
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        return cls(rounds=rounds, drafted=drafted, accepted=accepted) if drafted and rounds else None

    @property
    def accepted_per_round(self) -> float:
        return self.accepted / self.rounds

    @property
    def accepted_share(self) -> float:
        return self.accepted / self.drafted


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    seconds: float
    """Start of the run to the end of its last request."""
    requests: int
    answered: int
    errors: dict[str, int]
    """By Record.error."""
    ttft: Spread
    tbt: Spread
    gap: Spread
    latency: Spread
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    user_speed: Spread
    """Tokens per second of each answer after its first one; P50 and so on of the rates, not seconds."""
    drafts: Drafts | None

    @classmethod
    def of(cls, records: Sequence[Record], seconds: float, drafts: Drafts | None) -> Figures:
        """Times are those of requests that were answered to their end; tokens count whatever came of them."""
        good = [record for record in records if record.error is None]
        gaps = [gap for record in good for gap in record.gaps]
        return cls(
            seconds=seconds,
            requests=len(records),
            answered=len(good),
            errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
            ttft=Spread.of((record.first - record.due, 1) for record in good if record.first is not None),
            tbt=Spread.of((gap / tokens, tokens) for gap, tokens in gaps if tokens),
            gap=Spread.of((gap, 1) for gap, _ in gaps),
            latency=Spread.of((record.end - record.due, 1) for record in good if record.end is not None),
            prompt_tokens=sum(record.prompt_tokens for record in records),
            cached_tokens=sum(record.cached_tokens for record in records),
            output_tokens=sum(record.output_tokens for record in records),
            reasoning_tokens=sum(record.reasoning_tokens for record in records),
            user_speed=Spread.of((speed, 1) for record in good if (speed := _speed(record)) is not None),
            drafts=drafts,
        )

    @property
    def output_rate(self) -> float:
        """Tokens per second of all requests together."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def request_rate(self) -> float:
        """Answers per second."""
        return self.answered / self.seconds if self.seconds else 0.0

    @property
    def cached_share(self) -> float:
        """Of the prompts' tokens, those that the prefix cache had."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        """Without NaN, which JSON does not have."""
        values = asdict(self) | {
            "output_tokens_per_second": self.output_rate,
            "requests_per_second": self.request_rate,
            "cached_share": self.cached_share,
        }
        if self.drafts is not None:
            values["drafts"] |= {
                "accepted_per_round": self.drafts.accepted_per_round,
                "accepted_share": self.drafts.accepted_share,
            }
        return {name: _without_nan(value) for name, value in values.items()}


def _speed(record: Record) -> float | None:
    if record.first is None or record.last is None or record.last <= record.first or record.output_tokens < 2:
        return None
    return (record.output_tokens - 1) / (record.last - record.first)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
