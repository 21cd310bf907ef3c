"""The response object around the output: what of the request it repeats, and its counts."""

from __future__ import annotations

from typing import Any

from deepinfer.codec.body import Part
from deepinfer.codec.generation import GenerationRequest, Usage, WriterContext
from deepinfer.codec.responses.request import ResponsesRequest


def response_object(body: ResponsesRequest, generation: GenerationRequest, context: WriterContext) -> dict[str, Any]:
    """A response in progress, whose output is empty. `store` is what the request says, and true where it says nothing:
    a server that keeps nothing must set body.store to False."""
    reasoning = body.reasoning
    conversation = generation.conversation
    thinking = conversation is not None and conversation.thinking
    effort = reasoning.effort if reasoning is not None and reasoning.effort is not None else "high"
    text = _plain(body.text) if body.text is not None else {}
    sampling = generation.sampling
    return {
        "id": f"resp_{context.id}",
        "object": "response",
        "created_at": context.created,
        "status": "in_progress",
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": generation.max_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": context.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort if thinking else "none", "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default" if generation.service_tier in (None, "auto") else generation.service_tier,
        "store": body.store is not False,
        "temperature": sampling.get("temperature", 1.0),
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": _plain(body.tool_choice) if body.tool_choice is not None else "auto",
        "tools": [_plain(tool) for tool in body.tools or ()],
        "top_logprobs": generation.top_logprobs or 0,
        "top_p": sampling.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "system_fingerprint": context.fingerprint,
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _plain(value: Any) -> Any:
    """As the client sent it."""
    return value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, Part) else value
