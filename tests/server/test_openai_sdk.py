"""OpenAI's own client against a server with nano: every endpoint of ours that it knows, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from asking import ANSWER, QUESTION, REPORTS, STORY, TWO_CITIES, chat_tool, responses_tool
from faulty_core import SLOW
from servers import ThreadServer

CHAT: dict[str, Any] = {"model": "nano", "temperature": 0, "max_tokens": 120}
QUICK: dict[str, Any] = {**CHAT, "reasoning_effort": "none"}
RESPONSE: dict[str, Any] = {"model": "nano", "temperature": 0, "max_output_tokens": 120}
SLOWLY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": SLOW}], "max_tokens": 400}
ENDLESS = {"ignore_eos": True}


class Person(pydantic.BaseModel):
    name: str
    age: int


class GetWeather(pydantic.BaseModel):
    """Get the current weather of a city"""

    city: str


@pytest.fixture(scope="module")
def client(nano_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{nano_server}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


# -- Chat Completions -------------------------------------------------------------------------------------------------


def test_chat_answers_a_question_with_its_reasoning_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=[user(QUESTION)], **CHAT)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop" and choice.message.content == ANSWER
    assert choice.message.reasoning_content and answer.model == "nano" and answer.system_fingerprint
    usage = answer.usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    assert answer._request_id


def test_chat_streams_the_same_answer_and_counts_it_when_asked(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=[user(QUESTION)], **CHAT)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=[user(QUESTION)], **CHAT, **options))
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].choices[0].delta.role == "assistant"
    *chunks, last = chunks
    assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.completion_tokens_details == whole.usage.completion_tokens_details
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == whole.choices[0].message.reasoning_content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    quiet = list(client.chat.completions.create(messages=[user(QUESTION)], **CHAT, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in quiet)


def test_chat_calls_tools_in_parallel_and_reports_what_they_said(client: openai.OpenAI) -> None:
    messages = [user(TWO_CITIES)]
    tools = [chat_tool()]
    for effort in ("none", "high"):
        asked = {**CHAT, "reasoning_effort": effort, "tools": tools}
        choice = client.chat.completions.create(messages=messages, **asked).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        calls = choice.message.tool_calls
        cities = [json.loads(call.function.arguments)["city"] for call in calls]
        assert cities == ["Paris", "Rome"] and len({call.id for call in calls}) == 2
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": REPORTS[city]}
            for call, city in zip(calls, cities, strict=True)
        ]
        history = [*messages, choice.message.model_dump(exclude_none=True), *results]
        final = client.chat.completions.create(messages=history, **asked).choices[0]
        assert final.finish_reason == "stop" and "sunny" in final.message.content and "rainy" in final.message.content


def test_the_stream_helper_puts_calls_together_while_they_come(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=[user(TWO_CITIES)], tools=[chat_tool()], **CHAT).choices[0].message
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    with client.chat.completions.stream(messages=[user(TWO_CITIES)], tools=[tool], **CHAT) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.name) for event in done] == [(0, "get_weather"), (1, "get_weather")]
    assert [event.parsed_arguments for event in done] == [GetWeather(city="Paris"), GetWeather(city="Rome")]
    assert final.finish_reason == "tool_calls"
    assert [call.function.arguments for call in final.message.tool_calls] == [
        call.function.arguments for call in whole.tool_calls
    ]


def test_the_choice_of_a_tool_is_obeyed(client: openai.OpenAI) -> None:
    tools = [chat_tool(), chat_tool("get_time")]

    def names(**more: Any) -> list[str]:
        message = (
            client.chat.completions.create(tools=tools, **{**CHAT, "messages": [user(TWO_CITIES)], **more})
            .choices[0]
            .message
        )
        return [call.function.name for call in message.tool_calls or ()]

    assert names() == ["get_weather", "get_weather"]
    assert names(parallel_tool_calls=False) == ["get_weather"]
    assert names(tool_choice="none") == []
    assert set(names(tool_choice={"type": "function", "function": {"name": "get_time"}})) == {"get_time"}
    assert names(tool_choice="required", messages=[user(QUESTION)])
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    assert set(names(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})) == {"get_time"}


def test_chat_parses_answers_into_the_clients_own_types(client: openai.OpenAI) -> None:
    for effort in ("none", "high"):
        asked = {**CHAT, "reasoning_effort": effort, "max_tokens": 400}
        message = (
            client.chat.completions.parse(messages=[user(QUESTION)], response_format=Person, **asked).choices[0].message
        )
        assert isinstance(message.parsed, Person)
        with client.chat.completions.stream(messages=[user(QUESTION)], response_format=Person, **asked) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == message.parsed
    loose = client.chat.completions.create(messages=[user(QUESTION)], response_format={"type": "json_object"}, **asked)
    assert loose.choices[0].finish_reason == "length" or isinstance(json.loads(loose.choices[0].message.content), dict)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(messages=[user(QUESTION)], response_format=Person, **{**QUICK, "max_tokens": 2})


def test_strict_tools_come_parsed(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Person, name="save_person")
    answer = client.chat.completions.parse(
        messages=[user("Save Anna, 30.")], tools=[tool], tool_choice="required", **{**CHAT, "max_tokens": 400}
    )
    calls = answer.choices[0].message.tool_calls
    assert calls and all(isinstance(call.function.parsed_arguments, Person) for call in calls)


def test_several_answers_their_log_probabilities_and_a_stop_string(client: openai.OpenAI) -> None:
    asked = {**QUICK, "messages": [user(STORY)], "temperature": 1.8, "max_tokens": 16, "seed": 7, "n": 2}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=3, **asked)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    for choice in answer.choices:
        entries = choice.logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
        assert all(len(entry.top_logprobs) == 3 for entry in entries)
    with client.chat.completions.stream(logprobs=True, top_logprobs=3, **asked) as stream:
        streamed = stream.get_final_completion()
    assert [choice.message.content for choice in streamed.choices] == [
        choice.message.content for choice in answer.choices
    ]
    assert [choice.logprobs for choice in streamed.choices] == [choice.logprobs for choice in answer.choices]
    cut = client.chat.completions.create(messages=[user(QUESTION)], stop=[" is", "nowhere"], **QUICK).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("stop", ANSWER.partition(" is")[0])


# -- Completions ------------------------------------------------------------------------------------------------------


def test_completions_go_on_with_a_text(client: openai.OpenAI) -> None:
    asked = {"model": "nano", "prompt": "def fibonacci(n):", "max_tokens": 12, "temperature": 0}
    (choice,) = client.completions.create(logprobs=2, **asked).choices
    text = choice.text
    assert text and choice.finish_reason == "length" and "".join(choice.logprobs.tokens) == text
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs) == 12
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **asked)) == text
    assert client.completions.create(echo=True, **asked).choices[0].text == asked["prompt"] + text
    several = client.completions.create(n=2, **{**asked, "prompt": ["def fibonacci(n):", "The old"]})
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3] and several.choices[0].text == text


# -- Responses --------------------------------------------------------------------------------------------------------


def test_responses_answer_stream_and_go_on_from_each_other(client: openai.OpenAI) -> None:
    first = client.responses.create(input=QUESTION, instructions="Be brief.", **RESPONSE)
    assert first.status == "completed" and ANSWER in first.output_text
    assert [item.type for item in first.output] == ["reasoning", "message"]
    again = {"input": "Thank you!", "previous_response_id": first.id, "instructions": "Be brief.", **RESPONSE}
    second = client.responses.create(**again)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + 8
    with client.responses.stream(**again) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == second.output_text and final.id != second.id
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    kept = client.responses.retrieve(final.id)
    assert kept.output_text == final.output_text and kept.usage == final.usage
    client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(final.id)


def test_responses_call_tools_in_parallel_and_report_what_they_said(client: openai.OpenAI) -> None:
    asked = {**RESPONSE, "tools": [responses_tool()]}
    whole = client.responses.create(input=TWO_CITIES, **asked)
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    with client.responses.stream(input=TWO_CITIES, **asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert done == [call.arguments for call in calls]
    assert [item.type for item in streamed.output] == [item.type for item in whole.output]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": REPORTS[json.loads(call.arguments)["city"]]}
        for call in calls
    ]
    by_id = client.responses.create(input=results, previous_response_id=whole.id, **asked)
    by_hand = client.responses.create(
        input=[user(TWO_CITIES), *(item.model_dump(exclude_none=True) for item in whole.output), *results], **asked
    )
    assert "sunny" in by_id.output_text and "rainy" in by_id.output_text
    assert by_id.output_text == by_hand.output_text and by_id.usage.input_tokens == by_hand.usage.input_tokens


def test_responses_parse_answers_into_the_clients_own_types(client: openai.OpenAI) -> None:
    asked = {**RESPONSE, "max_output_tokens": 400}
    parsed = client.responses.parse(input=QUESTION, text_format=Person, **asked)
    assert isinstance(parsed.output_parsed, Person)
    with client.responses.stream(input=QUESTION, text_format=Person, **asked) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    tool = {"type": "function", **openai.pydantic_function_tool(Person, name="save_person")["function"]}
    strict = client.responses.parse(input="Save Anna, 30.", tools=[tool], tool_choice="required", **asked)
    calls = [item.parsed_arguments for item in strict.output if item.type == "function_call"]
    assert calls and all(Person.model_validate(arguments) for arguments in calls)


def test_a_response_that_is_cut_says_why(client: openai.OpenAI) -> None:
    cut = client.responses.create(input=QUESTION, **{**RESPONSE, "max_output_tokens": 3})
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    entries = (
        client.responses.create(
            input=QUESTION,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
            reasoning={"effort": "none"},
            **RESPONSE,
        )
        .output[0]
        .content[0]
    )
    assert "".join(entry.token for entry in entries.logprobs) == entries.text == ANSWER


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["nano"]
    assert client.models.retrieve("nano").owned_by == "deepinfer"


def test_many_asynchronous_streams_do_not_mix(nano_server: str) -> None:
    cities = ("France", "Italy", "Spain", "Japan")

    async def ask(client: openai.AsyncOpenAI, country: str) -> str:
        messages = [user(f"What is the capital of {country}?")]
        stream = await client.chat.completions.create(messages=messages, stream=True, **QUICK)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{nano_server}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, country) for country in cities for _ in range(2)))

    answers = asyncio.run(ask_all())
    for place, answer in enumerate(answers):
        assert cities[place // 2] in answer


def test_a_stream_that_is_closed_frees_the_engine(tiny_server: ThreadServer) -> None:
    with openai.OpenAI(base_url=f"{tiny_server.base_url}/v1", api_key="none", max_retries=0) as client:
        with client.chat.completions.create(stream=True, extra_body=ENDLESS, **SLOWLY) as stream:
            next(iter(stream))
            assert tiny_server.metric("dsv_requests_running") == 1
        tiny_server.wait(tiny_server.is_empty, 10)
        with client.responses.stream(model="tiny", input=SLOW, max_output_tokens=400, extra_body=ENDLESS) as stream:
            next(iter(stream))
        tiny_server.wait(tiny_server.is_empty, 10)


def test_a_call_that_is_cancelled_or_too_late_frees_the_engine(tiny_server: ThreadServer) -> None:
    async def cancel() -> None:
        async with openai.AsyncOpenAI(base_url=f"{tiny_server.base_url}/v1", api_key="none", max_retries=0) as client:
            call = asyncio.create_task(client.chat.completions.create(extra_body=ENDLESS, **SLOWLY))
            while tiny_server.metric("dsv_requests_running") == 0:
                await asyncio.sleep(0.02)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(extra_body=ENDLESS, timeout=0.3, **SLOWLY)

    asyncio.run(cancel())
    tiny_server.wait(tiny_server.is_empty, 10)
