"""Completions answers: `text_completion` objects, streamed piece by piece or whole."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepinfer.codec import sse
from deepinfer.codec.chunks import Chunks, header
from deepinfer.codec.completions.request import CompletionRequest, prompts_of
from deepinfer.codec.errors import RequestError
from deepinfer.codec.events import Content, Event
from deepinfer.codec.generation import AnswerWriter, Finish, GenerationRequest, TokenLogprob, Usage, WriterContext
from deepinfer.codec.openai_errors import error_body
from deepinfer.codec.openai_objects import clamped, finish_reason, most_likely, token_text, usage_object


def writer(body: CompletionRequest, generation: GenerationRequest, context: WriterContext) -> AnswerWriter:
    """Renders the answer to `body`: a stream, or one object at its end. Completion i of prompt p has the index
    p * n + i."""
    if generation.stream:
        return CompletionStream(body, generation, context)
    return CompletionAnswer(body, generation, context)


class CompletionStream:
    """A chunk for every piece of text; with echo, each choice's first one holds its prompt."""

    media_type = sse.MEDIA_TYPE

    def __init__(self, body: CompletionRequest, generation: GenerationRequest, context: WriterContext) -> None:
        self._echoes = _echoes(body, generation, context)
        count = len(self._echoes)
        self._chunks = Chunks("text_completion", f"cmpl-{context.id}", count, context, body.stream_options)
        self._top = generation.top_logprobs
        self._offsets = [_Offsets(context.token_bytes) for _ in range(count)]

    def start(self, usage: Usage) -> bytes:
        self._chunks.start(usage)
        return b"".join(self._piece(index, text) for index, text in enumerate(self._echoes) if text)

    def events(self, index: int, events: Sequence[Event], logprobs: Mapping[int, TokenLogprob]) -> bytes:
        frames = []
        for event in events:
            assert isinstance(event, Content), event  # of a plain parser
            self._chunks.add(len(event.tokens))
            if self._top is not None:
                entries = self._offsets[index].object(event.tokens, logprobs, self._top)
                payload = b'"text":' + sse.json_bytes(event.text)
                frames.append(self._chunks.choice(index, payload, sse.json_bytes(entries)))
            elif event.text:
                frames.append(self._piece(index, event.text))
        return b"".join(frames)

    def _piece(self, index: int, text: str) -> bytes:
        return self._chunks.piece(index, b'"text":' + sse.json_bytes(text))

    def finish(self, index: int, finish: Finish) -> bytes:
        return self._chunks.choice(index, b'"text":""', reason=sse.json_bytes(finish_reason(finish)))

    def end(self, usage: Usage) -> bytes:
        return self._chunks.end(usage)

    def error(self, error: RequestError) -> bytes:
        return self._chunks.error(error)

    def heartbeat(self) -> bytes:
        return sse.COMMENT


class CompletionAnswer:
    """Collects the text of every choice; the object is written at the end."""

    media_type = "application/json"

    def __init__(self, body: CompletionRequest, generation: GenerationRequest, context: WriterContext) -> None:
        self._context = context
        self._top = generation.top_logprobs
        self._texts = [[echo] for echo in _echoes(body, generation, context)]
        self._offsets = [_Offsets(context.token_bytes) for _ in self._texts]
        self._logprobs: list[dict[str, Any] | None] = [None] * len(self._texts)
        self._reasons: list[str | None] = [None] * len(self._texts)
        if self._top is not None:
            self._logprobs = [offsets.object((), {}, self._top) for offsets in self._offsets]

    def start(self, usage: Usage) -> bytes:
        return b""

    def events(self, index: int, events: Sequence[Event], logprobs: Mapping[int, TokenLogprob]) -> bytes:
        for event in events:
            assert isinstance(event, Content), event  # of a plain parser
            self._texts[index].append(event.text)
            collected = self._logprobs[index]
            if self._top is not None and collected is not None:
                for name, values in self._offsets[index].object(event.tokens, logprobs, self._top).items():
                    if values is not None:
                        collected[name] += values
        return b""

    def finish(self, index: int, finish: Finish) -> bytes:
        self._reasons[index] = finish_reason(finish)
        return b""

    def end(self, usage: Usage) -> bytes:
        answer = header("text_completion", f"cmpl-{self._context.id}", self._context)
        answer["choices"] = [
            {"index": index, "text": "".join(pieces), "logprobs": logprobs, "finish_reason": reason}
            for index, (pieces, logprobs, reason) in enumerate(
                zip(self._texts, self._logprobs, self._reasons, strict=True)
            )
        ]
        answer["usage"] = usage_object(usage)
        return sse.json_bytes(answer)

    def error(self, error: RequestError) -> bytes:
        return sse.json_bytes(error_body(error))

    def heartbeat(self) -> bytes:
        return b""


class _Offsets:
    """The older shape of log-probabilities, lists in parallel; `text_offset` counts characters of the choice's text.

    A token whose bytes only continue a character stands where that character stands.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = 0  # characters so far

    def object(self, places: Sequence[int], entries: Mapping[int, TokenLogprob], top: int) -> dict[str, Any]:
        """`choices[].logprobs` of these tokens; top_logprobs is None where no alternatives are wanted."""
        tokens, numbers, offsets = [], [], []
        for place in places:
            token = self._token_bytes(entries[place].token_id)
            tokens.append(token_text(token))
            numbers.append(clamped(entries[place].logprob))
            offsets.append(self._length)
            self._length += len(self._decoder.decode(token))
        alternatives = [self._alternatives(entries[place], top) for place in places] if top else None
        return {"tokens": tokens, "token_logprobs": numbers, "top_logprobs": alternatives, "text_offset": offsets}

    def _alternatives(self, entry: TokenLogprob, top: int) -> dict[str, float]:
        """By text, the most likely first; of two tokens with one text the likelier one."""
        found: dict[str, float] = {}
        for token_id, logprob in most_likely(entry, top):
            found.setdefault(token_text(self._token_bytes(token_id)), clamped(logprob))
        return found


def _echoes(body: CompletionRequest, generation: GenerationRequest, context: WriterContext) -> list[str]:
    """What stands in front of the text of each choice."""
    prompts = prompts_of(body)
    if not body.echo:
        return [""] * (len(prompts) * generation.n)
    texts = [one if isinstance(one, str) else _decoded(one, context) for one in prompts]
    return [text for text in texts for _ in range(generation.n)]


def _decoded(ids: Sequence[int], context: WriterContext) -> str:
    return b"".join(context.token_bytes(token_id) for token_id in ids).decode("utf-8", "replace")
