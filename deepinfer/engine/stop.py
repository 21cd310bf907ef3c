"""When does an output end? The tests of spec/engine.md 4.8, and the text that waits until a stop string is excluded."""

from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended; the value is what users see."""

    STOP = "stop"  # end token, stop token or stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"  # the logits of a step held no finite value


class OutputText:
    """The text of one sequence, cut at the first stop string.

    Characters that may be the beginning of a stop string are held back until more text decides, so a reader never
    sees part of one. The result does not depend on how the text is cut into pieces: the stop string that is complete
    first wins, and of two that are complete at the same character the longer one.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._shown: list[str] = []
        self._held = ""

    @property
    def text(self) -> str:
        """Everything that has been released."""
        return "".join(self._shown)

    def push(self, piece: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Adds decoded text; returns (newly released text, the stop string that ended the output or None).

        With may_stop False (before min_tokens) complete stop strings pass, but a beginning is held back all the same:
        it may be completed by a token that may stop.
        """
        if not self._stops:
            return self._release(piece), None
        before = len(self._held)
        buffer = self._held + piece
        if may_stop and (match := self._first_match(buffer, before)) is not None:
            start, end = match
            self._held = ""
            return self._release(buffer[: end if self._include_stop else start]), buffer[start:end]
        keep = self._beginning_at_end(buffer)
        self._held = buffer[len(buffer) - keep :]
        return self._release(buffer[: len(buffer) - keep]), None

    def finish(self) -> str:
        """Releases what was held back; call it when the output ended for another reason than a stop string."""
        held, self._held = self._held, ""
        return self._release(held)

    def _release(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text

    def _first_match(self, buffer: str, old: int) -> tuple[int, int] | None:
        """(start, end) of the stop string that is complete first, of those that end after `old` characters.

        What was held is a proper beginning of a stop string and everything before it was excluded, so a match that
        ends inside the new text starts inside the buffer.
        """
        found = []
        for stop in self._stops:
            start = buffer.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _beginning_at_end(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that is a proper beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:size]):
                    longest = size
                    break
        return longest
