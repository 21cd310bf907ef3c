"""Ids to whole characters, each with the places of the tokens that it completes, and what control ids mean."""

from __future__ import annotations

import codecs
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, Protocol

from deepinfer.codec.spellings import CONTROL, DSML, END_THINK, PICTURE_SPELLINGS, THINK

PAD = "<｜▁pad▁｜>"


class TokenSource(Protocol):
    """What a parser needs of `codec.tokenizer.Tokenizer`."""

    control_ids: dict[str, int]

    def token_bytes(self, token_id: int) -> bytes: ...
    def __hash__(self) -> int: ...


class Fragment(NamedTuple):
    """A piece of text, and the places of the tokens whose last character is in it."""

    text: str
    places: tuple[int, ...] = ()


class Signal(Enum):
    """A control id that does something."""

    DSML = str(DSML)
    THINK = str(THINK)
    END_THINK = str(END_THINK)
    SILENT = ""  # leaves no text: what ends an output or begins a turn


class TokenTexts:
    """What the ids of a tokenizer stand for, worked out as they are met."""

    def __init__(self, tokenizer: TokenSource) -> None:
        ids = tokenizer.control_ids
        silent = {ids[name] for name in (*CONTROL, *PICTURE_SPELLINGS, PAD) if name in ids}
        self.signals = dict.fromkeys(silent, Signal.SILENT)
        marks = (Signal.DSML, Signal.THINK, Signal.END_THINK)
        self.signals.update({ids[mark.value]: mark for mark in marks if mark.value in ids})
        self.token_bytes = tokenizer.token_bytes
        self.whole = _Whole(self)
        """Id -> its text, if that is whole characters that need no care; else None."""
        self.calm = _Calm(self)
        """The same without texts behind which markup may begin, or that may be the separator in front of it."""


class _Whole(dict[int, str | None]):
    def __init__(self, owner: TokenTexts) -> None:
        super().__init__()
        self._signals, self._token_bytes = owner.signals, owner.token_bytes

    def __missing__(self, token_id: int) -> str | None:
        text = None
        if token_id not in self._signals:
            try:
                text = self._token_bytes(token_id).decode("utf-8") or None
            except UnicodeDecodeError:
                text = None
        self[token_id] = text
        return text


class _Calm(dict[int, str | None]):
    def __init__(self, owner: TokenTexts) -> None:
        super().__init__()
        self._whole = owner.whole

    def __missing__(self, token_id: int) -> str | None:
        text = self._whole[token_id]
        if text is not None and text.endswith(("\n", "<", "</")):
            text = None
        self[token_id] = text
        return text


@lru_cache(maxsize=8)
def token_texts(tokenizer: TokenSource) -> TokenTexts:
    """One table per tokenizer, shared by all its outputs."""
    return TokenTexts(tokenizer)


class Characters:
    """The characters of one output. Bytes that are not yet a character wait for the next token, as in the
    `Detokenizer`; what never becomes one is U+FFFD."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting: list[int] = []  # places of tokens whose last bytes are not a character yet

    @property
    def idle(self) -> bool:
        """No bytes wait."""
        return not self._waiting

    def push(self, token_id: int, place: int) -> Fragment | None:
        """token_id: none of `TokenTexts.signals`."""
        if not self._waiting and (whole := self._texts.whole[token_id]) is not None:
            return Fragment(whole, (place,))
        token_bytes = self._texts.token_bytes(token_id)
        if not token_bytes:
            return None
        text = self._decoder.decode(token_bytes)
        complete: tuple[int, ...] = ()
        if text:
            complete, self._waiting = tuple(self._waiting), []
        if self._decoder.getstate()[0]:
            self._waiting.append(place)
        else:
            complete = (*complete, place)
        return Fragment(text, complete) if text else None

    def flush(self) -> Fragment | None:
        """What waits becomes U+FFFD; for the end, and for control ids that end a text."""
        if not self._waiting:
            return None
        places, self._waiting = tuple(self._waiting), []
        return Fragment(self._decoder.decode(b"", final=True), places)
