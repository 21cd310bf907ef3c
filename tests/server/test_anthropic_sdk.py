"""Anthropic's own client against a server with nano: messages whole and streamed, tools, thinking, counting."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from asking import ANSWER, QUESTION, REPORTS, STORY, TWO_CITIES, messages_tool
from faulty_core import HANGS, SLOW
from servers import ThreadServer

COLD = {"temperature": 0}  # this SDK has no name for it
MESSAGE: dict[str, Any] = {"model": "nano", "max_tokens": 200, "extra_body": COLD}
QUIET: dict[str, Any] = {**MESSAGE, "thinking": {"type": "disabled"}}
SLOWLY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": SLOW}],
    "extra_body": {"ignore_eos": True},
}


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def client(nano_server: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=nano_server, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def texts(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def results_of(message: Any) -> dict[str, Any]:
    """The user's message with what the tools said."""
    calls = [block for block in message.content if block.type == "tool_use"]
    return user(
        [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": [{"type": "text", "text": REPORTS[call.input["city"]]}],
            }
            for call in calls
        ]
    )


def test_a_message_has_its_thoughts_its_text_and_its_counts(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=[user(QUESTION)], system="Be brief.", **MESSAGE)
    assert [block.type for block in message.content] == ["thinking", "text"] and texts(message) == ANSWER
    assert message.content[0].thinking and message.content[0].signature
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    counted = client.messages.count_tokens(model="nano", messages=[user(QUESTION)], system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_a_stream_becomes_the_same_message(client: anthropic.Anthropic) -> None:
    for asked in (
        {**MESSAGE, "messages": [user(QUESTION)]},
        {**MESSAGE, "messages": [user(TWO_CITIES)], "tools": [messages_tool()]},
    ):
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        ours = [block.model_dump(exclude={"id"}) for block in streamed.content]
        assert ours == [block.model_dump(exclude={"id"}) for block in whole.content]
        assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        raw = client.messages.create(stream=True, **asked)
        deltas = [event.delta for event in raw if event.type == "content_block_delta"]
        assert "".join(delta.text for delta in deltas if delta.type == "text_delta") == texts(whole)


def test_tools_are_called_in_parallel_and_their_reports_used(client: anthropic.Anthropic) -> None:
    for asked in (MESSAGE, QUIET):
        asked = {**asked, "tools": [messages_tool()]}
        first = client.messages.create(messages=[user(TWO_CITIES)], **asked)
        calls = [block for block in first.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [
            ("get_weather", {"city": "Paris"}),
            ("get_weather", {"city": "Rome"}),
        ]
        assert first.stop_reason == "tool_use"
        history = [user(TWO_CITIES), {"role": "assistant", "content": first.content}, results_of(first)]
        final = client.messages.create(messages=history, **asked)
        assert final.stop_reason == "end_turn" and "sunny" in texts(final) and "rainy" in texts(final)


def test_the_choice_of_a_tool_is_obeyed(client: anthropic.Anthropic) -> None:
    tools = [messages_tool(), messages_tool("get_time")]

    def names(choice: dict[str, Any], question: str = TWO_CITIES) -> list[str]:
        message = client.messages.create(messages=[user(question)], tools=tools, tool_choice=choice, **MESSAGE)
        return [block.name for block in message.content if block.type == "tool_use"]

    assert names({"type": "auto", "disable_parallel_tool_use": True}) == ["get_weather"]
    assert names({"type": "none"}) == []
    assert set(names({"type": "tool", "name": "get_time"})) == {"get_time"}
    assert names({"type": "any"}, QUESTION)


def test_the_tool_runner_runs_tools_until_there_is_an_answer(client: anthropic.Anthropic) -> None:
    asked_for = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather of a city

        Args:
            city: its name
        """
        asked_for.append(city)
        return REPORTS[city]

    runner = client.beta.messages.tool_runner(messages=[user(TWO_CITIES)], tools=[get_weather], **MESSAGE)
    first, last = list(runner)  # it asks for a thread of messages, is told that there are none, and sends all again
    assert first.stop_reason == "tool_use" and asked_for == ["Paris", "Rome"]
    assert last.stop_reason == "end_turn" and "sunny" in texts(last) and "rainy" in texts(last)


def test_answers_come_in_the_clients_own_types(client: anthropic.Anthropic) -> None:
    for asked in (MESSAGE, QUIET):
        asked = {**asked, "max_tokens": 400, "messages": [user(QUESTION)]}
        parsed = client.messages.parse(output_format=Person, **asked).parsed_output
        assert isinstance(parsed, Person)
        with client.messages.stream(output_format=Person, **asked) as stream:
            assert stream.get_final_message().parsed_output == parsed
    strict = client.messages.create(
        messages=[user("Save Anna, 30.")],
        tools=[{"name": "save", "input_schema": Person.model_json_schema(), "strict": True}],
        tool_choice={"type": "any"},
        **MESSAGE,
    )
    calls = [block for block in strict.content if block.type == "tool_use"]
    assert calls and all(Person.model_validate(call.input) for call in calls)


def test_an_answer_ends_where_it_is_told_to_and_begins_with_what_is_given(client: anthropic.Anthropic) -> None:
    stopped = client.messages.create(messages=[user(QUESTION)], stop_sequences=[" is", "nowhere"], **QUIET)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    assert texts(stopped) == ANSWER.partition(" is")[0]
    short = client.messages.create(messages=[user(STORY)], **{**QUIET, "max_tokens": 3})
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 3
    begun = [user(QUESTION), {"role": "assistant", "content": "The capital of France is"}]
    assert texts(client.messages.create(messages=begun, **QUIET)) == ANSWER.removeprefix("The capital of France is")


def test_thoughts_can_be_bounded_and_left_out(client: anthropic.Anthropic) -> None:
    budget = client.messages.create(
        messages=[user(QUESTION)], **{**MESSAGE, "thinking": {"type": "enabled", "budget_tokens": 2}}
    )
    assert budget.usage.output_tokens_details.thinking_tokens <= 2
    hidden = client.messages.create(
        messages=[user(QUESTION)], **{**MESSAGE, "thinking": {"type": "adaptive", "display": "omitted"}}
    )
    assert hidden.content[0].thinking == "" and hidden.content[0].signature
    seen = client.messages.create(messages=[user(QUESTION)], **MESSAGE)

    def next_prompt(message: Any) -> int:
        history = [user(QUESTION), {"role": "assistant", "content": message.content}, user("Thanks!")]
        tools = [messages_tool()]  # with tools, thoughts stay in the prompt
        return client.messages.count_tokens(model="nano", messages=history, tools=tools).input_tokens

    assert (
        next_prompt(hidden)
        == next_prompt(seen)
        > next_prompt(client.messages.create(messages=[user(QUESTION)], **QUIET))
    )


def test_models_are_listed_and_found(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["nano"]
    model = client.models.retrieve("nano")
    assert model.type == "model" and model.max_input_tokens == model.max_tokens == 4096


def test_many_asynchronous_streams_do_not_mix(nano_server: str) -> None:
    countries = ("France", "Italy", "Spain", "Japan")

    async def ask(client: anthropic.AsyncAnthropic, country: str) -> str:
        question = [user(f"What is the capital of {country}?")]
        async with client.messages.stream(messages=question, **QUIET) as stream:
            return await stream.get_final_text()

    async def ask_all() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=nano_server, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, country) for country in countries for _ in range(2)))

    for place, answer in enumerate(asyncio.run(ask_all())):
        assert countries[place // 2] in answer


def test_a_stream_that_is_closed_and_a_call_that_is_cancelled_free_the_engine(tiny_server: ThreadServer) -> None:
    async def leave() -> None:
        async with anthropic.AsyncAnthropic(base_url=tiny_server.base_url, api_key="none", max_retries=0) as client:
            async with client.messages.stream(**SLOWLY) as stream:
                await anext(aiter(stream))
            await asyncio.to_thread(tiny_server.wait, tiny_server.is_empty, 10)
            call = asyncio.create_task(client.messages.create(**SLOWLY))
            while await asyncio.to_thread(tiny_server.metric, "dsv_requests_running") == 0:
                await asyncio.sleep(0.02)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    asyncio.run(leave())
    tiny_server.wait(tiny_server.is_empty, 10)


def test_a_long_silence_is_filled_with_pings_that_the_client_takes(tiny_server: ThreadServer) -> None:
    # The engine is busy with a long step of somebody else's; this server lets no stream be silent for over 0.2 s.
    hanging = {"json": {"model": "tiny", "prompt": HANGS, "max_tokens": 2}, "timeout": 60}
    thread = threading.Thread(target=httpx.post, args=(f"{tiny_server.base_url}/v1/completions",), kwargs=hanging)
    with anthropic.Anthropic(base_url=tiny_server.base_url, api_key="none", max_retries=0, timeout=60) as client:
        thread.start()
        tiny_server.wait(lambda: tiny_server.metric("dsv_http_open_answers") == 1, 10)
        asked = {**SLOWLY, "max_tokens": 5, "stream": True}
        with client.messages.with_streaming_response.create(**asked) as response:
            lines = list(response.iter_lines())
        asked["messages"] = [user("x")]
        assert [event.type for event in client.messages.create(**asked)][-1] == "message_stop"
    thread.join()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events].count("ping") >= 2 and events[-1]["type"] == "message_stop"
