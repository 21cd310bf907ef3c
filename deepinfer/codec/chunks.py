"""The stream of OpenAI's Chat and Completions protocols: chunks with choices, put together from ready-made bytes.

A chunk differs from the one before in a few bytes, so what all chunks share is encoded once per stream: a token costs
the encoding of its own text and one concatenation.
"""

from __future__ import annotations

from typing import Any

from deepinfer.codec import sse
from deepinfer.codec.errors import RequestError
from deepinfer.codec.generation import Usage, WriterContext
from deepinfer.codec.openai_errors import error_body
from deepinfer.codec.openai_objects import usage_object


class Chunks:
    """Frames of one stream.

    options: the request's stream_options. include_usage: a last chunk without choices tells the usage, all others say
    null. continuous_usage_stats: they tell it as far as it is known: tokens of markup count when the answer is whole.
    """

    def __init__(self, kind: str, answer_id: str, num_choices: int, context: WriterContext, options: Any) -> None:
        head = header(kind, answer_id, context)
        self._open = b"data: " + sse.json_bytes(head)[:-1] + b',"choices":['
        self._heads = [self._open + b'{"index":%d,' % index for index in range(num_choices)]
        self._tell = bool(options and options.include_usage)
        self._count = bool(options and options.continuous_usage_stats)
        self._end = b',"usage":null}\n\n' if self._tell else b"}\n\n"
        self._plain = b',"logprobs":null,"finish_reason":null}]' + self._end
        self._usage = Usage(0, 0)

    def start(self, usage: Usage) -> None:
        self._usage = usage

    def add(self, tokens: int, reasoning_tokens: int = 0) -> None:
        """Counts tokens for the chunks that follow."""
        if self._count:
            so_far = self._usage
            self._usage = so_far._replace(
                completion_tokens=so_far.completion_tokens + tokens,
                reasoning_tokens=so_far.reasoning_tokens + reasoning_tokens,
            )

    def piece(self, index: int, payload: bytes) -> bytes:
        """A chunk of one choice in which nothing ends. payload: the choice's own fields, as `"text":"Hello"`."""
        if self._count:
            return self.choice(index, payload)
        return self._heads[index] + payload + self._plain

    def choice(self, index: int, payload: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        """A chunk of one choice; logprobs and reason are JSON."""
        end = b',"usage":%b}\n\n' % sse.json_bytes(usage_object(self._usage)) if self._count else self._end
        return b'%b%b,"logprobs":%b,"finish_reason":%b}]%b' % (self._heads[index], payload, logprobs, reason, end)

    def end(self, usage: Usage) -> bytes:
        """The usage, if it was asked for, and the end of the stream."""
        if not self._tell:
            return sse.DONE
        return b'%b],"usage":%b}\n\n' % (self._open, sse.json_bytes(usage_object(usage))) + sse.DONE

    def error(self, error: RequestError) -> bytes:
        """The stream breaks off: no [DONE] follows, which would call the answer whole."""
        return sse.json_frame(error_body(error))


def header(kind: str, answer_id: str, context: WriterContext) -> dict[str, Any]:
    """What all chunks of a stream, and the complete answer, begin with."""
    return {
        "id": answer_id,
        "object": kind,
        "created": context.created,
        "model": context.model,
        "system_fingerprint": context.fingerprint or None,
    }
