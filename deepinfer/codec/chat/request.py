"""A Chat Completions request -> a GenerationRequest (spec/codec.md 7.1)."""

from __future__ import annotations

from deepinfer.codec.chat.history import turns_of
from deepinfer.codec.chat.models import ChatRequest as ChatRequest
from deepinfer.codec.chat.tools import choice_of, tools_of, uses_functions
from deepinfer.codec.conversation import Conversation, Format
from deepinfer.codec.errors import RequestError
from deepinfer.codec.fields import (
    check_stream_options,
    common,
    ignored_fields,
    one_format,
    refuse,
    structured_formats,
    thinking_and_effort,
)
from deepinfer.codec.generation import GenerationRequest
from deepinfer.codec.openai_models import response_format

IGNORED = ("user", "metadata", "store", "safety_identifier", "prediction", "verbosity")
REFUSED = {
    "audio": "spoken answers are not supported",
    "web_search_options": "this server does not search the web; offer a tool that does",
    "suffix": "is not supported",
    "use_beam_search": "beam search is not supported; n draws several answers",
    "echo": "is a field of /v1/completions",
    "prompt_logprobs": "log-probabilities of the prompt are not reported",
}


def to_generation(body: ChatRequest) -> GenerationRequest:
    """Raises RequestError naming the field in the client's spelling."""
    _refuse_unsupported(body)
    check_stream_options(body)
    tools = tools_of(body)
    choice = choice_of(body, tools)
    content = _format(body)
    if content is not None and not content.shown and choice.mode == "required":
        message = f"{content.param}: a call is required, so there is no content to give a form to"
        raise RequestError(message, param=content.param)
    thinking, effort = _thinking(body)
    conversation = Conversation(
        turns=turns_of(body),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False and not uses_functions(body),
        thinking=thinking,
        effort=effort,
        format=content if content is not None and content.shown else None,
    )
    return GenerationRequest(
        conversation=conversation,
        top_logprobs=_top_logprobs(body),
        format=content,
        thinking_budget=body.thinking_token_budget if thinking else None,
        include_reasoning=body.include_reasoning is not False,
        ignored=_ignored(body),
        **common(body, _max_tokens(body)),
    )


def _refuse_unsupported(body: ChatRequest) -> None:
    for name, advice in REFUSED.items():
        refuse(body, name, advice)
    refuse(body, "best_of", "is not supported; n gives all answers that were drawn", harmless=(1,))
    refuse(body, "modalities", "only text can be answered", harmless=([], ["text"]))


def _thinking(body: ChatRequest) -> tuple[bool, int]:
    """The request's own fields go before those for a template."""
    template = body.chat_template_kwargs
    effort, kind = body.reasoning_effort, body.thinking.type if body.thinking else None
    if template is not None:
        effort = template.reasoning_effort if effort is None else effort
        switch = template.enable_thinking if template.thinking is None else template.thinking
        kind = "disabled" if kind is None and switch is False else kind
    return thinking_and_effort(effort, kind)


def _format(body: ChatRequest) -> Format | None:
    formats = [response_format(body.response_format), *structured_formats(body)]
    return one_format([one for one in formats if one is not None])


def _max_tokens(body: ChatRequest) -> int | None:
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        message = f"max_tokens: is {older}, but its newer name max_completion_tokens says {newer}"
        raise RequestError(message, param="max_tokens")
    return older if newer is None else newer


def _top_logprobs(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs: needs logprobs to be true", param="top_logprobs")
        return None
    return body.top_logprobs or 0


def _ignored(body: ChatRequest) -> list[str]:
    names = ignored_fields(body, IGNORED, honoured=(*REFUSED, "best_of", "modalities"))
    if any(message.name is not None and message.role != "function" for message in body.messages):
        names.append("messages.name")
    if body.thinking_token_budget is not None and not _thinking(body)[0]:
        names.append("thinking_token_budget")
    return names
