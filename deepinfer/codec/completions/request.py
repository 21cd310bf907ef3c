"""A Completions request: one or several prompts, texts or token ids -> a GenerationRequest.

A text is untrusted, as everywhere: spellings of control tokens in it are text (spec/codec.md 10.1).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from deepinfer.codec.conversation import Format
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import (
    MAX_N,
    Body,
    SamplingExtensions,
    Temperature,
    TokenCount,
    TokenId,
    TopP,
    check_stream_options,
    common,
    ignored_fields,
    one_format,
    refuse,
    structured_formats,
)
from deepinfer.codec.generation import GenerationRequest
from deepinfer.codec.openai_models import ResponseFormat, StreamOptions, response_format

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16  # OpenAI's: short, because plain text rarely ends by itself
IGNORED = ("user", "metadata", "store")
REFUSED = {
    "suffix": "filling in between two texts is not supported",
    "use_beam_search": "beam search is not supported; n draws several answers",
    "prompt_logprobs": "log-probabilities of the prompt are not reported",
}


class CompletionRequest(Body, SamplingExtensions):
    """POST /v1/completions."""

    model: str
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    service_tier: str | None = None


def to_generation(body: CompletionRequest) -> GenerationRequest:
    """Raises RequestError naming the field. Choice `prompt * n + i` is the i-th answer to a prompt."""
    for name, advice in REFUSED.items():
        refuse(body, name, advice)
    refuse(body, "best_of", "is not supported; n gives all answers that were drawn", harmless=(1, body.n or 1))
    check_stream_options(body)
    if body.echo and body.logprobs is not None:
        message = "echo: log-probabilities of the prompt are not reported; ask for echo or for logprobs"
        raise RequestError(message, param="echo")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return GenerationRequest(
        prompts=prompts_of(body),
        top_logprobs=body.logprobs,
        format=_format(body),
        ignored=ignored_fields(body, IGNORED, honoured=REFUSED),
        **common(body, max_tokens),
    )


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts, one by one: each a text or a list of ids."""
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt: is empty", param="prompt")
    prompts = [prompt] if isinstance(prompt[0], int) else list(prompt)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"prompt: at most {MAX_PROMPTS} prompts, got {len(prompts)}", param="prompt")
    for i, one in enumerate(prompts):
        if not isinstance(one, str) and not one:
            raise RequestError(f"prompt.{i}: has no tokens", param=f"prompt.{i}")
    return prompts


def _format(body: CompletionRequest) -> Format | None:
    """Nothing shows a plain prompt's model what is wanted, so no format is `shown`."""
    formats = [response_format(body.response_format), *structured_formats(body)]
    found = one_format([one for one in formats if one is not None])
    return found._replace(shown=False) if found is not None else None
