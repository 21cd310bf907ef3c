"""What a person sees: answers on stdout; thoughts (dimmed), calls, figures and errors on stderr, so that a pipe gets
the answers alone."""

from __future__ import annotations

import json
import re

from rich.console import Console
from rich.text import Text

from deepinfer.chat.source import Figures
from deepinfer.codec.events import Content, Event, Reasoning, ToolArguments, ToolEnd, ToolStart

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What steers a terminal: all but tab and line feed. A model must not move the cursor, or set the window's title."""


def printable(text: str) -> str:
    return _CONTROL.sub("\ufffd", text)


class Screen:
    """Shows one answer after the other."""

    def __init__(self) -> None:
        self._out = Console(highlight=False, soft_wrap=True)
        self._err = Console(stderr=True, highlight=False, soft_wrap=True)
        self._open: Console | None = None  # in the middle of a line
        self._last: type[Event] | None = None  # of what was shown

    def show(self, event: Event) -> None:
        if isinstance(event, ToolArguments):
            return  # shown as a whole, with its end
        if self._last is not None and not isinstance(event, self._last):
            self.end_line()
        self._last = type(event)
        if isinstance(event, Content):
            self._piece(self._out, event.text, "")
        elif isinstance(event, Reasoning):
            self._piece(self._err, event.text, "dim italic")
        elif isinstance(event, ToolStart):
            self._piece(self._err, f"→ {event.name}\n", "bold cyan")
        elif isinstance(event, ToolEnd):
            text = _indented(event.arguments) if event.complete else event.arguments
            self._piece(self._err, text + ("\n" if event.complete else "  (cut off)\n"), "cyan")

    def end(self, figures: Figures) -> None:
        """The answer is over."""
        self.end_line()
        self._last = None
        self.say(figures.line())

    def say(self, text: str) -> None:
        """Something of ours."""
        self._err.print(Text(printable(text), "dim"))

    def complain(self, text: str) -> None:
        self.end_line()
        self._last = None
        self._err.print(Text(printable(f"error: {text}"), "red"))

    def end_line(self) -> None:
        if self._open is not None:
            self._open.print()
            self._open.file.flush()
            self._open = None

    def _piece(self, console: Console, text: str, style: str) -> None:
        text = printable(text)
        if style:
            console.print(Text(text, style), end="")
        else:
            console.file.write(text)  # as it is: rich would turn tabs into blanks
        console.file.flush()
        self._open = None if text.endswith("\n") else console


def _indented(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=2, ensure_ascii=False)
    except ValueError:
        return arguments
