"""/tokenize and /detokenize: the ids of a prompt as the model gets it, and the text of ids."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from deepinfer.codec.anthropic import CountTokensRequest, conversation_of, count_body
from deepinfer.codec.body import Body, parse
from deepinfer.codec.chat.request import ChatRequest
from deepinfer.codec.chat.request import to_generation as chat_generation
from deepinfer.codec.errors import RequestError
from deepinfer.codec.generation import GenerationRequest
from deepinfer.server.prepare import encode_prompts
from deepinfer.server.state import ServerState

MOST_TOKENS = 4 << 20  # of /detokenize


class TokenizeRequest(Body):
    """A text (`prompt`), or a conversation as Chat Completions takes it (`messages`, with `tools` and the like)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """The begin token in front of a text; false = without."""
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MOST_TOKENS)]


async def tokenize(state: ServerState, body: TokenizeRequest) -> dict[str, Any]:
    """RequestError."""
    model = state.model
    if body.model is not None:
        model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt: give either prompt or messages", param="prompt")
    context = state.host.client.max_model_len
    if body.messages is None:
        generation = GenerationRequest(model=model.name, prompts=[body.prompt or ""])
    else:
        chat = {**(body.model_extra or {}), "model": model.name, "messages": body.messages}
        generation = chat_generation(parse(ChatRequest, chat))
    encoded = await encode_prompts(generation, model, context=context, threads=state.threads)
    ids = encoded.prompts[0].tolist()
    if body.messages is None and body.add_special_tokens is False and ids[:1] == [model.tokenizer.bos_token_id]:
        ids = ids[1:]
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": context, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [model.tokenizer.token_bytes(token).decode("utf-8", "backslashreplace") for token in ids]
    return answer


async def detokenize(state: ServerState, body: DetokenizeRequest) -> dict[str, Any]:
    """RequestError."""
    model = state.model
    if body.model is not None:
        model.check_name(body.model)
    for at, token in enumerate(body.tokens):
        if token >= model.vocab_size:
            message = f"tokens.{at}: must be from 0 to {model.vocab_size - 1}, got {token}"
            raise RequestError(message, param=f"tokens.{at}")
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}


async def count_tokens(state: ServerState, body: CountTokensRequest) -> dict[str, Any]:
    """RequestError."""
    state.model.check_name(body.model)
    generation = GenerationRequest(model=body.model, conversation=conversation_of(body))
    context = state.host.client.max_model_len
    encoded = await encode_prompts(generation, state.model, context=context, threads=state.threads)
    return count_body(len(encoded.prompts[0]))
