"""A conversation at the terminal: lines in, answers out, commands that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from deepinfer.chat.screen import Screen
from deepinfer.chat.source import AnswerSource, Figures
from deepinfer.codec.errors import RequestError
from deepinfer.codec.events import Content, Reasoning, ToolEnd, ToolStart

HELP = (
    "/reset forgets the conversation, /think on|off switches the reasoning, /effort low|high|max|1..100 says how much "
    "of it, /exit (or Ctrl-D) leaves. Ctrl-C stops an answer."
)
EFFORTS = ("low", "high", "max")
PROBLEMS = (RequestError, ValueError, RuntimeError, OSError)
"""What an answer may fail with: told, and the conversation goes on."""

Ask = Callable[[str], str | None]
"""What to show -> the line that a person wrote, None at the end of input."""


class Session:
    """Messages are kept as Chat Completions has them. options: fields of every request."""

    def __init__(
        self,
        source: AnswerSource,
        screen: Screen,
        ask: Ask,
        *,
        system: str | None = None,
        thinking: bool = True,
        effort: str | int = "high",
        tools: list[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._source = source
        self._screen = screen
        self._ask = ask
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = list(self._start)
        self._thinking = thinking
        self._effort = effort
        self._options = {**({"tools": tools} if tools else {}), **(options or {})}

    def run(self) -> None:
        """Until the input ends, or /exit."""
        self._screen.say(HELP)
        while (line := self._ask("> ")) is not None:
            word = line.strip()
            if word == "/exit":
                break
            if word.startswith("/"):
                self._command(word)
            elif word:
                self._turn(line)

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name == "/reset" and not argument:
            self._messages = list(self._start)
        elif name == "/think" and argument in ("on", "off"):
            self._thinking = argument == "on"
        elif name == "/effort" and (effort := parse_effort(argument)) is not None:
            self._effort, self._thinking = effort, True
        else:
            self._screen.say(HELP)

    def _turn(self, line: str) -> None:
        """A question, and answers until no tool is called."""
        before = len(self._messages)
        self._messages.append({"role": "user", "content": line})
        while True:
            answered = self._answer()
            if answered is None:
                del self._messages[before:]  # the question that could not be answered stands in the way of others
                return
            self._messages.append(answered)
            if not self._results(answered.get("tool_calls", ())):
                return

    def body(self) -> dict[str, Any]:
        """The next request."""
        thinking = {"reasoning_effort": self._effort} if self._thinking else {"thinking": {"type": "disabled"}}
        return {"messages": self._messages, **thinking, **self._options}

    def _answer(self) -> dict[str, Any] | None:
        """The answer as a message; None after an error, which has been told."""
        figures, message = Figures(), _Message()
        try:
            events = self._source.answer(self.body(), figures)
            with closing(events):  # type: ignore[type-var]
                try:
                    for event in events:
                        message.add(event)
                        self._screen.show(event)
                except KeyboardInterrupt:
                    figures.finish = None  # what it said stays
        except PROBLEMS as error:
            self._screen.complain(f"{error}; /reset starts anew")
            return None
        self._screen.end(figures)
        return message.whole()

    def _results(self, calls: Any) -> bool:
        """Asks for what the tools returned. False if there are no calls; without input the results are empty."""
        for call in calls:
            result = self._ask(f"{call['function']['name']} returned> ")
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result or ""})
        return bool(calls)


class _Message:
    """An answer, put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._starts: dict[int, ToolStart] = {}
        self._calls: list[dict[str, Any]] = []

    def add(self, event: object) -> None:
        if isinstance(event, Content):
            self._content.append(event.text)
        elif isinstance(event, Reasoning):
            self._reasoning.append(event.text)
        elif isinstance(event, ToolStart):
            self._starts[event.call] = event
        elif isinstance(event, ToolEnd) and event.complete:
            start = self._starts[event.call]
            function = {"name": start.name, "arguments": event.arguments}
            self._calls.append({"id": start.id, "type": "function", "function": function})

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def parse_effort(text: str) -> str | int | None:
    """low, high, max, or a number from 1 to 100; None for anything else."""
    if text in EFFORTS:
        return text
    return int(text) if text.isdecimal() and text.isascii() and len(text) <= 3 and 1 <= int(text) <= 100 else None


def read_tools(file: Path) -> list[dict[str, Any]]:
    """A JSON list of tools, each as Chat Completions has it, or the function alone. ValueError naming the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is no JSON ({error})") from None
    tools = content if isinstance(content, list) else [content]
    if not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{file}: must hold a list of functions")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
