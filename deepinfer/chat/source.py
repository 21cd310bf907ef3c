"""Where answers come from, as the terminal sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from deepinfer.codec.events import Event
from deepinfer.codec.generation import Usage


@dataclass(slots=True)
class Figures:
    """Of one answer; filled while it comes, whole when it is over."""

    finish: str | None = None
    """Of the protocol: "stop", "length", "tool_calls"; None for an answer that was left."""
    usage: Usage | None = None
    first_seconds: float | None = None
    """From the question to the first piece of an answer."""
    last_seconds: float = 0.0
    """To the last one."""
    accepted: float | None = None
    """Drafts that became output, per round; None where nothing is drafted, or where nobody says."""

    def saw(self, seconds: float) -> None:
        """Something came, `seconds` after the question."""
        if self.first_seconds is None:
            self.first_seconds = seconds
        self.last_seconds = seconds

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token; None for answers too short to have a speed."""
        if self.usage is None or self.first_seconds is None or self.usage.completion_tokens < 2:
            return None
        seconds = self.last_seconds - self.first_seconds
        return (self.usage.completion_tokens - 1) / seconds if seconds > 0 else None

    def line(self) -> str:
        """For people."""
        parts = []
        if self.usage is not None:
            thinking = f" ({self.usage.reasoning_tokens} thinking)" if self.usage.reasoning_tokens else ""
            parts.append(f"{self.usage.completion_tokens} tokens{thinking}")
        if self.first_seconds is not None:
            parts.append(f"first after {self.first_seconds * 1000:.0f} ms")
        if (rate := self.tokens_per_second) is not None:
            parts.append(f"{rate:.0f} tokens/s")
        if self.accepted is not None:
            parts.append(f"{self.accepted:.1f} drafts accepted a round")
        if self.usage is not None:
            cached = f", {self.usage.cached_tokens} cached" if self.usage.cached_tokens else ""
            parts.append(f"prompt {self.usage.prompt_tokens}{cached}")
        endings = {"length": "cut off: longest output reached", "error": "the model's numbers broke", None: "stopped"}
        if self.finish in endings:
            parts.append(endings[self.finish])
        return " · ".join(parts)


class AnswerSource(Protocol):
    """A model that answers."""

    name: str

    def answer(self, body: dict[str, Any], figures: Figures) -> Iterator[Event]:
        """body: a request of Chat Completions. Closing the iterator ends the answer.

        Raises RequestError, ValueError, RuntimeError or OSError, whose text is for people.
        """

    def close(self) -> None: ...
