"""A GenerationRequest -> what the engine is given: prompts of ids, sampling parameters, grammar. All that can be wrong
with it is found here, but for what only the engine knows.
"""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from deepinfer.codec.conversation import Conversation, Tool
from deepinfer.codec.encoder import checked_ids, encode
from deepinfer.codec.errors import RequestError
from deepinfer.codec.generation import GenerationRequest
from deepinfer.codec.template import plain_prompt, render
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.grammar.limits import check_limits
from deepinfer.grammar.structure import Structure
from deepinfer.server.constraints import callable_tools, structure_of
from deepinfer.server.models import ServedModel
from deepinfer.server.settings import ServerSettings

SMALL_TEXT = 4000  # characters that are encoded at once (a few ms) rather than sent to a thread
BUDGET, THINKING_BUDGET, MOST_THINKING_BUDGET = 8192, 65536, 131072  # spec/codec.md 2
MOST_EFFORT = 100
TOO_LONG = "context_length_exceeded"
HOSTED_TOP_P = 0.95  # with thinking; spec/codec.md 2
TIERS = {"priority": -10, "flex": 10, "batch": 20}
"""Priorities of service tiers; all others have 0. Lower ones run first."""


class Encoded(NamedTuple):
    prompts: list[np.ndarray]  # int32 [length] each
    starts: Literal["thinking", "content"]  # where the outputs begin
    continued: str  # content that the prompt holds already


@dataclass(frozen=True, kw_only=True)
class Job:
    """What runs. Completion i of prompt p has the index p * n + i in the answer."""

    prompts: list[np.ndarray]
    """int32 [length] each."""
    params: SamplingParams
    starts: Literal["thinking", "content"]
    """Where the outputs begin."""
    tools: list[Tool] | None
    """That may be called; None = markup of calls has no meaning."""
    hides_calls: bool
    """There are tools, and they must not be called: calls are dropped."""
    stop: tuple[str, ...]
    include_stop: bool
    max_calls: int | None
    structure: Structure | None
    wants_logprobs: bool

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


async def encode_prompts(
    generation: GenerationRequest, model: ServedModel, *, context: int, threads: Executor
) -> Encoded:
    """Renders and encodes; long texts in `threads`. RequestError."""
    if _size_of(generation) <= SMALL_TEXT:
        return _encode(generation, model, context)
    return await asyncio.get_running_loop().run_in_executor(threads, _encode, generation, model, context)


async def prepare(
    generation: GenerationRequest, model: ServedModel, settings: ServerSettings, *, context: int, threads: Executor
) -> Job:
    """Encodes, and resolves what was left open. context: tokens that prompt and answer may have together. Raises
    RequestError, InvalidRequestError naming a field of SamplingParams, and GrammarError for a structure beyond its
    limits. One with the code TOO_LONG has the engine's name for the field, None = of the prompt."""
    conversation = generation.conversation
    prompts, starts, continued = await encode_prompts(generation, model, context=context, threads=threads)
    longest = max(len(prompt) for prompt in prompts)
    structure = structure_of(
        generation,
        thinking=starts == "thinking",
        continued=continued,
        # whoever ignores the end cannot have an end enforced that nobody asked for
        tool_grammar=settings.tool_grammar and not generation.sampling.get("ignore_eos"),
    )
    tools = None if conversation is None else callable_tools(conversation)
    fields = sampling_fields(generation, model, settings, thinking=starts == "thinking")
    if conversation is not None and conversation.tools and not tools and model.call_id is not None:
        fields["logit_bias"] = {**fields.get("logit_bias", {}), model.call_id: -math.inf}
    if structure is not None:
        check_limits(structure)  # SamplingParams would not say whether content or tools are to blame
        fields["structure"] = structure
    params = SamplingParams(
        **fields,
        n=generation.n,
        max_tokens=output_budget(generation, context, longest),
        stop_token_ids=_stop_ids(generation, model),
        logprobs=generation.top_logprobs or None,
        priority=_priority(generation),
        deadline=settings.request_timeout,
        ttft_deadline=settings.first_token_timeout,
    )
    return Job(
        prompts=prompts,
        params=params,
        starts=starts,
        tools=tools or None,
        hides_calls=conversation is not None and bool(conversation.tools) and not tools,
        stop=generation.stop,
        include_stop=generation.include_stop,
        max_calls=1 if conversation is not None and not conversation.parallel_tool_calls else None,
        structure=structure,
        wants_logprobs=generation.top_logprobs is not None,
    )


