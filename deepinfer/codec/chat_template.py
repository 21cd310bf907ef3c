"""The V4.1 prompt of a plain conversation: system, user and assistant texts (spec/codec.md 1.2 and 1.3).

Control tokens come from the structure alone: what people wrote is encoded as text, whatever it spells. Tools, pictures
and the wire protocols are not here yet.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from deepinfer.codec.tokenizer import Tokenizer

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DEFAULT_EFFORT = 75
EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


class Message(NamedTuple):
    role: Literal["system", "user", "assistant"]
    text: str


class Control(str):
    """The spelling of a control token."""

    __slots__ = ()


def segments(messages: Sequence[Message], thinking: bool, effort: int = DEFAULT_EFFORT) -> Iterator[str]:
    """The prompt as Control tokens and plain texts, ending with the cue for the assistant's turn.

    Without tools the reasoning of earlier turns is dropped, so every assistant turn of the history opens with </think>.
    Raises ValueError for no messages, an unknown role, or a conversation without a user turn.
    """
    for message in messages:
        if message.role not in ("system", "user", "assistant"):
            raise ValueError(f"messages: role {message.role!r} is not one of system, user, assistant")
    if not any(message.role == "user" for message in messages):
        raise ValueError("messages: need at least one user message")
    yield Control(BOS)
    led = messages[0].role == "system"
    if thinking or led:
        yield Control(SYSTEM)
        if thinking:
            yield EFFORT_LINE.format(effort)
        if led:
            yield messages[0].text
    previous = None
    for message in messages[led:]:
        if message.role == "user" and previous == "user":
            yield "\n\n" + message.text  # adjacent user messages are one turn
        elif message.role == "user":
            yield Control(USER)
            yield message.text
        elif message.role == "system":
            yield Control(SYSTEM)
            yield message.text
        else:
            yield Control(ASSISTANT)
            yield Control(END_THINK)
            yield message.text
            yield Control(EOS)
        previous = message.role
    yield Control(ASSISTANT)
    yield Control(THINK if thinking else END_THINK)


def render(messages: Sequence[Message], tokenizer: Tokenizer, thinking: bool = False) -> list[int]:
    """Token ids of a conversation. Raises ValueError if the tokenizer lacks a control token that it needs."""
    ids: list[int] = []
    text = ""
    for segment in segments(messages, thinking):
        if isinstance(segment, Control):
            ids += tokenizer.encode_text(text) if text else []
            text = ""
            ids.append(tokenizer.control_id(segment))
        else:
            text += segment  # neighbouring texts are one piece to the BPE, as in the string the template stands for
    return ids + (tokenizer.encode_text(text) if text else [])


def render_text(messages: Sequence[Message], thinking: bool = False) -> str:
    """The same prompt as one string, for reading and for trusted prompts."""
    return "".join(segments(messages, thinking))
