"""`deepinfer chat` as somebody at a terminal meets it, with nano in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM
from deepinfer.chat.local import LocalModel
from deepinfer.chat.screen import Screen, printable
from deepinfer.chat.session import Session, parse_effort, read_tools
from deepinfer.chat.source import Figures
from deepinfer.cli import main
from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments, ToolEnd, ToolStart
from deepinfer.codec.generation import Usage
from deepinfer.env import read_environment

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
TOOL = {
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
GREEDY = {"temperature": 0, "max_tokens": 150}


@pytest.fixture(scope="module")
def nano() -> Iterator[LocalModel]:
    model = LocalModel(LLM("nano", max_model_len=1024, max_num_seqs=1, verbose=False))
    yield model
    model.close()


def lines(*given: str) -> Callable[[str], str | None]:
    """A person who types these and leaves."""
    left = iter(given)
    return lambda _: next(left, None)


def talk(source: Any, *given: str, **arguments: Any) -> Session:
    session = Session(source, Screen(), lines(*given), **{"options": GREEDY, **arguments})
    session.run()
    return session


class Spoken:
    """Answers with events that are given, and keeps what it was asked."""

    name = "spoken"

    def __init__(self, *answers: list[Event | BaseException]) -> None:
        self._answers = list(answers)
        self.bodies: list[dict[str, Any]] = []

    def answer(self, body: dict[str, Any], figures: Figures) -> Iterator[Event]:
        self.bodies.append(json.loads(json.dumps(body)))
        for event in self._answers.pop(0) if self._answers else []:
            if isinstance(event, BaseException):
                raise event
            yield event
        figures.finish = "stop"

    def close(self) -> None: ...


def test_a_pipe_gets_the_answers_and_the_screen_gets_thoughts_and_figures(nano: LocalModel, capsys) -> None:
    talk(nano, QUESTION)
    shown = capsys.readouterr()
    assert shown.out == ANSWER + "\n"
    thoughts, figures = shown.err.splitlines()[-2:]
    assert "Paris" in thoughts and "</think>" not in shown.err
    assert "thinking" in figures and "tokens/s" in figures and "accepted a round" in figures and "prompt 4" in figures


def test_a_call_is_shown_and_what_the_tool_returned_is_asked_for(nano: LocalModel, capsys) -> None:
    tools = [{"type": "function", "function": TOOL}]
    session = talk(nano, "What is the weather in Paris?", '{"temperature": 21, "condition": "sunny"}', tools=tools)
    shown = capsys.readouterr()
    assert "→ get_weather" in shown.err and '  "city": "Paris"' in shown.err
    assert "sunny" in shown.out
    call, result, answer = session.body()["messages"][1:]
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] and result["role"] == "tool"
    assert answer["role"] == "assistant" and answer["content"] + "\n" == shown.out[-len(answer["content"]) - 1 :]


def test_the_second_question_knows_the_first_until_reset(nano: LocalModel, capsys) -> None:
    session = talk(nano, "/think off", "My name is Anna.", "What is 2 + 3?", system="Be brief.")
    roles = [message["role"] for message in session.body()["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    session = talk(nano, "/think off", "My name is Anna.", "/reset", system="Be brief.")
    assert session.body()["messages"] == [{"role": "system", "content": "Be brief."}]


def test_a_question_that_cannot_be_answered_does_not_stand_in_the_way_of_the_next(nano: LocalModel, capsys) -> None:
    session = talk(nano, "word " * 2000, QUESTION)
    shown = capsys.readouterr()
    assert "more than 1024 tokens" in shown.err and "/reset starts anew" in shown.err
    assert shown.out == ANSWER + "\n"
    assert [message["role"] for message in session.body()["messages"]] == ["user", "assistant"]


def test_ctrl_c_stops_the_answer_and_keeps_what_it_said(nano: LocalModel, capsys) -> None:
    class Interrupted:
        """The person strikes a key in the middle of a real answer."""

        name = nano.name

        def answer(self, body: dict[str, Any], figures: Figures) -> Iterator[Event]:
            for event in nano.answer(body, figures):
                yield event
                if isinstance(event, Content) and body["messages"][-1]["content"] == QUESTION:
                    raise KeyboardInterrupt

        def close(self) -> None: ...

    session = talk(Interrupted(), QUESTION, "What is 2 + 3?")
    shown = capsys.readouterr()
    first = session.body()["messages"][1]["content"]
    assert first and ANSWER.startswith(first) and first != ANSWER
    assert "stopped" in shown.err and shown.out.startswith(first + "\n") and len(shown.out) > len(first) + 1
    assert not nano._llm.engine.has_unfinished


def test_thinking_and_effort_are_what_was_said_last(capsys) -> None:
    source = Spoken()
    talk(
        source,
        "a",
        "/think off",
        "b",
        "/effort 20",
        "c",
        "/effort max",
        "d",
        "/think on",
        "/effort 101",
        "e",
        options={},
    )
    fields = [{k: v for k, v in body.items() if k in ("reasoning_effort", "thinking")} for body in source.bodies]
    assert fields == [
        {"reasoning_effort": "high"},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": 20},
        {"reasoning_effort": "max"},
        {"reasoning_effort": "max"},
    ]
    assert capsys.readouterr().err.count("/reset forgets") == 2, "the command that makes no sense is answered with help"
    assert [parse_effort(text) for text in ("low", "1", "100", "0", "101", "", "none", "٣")] == [
        "low", 1, 100, None, None, None, None, None,
    ]  # fmt: skip


def test_what_a_model_says_cannot_steer_the_terminal(capsys) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\r\x9b31mred\x00[bold]tab\tline\n"
    safe = "\ufffd]0;title\ufffd\ufffd[2J\ufffd\ufffd31mred\ufffd[bold]tab\tline\n"
    assert printable(evil) == safe
    talk(Spoken([Reasoning(evil), Content(evil), ToolStart(0, "a", evil), ToolEnd(0, evil, False)]), "hello")
    shown = capsys.readouterr()
    assert shown.out == safe
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown.out + shown.err) and "\x9b" not in shown.err


def test_a_call_that_was_cut_off_is_not_kept(capsys) -> None:
    events: list[Event | BaseException] = [
        Content("I look."),
        ToolStart(0, "call_a", "get"),
        ToolArguments(0, '{"a": 1}'),
        ToolEnd(0, '{"a": 1}', True),
        ToolStart(1, "call_b", "put"),
        ToolArguments(1, '{"b": '),
        ToolEnd(1, '{"b": ', False),
    ]
    session = talk(Spoken(events), "hello", "the result")
    assert session.body()["messages"][1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "call_a", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "call_a", "content": "the result"},
        {"role": "assistant", "content": ""},
    ]
    assert "(cut off)" in capsys.readouterr().err


def test_a_source_that_fails_in_the_middle_is_told_and_the_conversation_goes_on(capsys) -> None:
    source = Spoken([Content("Half"), OSError("the line broke")], [Content("Whole")])
    session = talk(source, "one", "two")
    shown = capsys.readouterr()
    assert shown.out == "Half\nWhole\n" and "error: the line broke" in shown.err
    assert [message["content"] for message in session.body()["messages"]] == ["two", "Whole"]


def test_figures_say_only_what_is_known() -> None:
    assert Figures(finish="stop").line() == ""
    figures = Figures(finish="length", usage=Usage(10, 4, 21, 5), accepted=1.25)
    figures.saw(0.1)
    figures.saw(0.6)
    assert figures.line() == (
        "21 tokens (5 thinking) · first after 100 ms · 40 tokens/s · 1.2 drafts accepted a round · "
        "prompt 10, 4 cached · cut off: longest output reached"
    )


def test_what_cannot_be_is_one_line_and_exit_code_2(tmp_path: Path, capsys) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('["x"]', encoding="utf-8")
    for arguments, words in (
        (["--effort", "much"], "effort: must be low, high, max"),
        (["--tools", str(tools)], "must hold a list of functions"),
        (["--server", "ftp://x"], "is not an address"),
        (["--server", "127.0.0.1:1"], "nobody listens there"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["chat", *arguments])
        error = capsys.readouterr().err
        assert left.value.code == 2 and words in error and error.count("\n") == 1
    tools.write_text(json.dumps([TOOL, {"type": "function", "function": TOOL}]), encoding="utf-8")
    assert read_tools(tools) == [{"type": "function", "function": TOOL}] * 2


def test_the_key_comes_from_the_environment_and_is_shown_nowhere() -> None:
    environment = read_environment({"DEEPINFER_API_KEY": " dk-secret\n"})
    assert environment.api_key == "dk-secret"
    assert "secret" not in repr(environment)
