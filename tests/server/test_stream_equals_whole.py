"""A streamed answer, put together by the official clients, is the answer that comes whole, whatever was asked and
wherever it was cut.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from asking import PERSON, QUESTION, STORY, TWO_CITIES, chat_tool, messages_tool, responses_tool
from openai.lib.streaming.chat import ChatCompletionStreamState

SEEDS = range(5)  # requests of each protocol; 80 were tried


@pytest.fixture(scope="module")
def gpt(nano_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{nano_server}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def claude(nano_server: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=nano_server, api_key="none", max_retries=0, timeout=120) as client:
        yield client


class Wishes:
    """What one request asks for, in the words of no protocol."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.question = chance.choice([QUESTION, STORY, TWO_CITIES, TWO_CITIES])
        self.effort = chance.choice(["none", "low", "high"])
        self.tools = chance.choice([None, "auto", "required", "none"]) if self.question == TWO_CITIES else None
        self.schema = self.tools is None and chance.random() < 0.3
        self.parallel = chance.random() < 0.7
        self.max_tokens = chance.choice([1, 2, 7, 20, 45, 80, 300])
        self.stop = chance.choice([None, None, [" is"], ["the", "capital of"], ["e"]])
        self.sampling = chance.choice([{"temperature": 0}, {"temperature": 1.0, "seed": seed}])


CHANGING = {"id", "call_id", "created", "created_at", "completed_at", "usage", "parsed", "parsed_arguments", "index"}


def without_ids(value: Any) -> Any:
    """Decoded JSON without what differs from answer to answer, and without what is empty: a client that puts a stream
    together has nothing where nothing came."""
    if isinstance(value, dict):
        kept = {key: without_ids(item) for key, item in value.items() if key not in CHANGING}
        return {key: item for key, item in kept.items() if item not in (None, "", [], {})}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", SEEDS)
def test_a_streamed_chat_is_the_whole_one(gpt: openai.OpenAI, seed: int) -> None:
    asked = Wishes(seed)
    fields: dict[str, Any] = {"model": "nano", "messages": [{"role": "user", "content": asked.question}]}
    fields |= {"max_tokens": asked.max_tokens, "reasoning_effort": asked.effort, "stop": asked.stop, **asked.sampling}
    fields["n"] = random.Random(seed).choice([1, 1, 2])
    if asked.tools is not None:
        fields |= {"tools": [chat_tool()], "tool_choice": asked.tools, "parallel_tool_calls": asked.parallel}
    elif seed % 2:
        fields |= {"logprobs": True, "top_logprobs": 2}
    if asked.schema:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    whole = gpt.chat.completions.create(**fields)
    state = ChatCompletionStreamState()
    for chunk in gpt.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        state.handle_chunk(chunk)
    streamed = state.current_completion_snapshot
    assert plain(streamed) == plain(whole)
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    assert streamed.usage.completion_tokens_details == whole.usage.completion_tokens_details


@pytest.mark.parametrize("seed", SEEDS)
def test_a_streamed_response_is_the_whole_one(gpt: openai.OpenAI, seed: int) -> None:
    asked = Wishes(seed + 100)
    fields: dict[str, Any] = {"model": "nano", "input": asked.question, "max_output_tokens": asked.max_tokens}
    fields |= {"reasoning": {"effort": asked.effort}, "temperature": asked.sampling["temperature"]}
    fields["extra_body"] = {"seed": asked.sampling.get("seed"), "stop": asked.stop}
    if asked.tools is not None:
        fields |= {"tools": [responses_tool()], "tool_choice": asked.tools, "parallel_tool_calls": asked.parallel}
    elif seed % 2:
        fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if asked.schema:
        fields["text"] = {"format": {"type": "json_schema", "name": "p", "schema": PERSON}}
    whole = gpt.responses.create(**fields)
    events = list(gpt.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert plain(events[-1].response) == plain(whole)
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert plain_items(events) == [plain(item) for item in whole.output]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_streamed_message_is_the_whole_one(claude: anthropic.Anthropic, seed: int) -> None:
    asked = Wishes(seed + 200)
    fields: dict[str, Any] = {"model": "nano", "messages": [{"role": "user", "content": asked.question}]}
    fields |= {"max_tokens": asked.max_tokens, "extra_body": asked.sampling}
    fields["thinking"] = {"type": "disabled" if asked.effort == "none" else "adaptive"}
    if asked.stop is not None:
        fields["stop_sequences"] = asked.stop
    if asked.tools is not None:
        kind = {"required": "any"}.get(asked.tools, asked.tools)
        fields |= {"tools": [messages_tool()], "tool_choice": {"type": kind}}
        if kind != "none":
            fields["tool_choice"]["disable_parallel_tool_use"] = not asked.parallel
    if asked.schema:
        fields["output_config"] = {"format": {"type": "json_schema", "schema": PERSON}}
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert plain(streamed) == plain(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.output_tokens_details == whole.usage.output_tokens_details


def plain(answer: Any) -> Any:
    return without_ids(answer.model_dump(mode="json"))


def plain_items(events: list[Any]) -> list[Any]:
    """The items of a response from its deltas alone."""
    items: dict[int, Any] = {}
    for event in events:
        if event.type == "response.output_item.added":
            items[event.output_index] = event.item.model_dump(mode="json")
        elif event.type == "response.output_item.done":
            done = event.item.model_dump(mode="json")
            made = items[event.output_index]
            for key, value in made.items():
                if key in ("content", "arguments") and not key_is_equal(value, done[key]):
                    raise AssertionError(f"{value} is not {done[key]}")
            items[event.output_index] = done
        elif event.type == "response.content_part.added":
            items[event.output_index]["content"] = [event.part.model_dump(mode="json")]
        elif event.type in ("response.output_text.delta", "response.reasoning_text.delta"):
            items[event.output_index]["content"][0]["text"] += event.delta
        elif event.type == "response.function_call_arguments.delta":
            items[event.output_index]["arguments"] += event.delta
    return [without_ids(items[place]) for place in sorted(items)]


def key_is_equal(made: Any, done: Any) -> bool:
    """What the deltas made of a text, or of a call's arguments, against what the item says in the end."""
    return made == done if isinstance(made, str) else [part["text"] for part in made] == [part["text"] for part in done]
