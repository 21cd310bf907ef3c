"""What a caller may ask of the sampler, checked once, when the object is made."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from deepinfer.engine.errors import InvalidRequestError
from deepinfer.engine.structured_output import check_structure, enforced, schema_text
from deepinfer.grammar.structure import Structure

MAX_LOGPROBS = 1000  # per token; a reply of 4,096 tokens with 1,000 alternatives each is already 4 million entries
MAX_STOP_STRINGS = 64
LEAST_TEMPERATURE = 2.0**-126  # the smallest normal float32, in which the sampler keeps it: less is divided by as 0
MAX_LOGIT_BIAS = 100.0  # the range of the OpenAI protocol; -inf forbids an id outright
SEED_LIMIT = 1 << 64
INTEGER_LIMIT = 1 << 31  # of whole numbers without another bound: they must fit the engine's int32 tables


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, when to stop, and what to report. Raises InvalidRequestError naming the field.

    The order of the steps (spec/dspark.md section 10): float32 copy of the logits, logit_bias, repetition penalty,
    presence and frequency penalties, min_tokens mask, structure, temperature, min_p, top_k, top_p, draw.
    """

    n: int = 1
    """Completions per prompt; they share the prompt's computation and draw from different random streams."""
    temperature: float = 1.0
    """0 = the most likely token, ties to the lowest id; otherwise logits are divided by it. What is no normal float32
    (below 1.2e-38) counts as 0."""
    top_k: int = 0
    """Keep the k most likely tokens (ties to the lowest id); 0 or -1 = all."""
    top_p: float = 1.0
    """Keep the shortest list of most likely tokens whose probability reaches this sum."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that the output already holds."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in the prompt or the output."""
    max_tokens: int | None = 128
    """Longest output in tokens; None = to the end of the context."""
    min_tokens: int = 0
    """No end token, stop token or stop string may end the output before this many tokens."""
    stop: str | Collection[str] = ()
    """Strings that end the output; matched on the text, across token borders."""
    stop_token_ids: Collection[int] = ()
    """Token ids that end the output."""
    include_stop_str_in_output: bool = False
    """Leave the stop string (or the stop token's text) at the end of the text."""
    ignore_eos: bool = False
    """Do not stop at the model's end token."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> number added to its logit, -100 to 100, or -inf to forbid it."""
    logprobs: int | None = None
    """Also report this many most likely tokens per position, from the raw logits; None = only the chosen token's."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens (0 = only the token that stands there); None = off."""
    seq_seed: int | None = None
    """Seed of this request's random stream, 0 to 2**64 - 1; None = one drawn when the request is admitted."""
    skip_special_tokens: bool = True
    """Leave tokens marked special in the tokenizer out of the text."""
    priority: int = 0
    """Lower runs first; equal priorities run in order of arrival."""
    deadline: float | None = None
    """Seconds from submission after which the request ends with what it has and reason "deadline"."""
    ttft_deadline: float | None = None
    """Seconds from submission by which the first token must come: a request that still waits and cannot make it is
    dropped with reason "deadline" and costs nothing. Once its computation has begun it runs on."""
    json_schema: Any = None
    """The output is a JSON text that this schema allows: a dict, True (any JSON), or the schema's own text.

    Of json_schema, regex, ebnf and structure at most one. The output may end only where it is whole, but max_tokens, a
    stop string or a stop token may cut it short. Where logit_bias or min_tokens forbid all that may follow they give
    way."""
    regex: str | None = None
    """The output matches this pattern as a whole (Rust's regex syntax)."""
    ebnf: str | None = None
    """The output is a sentence of this grammar: GBNF with the rule `root`, or Lark with the rule `start`."""
    structure: Structure | None = None
    """What is enforced on content and calls, behind <think> or not: what a server asks for."""

    def __post_init__(self) -> None:
        put = object.__setattr__  # the class is frozen; this is the one place that normalises its fields
        put(self, "stop", (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop))
        put(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError("logit_bias", f"must map token ids to numbers, got {self.logit_bias!r}")
        put(self, "logit_bias", dict(self.logit_bias))
        put(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        put(self, "json_schema", schema_text(self.json_schema))
        _check(self)

    @property
    def greedy(self) -> bool:
        """True if tokens are chosen by argmax and no noise is drawn."""
        return self.temperature < LEAST_TEMPERATURE

    @property
    def enforced(self) -> Structure | None:
        """What the output must be, whichever field asks for it; None = anything."""
        return enforced(self)

    @property
    def penalised(self) -> bool:
        """True if the history of tokens changes the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def truncated(self) -> bool:
        """True if min_p, top_k or top_p may drop tokens."""
        return not self.greedy and (self.min_p > 0 or self.top_k > 0 or self.top_p < 1)

    def with_changes(self, **changes: Any) -> "SamplingParams":
        """A checked copy with some fields replaced; an unknown name raises InvalidRequestError."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise InvalidRequestError(name, f"is not a sampling parameter; known are {', '.join(sorted(known))}")
        return replace(self, **changes)


def _check(p: SamplingParams) -> None:
    """The one place where ranges stand."""
    _integer("n", p.n, 1, 1024)
    _number("temperature", p.temperature, 0, 100)
    _integer("top_k", p.top_k, 0, None, "a whole number >= 1, or 0 or -1 for all")
    _number("top_p", p.top_p, 0, 1, low_open=True)
    _number("min_p", p.min_p, 0, 1)
    _number("presence_penalty", p.presence_penalty, -2, 2)
    _number("frequency_penalty", p.frequency_penalty, -2, 2)
    _number("repetition_penalty", p.repetition_penalty, 0.01, 10)
    if p.max_tokens is not None:
        _integer("max_tokens", p.max_tokens, 1, None, "a whole number >= 1, or None for the rest of the context")
    _integer("min_tokens", p.min_tokens, 0, None)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequestError("min_tokens", f"{p.min_tokens} is more than max_tokens = {p.max_tokens}")
    assert isinstance(p.stop, tuple) and isinstance(p.stop_token_ids, tuple)
    if len(p.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(p.stop)}")
    for text in p.stop:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError("stop", f"every stop string must be a text of at least 1 character, got {text!r}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidRequestError("stop", f"{text!r} holds a lone surrogate, which no output can contain")
    for token in p.stop_token_ids:
        _integer("stop_token_ids", token, 0, None, "token ids >= 0")
    for token, bias in p.logit_bias.items():
        _integer("logit_bias", token, 0, None, "token ids >= 0 as keys")
        if bias != -math.inf:
            _number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    if p.logprobs is not None:
        _integer("logprobs", p.logprobs, 0, MAX_LOGPROBS)
    if p.prompt_logprobs is not None:
        _integer("prompt_logprobs", p.prompt_logprobs, 0, MAX_LOGPROBS)
    if p.seq_seed is not None:
        _integer("seq_seed", p.seq_seed, 0, SEED_LIMIT - 1)
    _integer("priority", p.priority, -INTEGER_LIMIT, INTEGER_LIMIT - 1)
    for name in ("deadline", "ttft_deadline"):
        if getattr(p, name) is not None:
            _number(name, getattr(p, name), 0, 1e9, low_open=True)
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
        if not isinstance(getattr(p, name), bool):
            raise InvalidRequestError(name, f"must be True or False, got {getattr(p, name)!r}")
    check_structure(p)


def _tuple(name: str, value: Any) -> tuple:
    if value is None:
        return ()
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError(name, f"must be a list, got {value!r}")
    return tuple(value)


def _integer(name: str, value: Any, low: int | None, high: int | None, accepted: str | None = None) -> None:
    # bool is an int to Python, and never what a caller means by a count
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and (low is None or value >= low) and value <= (INTEGER_LIMIT - 1 if high is None else high):
        return
    if whole and high is None and value >= INTEGER_LIMIT:
        raise InvalidRequestError(name, f"must be below {INTEGER_LIMIT}, got {value!r}")
    if accepted is None:
        low_text = "" if low is None else f" >= {low}"
        accepted = "a whole number" + (low_text if high is None else f" from {low} to {high}")
    raise InvalidRequestError(name, f"must be {accepted}, got {value!r}")


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    finite = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    if finite and (value > low if low_open else value >= low) and value <= high:
        return
    above = f"> {low:g}" if low_open else f">= {low:g}"
    below = "" if high == math.inf else f" and <= {high:g}"
    raise InvalidRequestError(name, f"must be a finite number {above}{below}, got {value!r}")
