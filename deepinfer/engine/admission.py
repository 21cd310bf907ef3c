"""The door: everything about a request that can be wrong is found here, before anything is allocated."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.engine.errors import InvalidRequestError
from deepinfer.engine.sampling_params import SamplingParams

MAX_LABEL = 256  # characters of a request id, tenant or salt


def check_token_ids(
    field: str, token_ids: Sequence[int] | np.ndarray, vocab_size: int, refused: Mapping[int, str]
) -> None:
    """Raises InvalidRequestError for no tokens, an id outside the vocabulary, or one of `refused` (id -> reason).

    A prompt may have a million ids, so they are looked at all at once, and one by one only to name the wrong entry.
    """
    if len(token_ids) == 0:
        raise InvalidRequestError(field, "is empty; give at least one token")
    if isinstance(token_ids, np.ndarray) or set(map(type, token_ids)) == {int}:  # a bool would pass in an array
        array = np.asarray(token_ids)
        whole = array.ndim == 1 and array.dtype.kind in "iu"
        if whole and array.min() >= 0 and array.max() < vocab_size and not np.isin(array, list(refused)).any():
            return
    ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
    for at, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise InvalidRequestError(
                field, f"entry {at} must be a whole number from 0 to {vocab_size - 1}, got {token!r}"
            )
        if token in refused:
            raise InvalidRequestError(field, f"entry {at}: id {token} {refused[token]}")


def check_label(field: str, value: object) -> None:
    """Raises InvalidRequestError unless the value can name something: text that can be sent, of at most 256
    characters."""
    if not isinstance(value, str) or len(value) > MAX_LABEL:
        raise InvalidRequestError(field, f"must be a text of at most {MAX_LABEL} characters, got {value!r:.80}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidRequestError(field, f"{value!r} holds a lone surrogate")


def check_request(
    length: int,
    params: SamplingParams,
    config: EngineConfig,
    vocab_size: int,
    eos_token_ids: Iterable[int],
) -> int:
    """Checks a request of `length` prompt tokens against the model and the engine; returns the tokens it may generate.

    max_tokens is cut at the end of the context (the output then ends with reason "length"), so prompt + output never
    exceeds max_model_len, which the cache is known to hold (EngineConfig). Raises InvalidRequestError.
    """
    if length >= config.max_model_len:
        raise InvalidRequestError(
            "prompt",
            f"has {length} tokens and the context holds {config.max_model_len} with room for one output token; "
            f"shorten it to {config.max_model_len - 1} or raise max_model_len",
        )
    room = config.max_model_len - length
    if params.min_tokens > room:
        raise InvalidRequestError("min_tokens", f"{params.min_tokens} does not fit: {room} tokens of context are left")
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in ids:
            if token >= vocab_size:
                raise InvalidRequestError(name, f"token ids must be from 0 to {vocab_size - 1}, got {token}")
    both = set(params.stop_token_ids) & set(eos_token_ids)
    if params.ignore_eos and both:
        raise InvalidRequestError(
            "ignore_eos", f"conflicts with stop_token_ids, which lists the end token {min(both)}; drop one of the two"
        )
    if len(params.logit_bias) >= vocab_size and all(bias == -float("inf") for bias in params.logit_bias.values()):
        raise InvalidRequestError("logit_bias", "forbids every token")
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise InvalidRequestError(name, f"must be at most the vocabulary's {vocab_size} ids, got {count}")
    return room if params.max_tokens is None else min(params.max_tokens, room)
