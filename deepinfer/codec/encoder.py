"""Token ids of a prompt: control ids from Control segments alone, everything else as text, whatever it spells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np

from deepinfer.codec.errors import RequestError
from deepinfer.codec.pieces import pieces
from deepinfer.codec.spellings import PICTURE_SPELLINGS, Control, control_id
from deepinfer.codec.template import Rendered
from deepinfer.codec.tokenizer import Tokenizer

PIECE = 16_384  # characters: about 5 ms of one thread
WAVE = 16  # pieces in one call of the library, between which a prompt that is too long ends and another gets its turn


def encode(rendered: Rendered, tokenizer: Tokenizer, *, max_tokens: int | None = None) -> np.ndarray:
    """Ids of a prompt, int32 [tokens].

    max_tokens: the longest prompt that is wanted. A longer one ends as RequestError, without being encoded much further
    than that; far longer ones at once. ValueError if the tokenizer lacks a control token.
    """
    characters = sum(map(len, rendered.segments))
    if max_tokens is not None and characters > max_tokens * tokenizer.longest_token:
        raise _too_long(max_tokens)
    parts: list[np.ndarray] = []
    total = 0
    for part in _parts(_joined(rendered.segments), tokenizer):
        parts.append(part)
        total += len(part)
        if max_tokens is not None and total > max_tokens:
            raise _too_long(max_tokens)
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def checked_ids(ids: Sequence[int], tokenizer: Tokenizer, vocab_size: int, *, param: str = "prompt") -> np.ndarray:
    """Ids that a client gave for a prompt, int32 [tokens]. Raises RequestError for an id outside of the vocabulary, and
    for a picture's id: there is no picture behind it."""
    array = np.asarray(ids, dtype=np.int64)
    if len(array) and not (array.min() >= 0 and array.max() < vocab_size):
        wrong = array[(array < 0) | (array >= vocab_size)][0]
        raise RequestError(f"{param}: token ids must be 0 to {vocab_size - 1}, got {wrong}", param=param)
    for spelling in PICTURE_SPELLINGS:
        if (picture := tokenizer.control_ids.get(spelling)) is not None and (array == picture).any():
            raise RequestError(f"{param}: token {picture} stands for a picture, and there is none", param=param)
    return array.astype(np.int32)


def _too_long(max_tokens: int) -> RequestError:
    return RequestError(
        f"the prompt has more than {max_tokens} tokens, the most that this model takes; shorten it",
        code="context_length_exceeded",
    )


def _joined(segments: Iterable[str]) -> Iterator[str]:
    """Neighbouring texts as one: that is what they are to the tokenizer."""
    for is_control, run in groupby(segments, lambda segment: isinstance(segment, Control)):
        if is_control:
            yield from run
        else:
            yield "".join(run)


def _parts(segments: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Ids of the segments, in turn, a wave at a time."""
    wave: list[int | None] = []  # the id of a control token; None: the next text's ids
    texts: list[str] = []
    characters = 0
    for segment in segments:
        if isinstance(segment, Control):
            wave.append(control_id(tokenizer, segment))
            continue
        for text in pieces(segment, PIECE) if tokenizer.can_be_cut else (segment,):
            wave.append(None)
            texts.append(text)
            characters += len(text)
            if characters >= WAVE * PIECE:
                yield _ids(wave, tokenizer.encode_texts(texts))
                wave, texts, characters = [], [], 0
    yield _ids(wave, tokenizer.encode_texts(texts))


def _ids(wave: Iterable[int | None], encoded: Iterable[list[int]]) -> np.ndarray:
    of_texts = iter(encoded)
    ids: list[int] = []
    for control in wave:
        if control is None:
            ids += next(of_texts)
        else:
            ids.append(control)
    return np.array(ids, dtype=np.int32)
