"""Objects that several of OpenAI's protocols answer with: usage, log-probabilities, reasons to finish."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from deepinfer.codec.generation import Finish, TokenLogprob, Usage

LEAST_LOGPROB = -9999.0  # what OpenAI reports for "never"; JSON has no minus infinity


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's counts, and DeepSeek's two for the prefix cache."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "prompt_cache_hit_tokens": usage.cached_tokens,
        "prompt_cache_miss_tokens": usage.prompt_tokens - usage.cached_tokens,
    }


def finish_reason(finish: Finish) -> str:
    """In OpenAI's words. What a deadline or an abort cut off is cut off: "length", never a claim of completeness.

    "error" stays, outside of OpenAI's list: a completion whose numbers broke did not end in any of its ways.
    """
    return "length" if finish.reason in ("deadline", "abort") else finish.reason


def token_text(token: bytes) -> str:
    """A token for a reader: bytes that are no character are spelled \\xNN."""
    return token.decode("utf-8", "backslashreplace")


def clamped(logprob: float) -> float:
    """A number that JSON can hold (NaN counts as never, too)."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def most_likely(entry: TokenLogprob, count: int) -> list[tuple[int, float]]:
    """The `count` most likely ids of a place with their log-probabilities; ties go to the lower id."""
    if not count or not entry.top:
        return []
    ordered = sorted((-clamped(logprob), token_id) for token_id, logprob in entry.top.items())
    return [(token_id, -cost) for cost, token_id in ordered[:count]]


def logprob_object(entry: TokenLogprob, count: int, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    """One token of `logprobs.content` with `count` alternatives."""
    told = _token(token_bytes(entry.token_id), entry.logprob)
    told["top_logprobs"] = [_token(token_bytes(i), logprob) for i, logprob in most_likely(entry, count)]
    return told


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    text, numbers = _spelled(token)
    return {"token": text, "logprob": clamped(logprob), "bytes": numbers}


@lru_cache(maxsize=1 << 16)
def _spelled(token: bytes) -> tuple[str, list[int]]:
    """Text and bytes of a token; the same few thousand come again and again. Nobody changes the list."""
    return token_text(token), list(token)
