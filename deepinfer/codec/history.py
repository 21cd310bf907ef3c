"""What must hold between the turns of a conversation before it can be rendered."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.codec.conversation import Conversation, Turn
from deepinfer.codec.errors import RequestError
from deepinfer.codec.spellings import IMAGE

_WITH_IMAGES = ("system", "user", "tool")


def check(conversation: Conversation) -> None:
    """Raises RequestError naming the turn: no turns; pictures where none can be, or not as many as their signs; a
    prefix that is not the last assistant turn, or stands together with tools, calls or a JSON format that the prompt
    shows; a call without a result before the next turn, or a result without its call.
    """
    turns = conversation.turns
    if not turns:
        raise RequestError("messages: need at least one message", param="messages")
    for index in range(len(turns)):
        _check_images(turns, index)
        _check_prefix(conversation, index)
    _check_results(turns)


def error_at(turns: Sequence[Turn], index: int, what: str) -> RequestError:
    """An error about one turn. It names the field in the client's spelling, where the protocol has told it."""
    name = turns[index].param or f"messages.{index}"
    return RequestError(f"{name}: {what}", param=name)


def _check_images(turns: Sequence[Turn], index: int) -> None:
    turn = turns[index]
    if not turn.images:
        return
    if turn.role not in _WITH_IMAGES:
        raise error_at(turns, index, f"pictures cannot stand in a message of role {turn.role!r}")
    if (signs := turn.text.count(IMAGE)) != len(turn.images):
        what = f"{signs} places for {len(turn.images)} pictures; leave the noncharacter U+FDD0 out of the text"
        raise error_at(turns, index, what)


def _check_prefix(conversation: Conversation, index: int) -> None:
    turns = conversation.turns
    turn = turns[index]
    if not turn.prefix:
        return
    if turn.role != "assistant" or index != len(turns) - 1:
        raise error_at(turns, index, "only the last message can be a prefix, and only one of the assistant")
    if turn.tool_calls:
        raise error_at(turns, index, "a message with tool calls is complete and cannot be a prefix")
    if conversation.tools and conversation.tool_choice.mode != "none":
        raise error_at(turns, index, "a prefix cannot stand together with tools")
    form = conversation.format
    if form is not None and form.shown and form.kind in ("json_object", "json_schema"):
        raise error_at(turns, index, f"a prefix cannot stand together with {form.param or 'a JSON response format'}")


def _check_results(turns: Sequence[Turn]) -> None:
    index = 0
    while index < len(turns):
        turn = turns[index]
        if turn.role == "tool":  # results of calls are passed over below, with their calls
            raise error_at(turns, index, "a tool result must follow the assistant message that made the call")
        index += 1
        if turn.role == "assistant" and turn.tool_calls:
            index = _behind_results(turns, index)


def _behind_results(turns: Sequence[Turn], start: int) -> int:
    """The index behind the results that begin at `start`, of the calls of the turn before. They may be in any order."""
    calls = {call.id for call in turns[start - 1].tool_calls}
    if len(calls) < len(turns[start - 1].tool_calls):
        raise error_at(turns, start - 1, "two tool calls have the same id")
    missing = set(calls)
    index = start
    while index < len(turns) and turns[index].role == "tool":
        answered = turns[index].tool_call_id
        if answered is None:
            raise error_at(turns, index, "a tool result needs the id of the call that it answers")
        if answered not in calls:
            raise error_at(turns, index, f"no call of the assistant message before has the id {_short(answered)}")
        if answered not in missing:
            raise error_at(turns, index, f"a second result for the call {_short(answered)}")
        missing.remove(answered)
        index += 1
    for call in turns[start - 1].tool_calls:
        if call.id in missing:
            raise error_at(turns, start - 1, f"the call {_short(call.id)} has no result before the next message")
    return index


def _short(text: str) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
