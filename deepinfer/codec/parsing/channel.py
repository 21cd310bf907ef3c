"""Text of one kind on its way out: what may be the separator in front of calls waits, and so does the beginning of a
stop string."""

from __future__ import annotations

from collections import deque

from deepinfer.codec.events import Content, Event, Reasoning
from deepinfer.codec.parsing.characters import Fragment
from deepinfer.codec.parsing.stopping import StopText

SEPARATOR = 2  # line feeds between a text and a block of calls; they belong to neither


class Channel:
    """Whole fragments alone are released, so that a token is listed with the last of its text."""

    def __init__(
        self, kind: type[Reasoning] | type[Content], *, before_calls: bool = False, stop: StopText | None = None
    ) -> None:
        """before_calls: a block of calls may follow the text."""
        self._kind = kind
        self._before_calls = before_calls
        self._stop = stop
        self._held: list[Fragment] = []  # ends with line feeds
        self._ready = ""  # released by the search for stop strings, but not a whole fragment
        self._unsent: deque[Fragment] = deque()  # fragments whose text is in `_ready` or not released yet
        self.stopped: str | None = None
        self.num_tokens = 0  # listed so far
        self.empty = True  # no text has come

    @property
    def idle(self) -> bool:
        """No line feeds wait."""
        return not self._held

    def push(self, fragment: Fragment, out: list[Event], may_stop: bool = True) -> None:
        """Adds text; appends to `out` what can be released."""
        self.empty = False
        if not self._before_calls:
            self._send(fragment, out, may_stop)
            return
        self._held.append(fragment)
        for ready in self._held[: (first := self._first_to_hold())]:
            self._send(ready, out, may_stop)
        del self._held[:first]

    def calm(self, run: list[str], place: int, out: list[Event], min_tokens: int = 0) -> None:
        """The same for texts that need no care, of the tokens from `place` on; while the channel is idle."""
        self.empty = False
        if self._stop is None:
            self.num_tokens += len(run)
            out.append(self._kind("".join(run), tuple(range(place, place + len(run)))))
            return
        for at, text in enumerate(run, place):
            self._send(Fragment(text, (at,)), out, at >= min_tokens)

    def calls_follow(self, out: list[Event], may_stop: bool = True) -> None:
        """Drops the separator and ends the text."""
        left = SEPARATOR
        while left and self._held:
            text, places = self._held.pop()
            feeds = min(left, len(text) - len(text.rstrip("\n")))
            left -= feeds
            if feeds < len(text):
                self._held.append(Fragment(text[: len(text) - feeds], places))
                break
        self.finish(out, may_stop)

    def finish(self, out: list[Event], may_stop: bool = True) -> None:
        """Releases all that waits."""
        held, self._held = self._held, []
        for fragment in held:
            self._send(fragment, out, may_stop)
        if self._stop is not None and self.stopped is None:
            self._ready += self._stop.finish()
            self._cut(out)

    def _first_to_hold(self) -> int:
        """Index of the first held fragment that has one of the last `SEPARATOR` line feeds of the text."""
        left = SEPARATOR
        for index in range(len(self._held) - 1, -1, -1):
            text = self._held[index].text
            feeds = len(text) - len(text.rstrip("\n"))
            if feeds == 0:
                return index + 1
            left -= feeds
            if left <= 0 or feeds < len(text):
                return index
        return 0

    def _send(self, fragment: Fragment, out: list[Event], may_stop: bool) -> None:
        if self._stop is None:
            self.num_tokens += len(fragment.places)
            out.append(self._kind(*fragment))
            return
        if self.stopped is not None:
            return
        shown, self.stopped = self._stop.push(fragment.text, may_stop)
        if not self._unsent and self.stopped is None and len(shown) == len(fragment.text):  # nothing waits
            self.num_tokens += len(fragment.places)
            out.append(self._kind(*fragment))
            return
        self._unsent.append(fragment)
        self._ready += shown
        if self.stopped is not None:
            self._cut(out)
            return
        while self._unsent and len(self._unsent[0].text) <= len(self._ready):
            text, places = self._unsent.popleft()
            self._ready = self._ready[len(text) :]
            self.num_tokens += len(places)
            out.append(self._kind(text, places))

    def _cut(self, out: list[Event]) -> None:
        """Nothing of this text comes after what is ready."""
        places: list[int] = []
        length = 0
        while self._unsent and length < len(self._ready):
            fragment = self._unsent.popleft()
            length += len(fragment.text)
            places += fragment.places
        self._unsent.clear()
        if self._ready:
            self.num_tokens += len(places)
            out.append(self._kind(self._ready, tuple(places)))
        self._ready = ""
