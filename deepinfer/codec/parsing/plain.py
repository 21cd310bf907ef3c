"""The output of /v1/completions: all of it is content."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.codec.events import Content, Event, merged
from deepinfer.codec.generation import Finish
from deepinfer.codec.parsing.channel import Channel
from deepinfer.codec.parsing.characters import Characters, Fragment, TokenSource, token_texts
from deepinfer.codec.parsing.stopping import StopText


class PlainParser:
    """Like `OutputParser`, for text without any structure. Control tokens leave no text."""

    reasoning_tokens = 0

    def __init__(self, tokenizer: TokenSource, *, stop: StopText | None = None, min_tokens: int = 0) -> None:
        """stop: finds stop strings, not among the first `min_tokens` tokens."""
        self._texts = token_texts(tokenizer)
        self._characters = Characters(self._texts)
        self._content = Channel(Content, stop=stop)
        self._min_tokens = min_tokens
        self._place = 0
        self.done = False
        self.num_read = 0  # tokens, without those behind the one that made it `done`
        self.result: Finish | None = None

    @property
    def stopped(self) -> str | None:
        return self._content.stopped

    def push(self, token_ids: Sequence[int]) -> list[Event]:
        """Adds tokens of the output, in any pieces."""
        out: list[Event] = []
        for token_id in token_ids:
            self.num_read += not self.done
            if not self.done and token_id not in self._texts.signals:
                self._text(self._characters.push(token_id, self._place), out)
            self._place += 1
        return merged(out)

    def finish(self, reason: str) -> list[Event]:
        """The output has ended. reason: the engine's ("stop", "length", "abort", "deadline", "error")."""
        out: list[Event] = []
        if not self.done:
            self._text(self._characters.flush(), out)
            self._content.finish(out)
        self.result = Finish("stop", self.stopped) if self.stopped is not None else Finish(reason)
        return merged(out)

    def _text(self, fragment: Fragment | None, out: list[Event]) -> None:
        if fragment is not None:
            self._content.push(fragment, out, self._place >= self._min_tokens)
            self.done = self.stopped is not None