def sampling_fields(
    generation: GenerationRequest, model: ServedModel, settings: ServerSettings, *, thinking: bool
) -> dict[str, Any]:
    """SamplingParams' fields: the request's, else the checkpoint's, under the server's policy."""
    given = {name: value for name, value in generation.sampling.items() if name != "stop_token_ids"}
    fields = {**model.defaults, **given}
    if settings.sampling_policy == "hosted":
        if thinking:
            fields |= {"temperature": 1.0, "top_p": max(HOSTED_TOP_P, fields.get("top_p", 1.0))}
        else:
            fields["top_p"] = 1.0
    bias = dict(fields.get("logit_bias", {}))
    if generation.allowed_token_ids is not None:
        bias |= _all_but(generation.allowed_token_ids, model.vocab_size)
    for word in generation.bad_words:
        bias |= _ban(word, model)
    return fields | {"logit_bias": bias} if bias else fields


def _priority(generation: GenerationRequest) -> int:
    """The tier's, or the request's own: no better than the best tier's."""
    if generation.priority is None:
        return TIERS.get(generation.service_tier or "", 0)
    return max(generation.priority, min(TIERS.values()))


def _stop_ids(generation: GenerationRequest, model: ServedModel) -> list[int]:
    """What the request names, and what no answer holds; but whoever ignores the end wants max_tokens in any case."""
    given = generation.sampling.get("stop_token_ids", ())
    return sorted({*given, *(() if generation.sampling.get("ignore_eos") else model.role_ids)})


def output_budget(generation: GenerationRequest, context: int, prompt_tokens: int) -> int:
    """Most tokens of an output (spec/codec.md 2). RequestError if the context does not hold them."""
    room = context - prompt_tokens
    if room < 1:
        raise _too_long(context, f"the prompt has {prompt_tokens} tokens", "prompt_token_ids")
    if generation.max_tokens is None:
        return min(_default_budget(generation.conversation), room)
    if generation.max_tokens > room and not generation.clip_max_tokens:
        raise _too_long(context, f"the prompt has {prompt_tokens} and this adds {generation.max_tokens}", "max_tokens")
    return min(generation.max_tokens, room)


def _too_long(context: int, what: str, param: str) -> RequestError:
    """param: the engine's name of what is to blame."""
    return RequestError(
        f"the context holds {context} tokens, prompt and answer together, and {what}; shorten one of them",
        param=param,
        code=TOO_LONG,
    )


def _default_budget(conversation: Conversation | None) -> int:
    if conversation is None or not conversation.thinking:
        return BUDGET
    return MOST_THINKING_BUDGET if conversation.effort >= MOST_EFFORT else THINKING_BUDGET


def _size_of(generation: GenerationRequest) -> int:
    """About how many characters there are to encode."""
    conversation = generation.conversation
    if conversation is None:
        return sum(len(prompt) for prompt in generation.prompts or ())
    turns = sum(len(turn.text) + len(turn.reasoning or "") + 64 for turn in conversation.turns)
    calls = sum(len(call.arguments) for turn in conversation.turns for call in turn.tool_calls)
    return turns + calls + 400 * len(conversation.tools)


def _encode(generation: GenerationRequest, model: ServedModel, context: int) -> Encoded:
    if generation.conversation is not None:
        rendered = render(generation.conversation)
        if rendered.images:
            param = rendered.images[0].param
            raise RequestError(f"{param}: pictures are not built yet; this server reads text alone", param=param)
        ids = encode(rendered, model.tokenizer, max_tokens=context)
        return Encoded([ids], rendered.starts, rendered.continued)
    assert generation.prompts is not None
    return Encoded([_plain_ids(prompt, model, context) for prompt in generation.prompts], "content", "")


def _plain_ids(prompt: str | list[int], model: ServedModel, context: int) -> np.ndarray:
    """Ids of a prompt of /v1/completions: text is never taken for control tokens."""
    if isinstance(prompt, str):
        return encode(plain_prompt(prompt), model.tokenizer, max_tokens=context)
    return checked_ids(prompt, model.tokenizer, model.vocab_size)


def _all_but(allowed: list[int], vocab_size: int) -> dict[int, float]:
    if not allowed:
        raise RequestError("allowed_token_ids: allows nothing; leave it out", param="allowed_token_ids")
    if max(allowed) >= vocab_size:
        message = f"allowed_token_ids: ids must be from 0 to {vocab_size - 1}, got {max(allowed)}"
        raise RequestError(message, param="allowed_token_ids")
    return dict.fromkeys(set(range(vocab_size)) - set(allowed), -math.inf)


def _ban(word: str, model: ServedModel) -> dict[int, float]:
    """A word of one token, at the beginning of a text and behind a blank."""
    ids = [model.tokenizer.encode_text(spelling) for spelling in (word, f" {word.lstrip()}")]
    if not any(len(each) == 1 for each in ids):
        message = f"bad_words: {word!r:.80} takes several tokens; only words of one token can be banned"
        raise RequestError(message, param="bad_words")
    return {each[0]: -math.inf for each in ids if len(each) == 1}
