"""What one step did, and the sum of all of them: plain slotted objects of ints and floats, filled without a lock.

One thread fills them (the one that steps); others get copies, between processes as msgpack.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from deepinfer.metrics.drafts import DraftStats
from deepinfer.metrics.histogram import COMPILE_SECONDS, PHASE_SECONDS, STEP_SECONDS, TOKENS, Histogram

PHASES = ("schedule", "prepare", "settle", "output")
"""What the host does in a step: choose, build the input, take in the results, hand them on."""


@dataclass(slots=True)
class StepStats:
    """One step: first what it did (`FLOWS` and `drafts`, zero in a fresh object), then how things stood after it
    (`LEVELS`)."""

    seconds: float = 0.0
    """From the step before, or from this one's start after a pause, to this one's end."""
    decode_tokens: int = 0
    """Rows of sequences whose known tokens are all computed, without those of `draft_tokens`."""
    draft_tokens: int = 0
    """Rows of drafts that were verified."""
    draft_budget: int = 0
    """Drafts that the step's plan allowed to verify."""
    prefill_tokens: int = 0
    """Rows of prompts (and of output computed again after a preemption), without those of `replay_tokens`."""
    replay_tokens: int = 0
    """Rows below the end of a hit, computed to fill the windows; they write no blocks."""
    decoder_rows_kept: int = 0
    """Rows that also ran through the layers after the last KV source."""
    decoder_rows_skipped: int = 0
    """Rows that did not (truncation of prefill)."""
    generated_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests that got a slot for the first time."""
    prompt_tokens_cached: int = 0
    """Those of them that no row computes, taken from blocks in device memory."""
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Tokens found."""
    windows_hit: int = 0
    """Hits whose window was stored."""
    windows_replayed: int = 0
    """Hits whose window was computed again."""
    preemptions_recompute: int = 0
    preemptions_offload: int = 0
    corrupted: int = 0
    """Sequences ended because their logits were not finite."""
    fsm_errors: int = 0
    """Sequences ended because their grammar let nothing follow, or its matcher failed."""
    schedule_seconds: float = 0.0
    prepare_seconds: float = 0.0
    settle_seconds: float = 0.0
    output_seconds: float = 0.0
    device_seconds: float = 0.0
    """The device computed."""
    idle_seconds: float = 0.0
    """The device waited although there was work."""
    drafts: DraftStats | None = None
    """What became of the drafts; None if nobody decoded, or nothing is drafted."""

    running: int = 0
    """Sequences with a slot."""
    waiting: int = 0
    """Sequences without."""
    waiting_by_reason: dict[str, int] = field(default_factory=dict)
    """"room", "prefix", "grammar", ...; sums to `waiting`."""
    blocks_free: int = 0
    """Never used or forgotten."""
    blocks_used: int = 0
    """In a sequence's table."""
    blocks_cached: int = 0
    """In no table, kept for hits; they are given away when free ones run out."""
    slots_used: int = 0
    slots_total: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return self.decode_tokens + self.draft_tokens + self.prefill_tokens + self.replay_tokens

    @property
    def kind(self) -> str:
        """ "decode", "prefill" or "mixed"; "empty" if the step computed nothing."""
        if self.prefill_tokens or self.replay_tokens:
            return "mixed" if self.decode_tokens else "prefill"
        return "decode" if self.decode_tokens else "empty"

    @property
    def blocks_total(self) -> int:
        return self.blocks_free + self.blocks_used + self.blocks_cached


LEVELS = (
    "running", "waiting", "waiting_by_reason", "blocks_free", "blocks_used", "blocks_cached", "slots_used",
    "slots_total",
)  # fmt: skip
FLOWS = tuple(name for name in StepStats.__dataclass_fields__ if name not in (*LEVELS, "drafts"))
_flow_values = attrgetter(*FLOWS)  # one call into C instead of one per field
_level_values = attrgetter(*LEVELS)
_phase_values = attrgetter(*(f"{phase}_seconds" for phase in PHASES))


def _by_kind() -> dict[str, Histogram]:
    return {kind: Histogram(STEP_SECONDS) for kind in ("decode", "prefill", "mixed")}


def _by_phase() -> dict[str, Histogram]:
    return {phase: Histogram(PHASE_SECONDS) for phase in PHASES}


@dataclass(slots=True)
class EngineStats:
    """All steps since the engine started. `totals`: flows summed, levels as they stood last; its `drafts` stay None,
    those of all steps are in `drafts`."""

    steps: int = 0
    """Those that computed something."""
    totals: StepStats = field(default_factory=StepStats)
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    step_seconds: dict[str, Histogram] = field(default_factory=_by_kind)
    phase_seconds: dict[str, Histogram] = field(default_factory=_by_phase)
    drafts: DraftStats = field(default_factory=DraftStats)
    grammar_compile_seconds: Histogram = field(default_factory=lambda: Histogram(COMPILE_SECONDS))
    """Those that were not in the cache, broken ones too."""
    grammar_cache: dict[str, int] = field(default_factory=lambda: {"hit": 0, "miss": 0, "error": 0})
    """Grammars asked for: there or on their way already, compiled, or refused."""
    rejections: dict[str, int] = field(default_factory=dict)
    """Requests refused at the door, by reason: the field that was wrong, "draining", "malformed"."""
    last_step_age: float = 0.0
    """Seconds since the last step ended while there is work, else 0. Set by whoever hands the numbers out."""

    def add(self, step: StepStats) -> None:
        """Takes in one step; the object may be used again afterwards."""
        totals = self.totals
        for name, value in zip(FLOWS, _flow_values(step), strict=True):
            if value:
                setattr(totals, name, getattr(totals, name) + value)
        for name, value in zip(LEVELS, _level_values(step), strict=True):
            setattr(totals, name, value)
        totals.waiting_by_reason = dict(step.waiting_by_reason)
        if step.drafts is not None:
            self.drafts.merge(step.drafts)
        kind = step.kind
        if kind == "empty":
            return
        self.steps += 1
        self.step_tokens.observe(step.num_tokens)
        self.step_seconds[kind].observe(step.seconds)
        for histogram, seconds in zip(self.phase_seconds.values(), _phase_values(step), strict=True):
            if seconds:  # a phase that nobody timed is not one that took no time
                histogram.observe(seconds)

    def add_output(self, seconds: float) -> None:
        """Time that a step's results took on their way out, known only after the step was added."""
        self.totals.output_seconds += seconds
        self.phase_seconds["output"].observe(seconds)

    def add_grammar(self, result: str, seconds: float) -> None:
        """A grammar was asked for and, after so long, there: "hit", "miss" or "error"."""
        self.grammar_cache[result] = self.grammar_cache.get(result, 0) + 1
        if result != "hit":
            self.grammar_compile_seconds.observe(seconds)

    def reject(self, reason: str) -> None:
        """Counts a request that was refused."""
        self.rejections[reason] = self.rejections.get(reason, 0) + 1


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """One request that has ended; times in seconds, None where the event never came."""

    prompt_tokens: int
    max_tokens: int | None
    """As asked for; None = to the end of the context."""
    completion_tokens: list[int]
    """Per completion."""
    finish_reasons: list[str]
    """Per completion."""
    queue: float | None = None
    """Submission to first scheduled step."""
    ttft: float | None = None
    """Submission to first token."""
    time_per_token: float | None = None
    """Mean between tokens after the first."""
    e2e: float
    """Submission to end."""

    @property
    def n(self) -> int:
        return len(self.completion_tokens)
