"""The whole way: ids that the model drew -> parser -> writer -> the SDK -> history -> ids of the next prompt.

They begin with the last prompt and the very ids that were drawn: an agent's next turn finds its past in the prefix
cache.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_answers import CONTEXT, Output, anthropic_client, openai_client, outputs, play

from deepinfer.codec import anthropic, responses
from deepinfer.codec.body import parse
from deepinfer.codec.conversation import Conversation, ToolCall, Turn
from deepinfer.codec.encoder import encode
from deepinfer.codec.events import Event
from deepinfer.codec.parsing import OutputParser
from deepinfer.codec.spellings import EOS
from deepinfer.codec.template import render
from deepinfer.codec.tokenizer import Tokenizer

NAMES = ("get_weather", "get_time")
SCHEMA = {"type": "object"}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(Path(__file__).parents[2] / "models" / "nano")


def plainly_spelled(output: Output) -> Output:
    """Anthropic's clients send a call's input back as an object: how its JSON was spelled is lost, and only what is
    spelled as prompts do comes back to the letter."""
    calls = [
        call._replace(arguments=json.dumps(json.loads(call.arguments), ensure_ascii=False)) for call in output.calls
    ]
    return output._replace(calls=tuple(calls))


def ids_of(conversation: Conversation | None) -> list[int]:
    assert conversation is not None
    return encode(render(conversation), tokenizer()).tolist()


def drawn(conversation: Conversation, output: Output) -> list[int]:
    """What a model that says `output` draws behind the prompt of `conversation`."""
    calls = tuple(ToolCall(f"id_{i}", call.name, call.arguments) for i, call in enumerate(output.calls))
    said = Turn(role="assistant", text=output.text, reasoning=output.reasoning, tool_calls=calls)
    results = [Turn(role="tool", text="ok", tool_call_id=call.id) for call in calls]
    whole = ids_of(replace(conversation, turns=(*conversation.turns, said, *results)))
    prompt = ids_of(conversation)
    assert whole[: len(prompt)] == prompt
    end = whole.index(tokenizer().control_id(EOS), len(prompt))
    return whole[len(prompt) : end + 1]


def read(conversation: Conversation, token_ids: list[int], burst: int) -> tuple[list[Event], Any]:
    """The events of an output that comes in bursts of tokens, and how it ended."""
    numbers = itertools.count()
    parser = OutputParser(
        tokenizer(),
        starts=render(conversation).starts,
        tools=conversation.tools,
        make_id=lambda: f"id_{next(numbers)}",
    )
    events = [event for at in range(0, len(token_ids), burst) for event in parser.push(token_ids[at : at + burst])]
    events += parser.finish("stop")
    return events, parser.result


TURNS = st.lists(outputs(NAMES), min_size=1, max_size=2)


@settings(deadline=None, max_examples=25)
@given(TURNS, st.booleans(), st.integers(1, 7), st.sampled_from(["none", "high"]))
def test_the_next_prompt_of_responses_begins_with_what_was_drawn(
    turns: list[Output], streams: bool, burst: int, effort: str
) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
    for output in turns:
        output = output if effort != "none" else output._replace(reasoning="")
        fields = {"model": "flash", "input": items, "tools": tools, "stream": streams, "reasoning": {"effort": effort}}
        body = parse(responses.ResponsesRequest, fields)
        generation = responses.to_generation(body)
        assert generation.conversation is not None
        token_ids = drawn(generation.conversation, output)
        events, finish = read(generation.conversation, token_ids, burst)
        made = responses.writer(body, generation, CONTEXT)
        client = openai_client(play(made, events, finish), made.media_type)
        if streams:
            with client.responses.stream(model="flash", input="Hi") as stream:
                response: Any = stream.get_final_response()
        else:
            response = client.responses.create(model="flash", input="Hi")
        items = [*items, *(item.to_dict() for item in response.output)]
        called = [item.call_id for item in response.output if item.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": call_id, "output": "ok"} for call_id in called]
        items.append({"role": "user", "content": "go on"})
        if not response.output:
            return  # nothing was said, and nothing of it comes back
        again = responses.to_generation(parse(responses.ResponsesRequest, fields | {"input": items})).conversation
        before = ids_of(generation.conversation) + token_ids
        assert ids_of(again)[: len(before)] == before


@settings(deadline=None, max_examples=25)
@given(TURNS, st.booleans(), st.integers(1, 7), st.sampled_from(["disabled", "adaptive"]))
def test_the_next_prompt_of_messages_begins_with_what_was_drawn(
    turns: list[Output], streams: bool, burst: int, thinking: str
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    asked: Any = {"model": "flash", "max_tokens": 9, "messages": messages}
    for output in turns:
        output = plainly_spelled(output if thinking != "disabled" else output._replace(reasoning=""))
        fields = {**asked, "messages": messages, "tools": tools, "stream": streams, "thinking": {"type": thinking}}
        body = parse(anthropic.MessagesRequest, fields)
        generation = anthropic.to_generation(body)
        assert generation.conversation is not None
        token_ids = drawn(generation.conversation, output)
        events, finish = read(generation.conversation, token_ids, burst)
        made = anthropic.writer(body, generation, CONTEXT)
        client = anthropic_client(play(made, events, finish), made.media_type)
        if streams:
            with client.messages.stream(**asked) as stream:
                message: Any = stream.get_final_message()
        else:
            message = client.messages.create(**asked)
        uses = [block.id for block in message.content if block.type == "tool_use"]
        results: list[Any] = [{"type": "tool_result", "tool_use_id": use, "content": "ok"} for use in uses]
        after = {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}
        said = {"role": "assistant", "content": [block.to_dict() for block in message.content]}
        messages = [*messages, said, after]
        again = anthropic.to_generation(parse(anthropic.MessagesRequest, {**fields, "messages": messages})).conversation
        before = ids_of(generation.conversation) + token_ids
        assert ids_of(again)[: len(before)] == before
