"""A conversation as its V4.1 prompt (spec/codec.md 1): control tokens from the structure, texts as texts.

The grammar of the prompt is deepseek_recipe's. Where it falls short its text is taken apart and put right: any effort
from 1 to 100 (effort.py), and arguments of past calls to the letter (arguments.py). A conversation that it would
render into something crooked is refused before (history.py). Tools of a forced choice are rendered as for a free one:
the opener is generated, under the grammar's hand, which also works behind thinking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from deepinfer.codec.arguments import parameters
from deepinfer.codec.conversation import Conversation, Image, Tool, Turn
from deepinfer.codec.effort import REFERENCE, check_effort, with_effort
from deepinfer.codec.errors import RequestError
from deepinfer.codec.history import check, error_at
from deepinfer.codec.spellings import ASSISTANT, BOS, CONTROL, DSML, END_THINK, IMAGE, PICTURE, THINK, Control

if TYPE_CHECKING:
    import deepseek_recipe  # imported when first used: 45 ms that the command line need not wait for

_CALL = ' invoke name="'
_CONTROL = {**{str(control): control for control in CONTROL}, IMAGE: PICTURE}
_NOT_JSON = (ValueError, TypeError, OverflowError, RecursionError)  # what the reference raises for a bad schema


class Rendered(NamedTuple):
    """A prompt."""

    segments: tuple[str, ...]  # Control spellings, and plain texts between them
    images: tuple[Image, ...]  # in the order of the PICTURE segments
    starts: Literal["thinking", "content"]  # where the output begins; thinking: the prompt ends inside <think>
    continued: str = ""  # content that the prompt already holds, of a prefix

    @property
    def text(self) -> str:
        """The whole prompt for reading: what people wrote and control tokens look alike in it."""
        return "".join(self.segments)


def render(conversation: Conversation) -> Rendered:
    """The prompt of a conversation, up to where the assistant goes on. Raises RequestError naming the turn or field."""
    recipe = _recipe()
    check_effort(conversation.effort)
    check(conversation)
    turns = conversation.turns
    images: list[Image] = []
    messages = [_message(recipe, turns, index, images) for index in range(len(turns))]
    prompt = _encoding().render_conversation(_conversation(recipe, conversation, messages))
    segments = list(_segments(prompt.prompt, prompt.special_ranges))
    if conversation.thinking:
        segments[2] = with_effort(segments[2], conversation.effort)  # behind BOS and System
    if any(turn.tool_calls for turn in turns):
        segments = list(_with_arguments(segments, turns))
    last = next(segment for segment in reversed(segments) if _is(segment, THINK) or _is(segment, END_THINK))
    starts: Literal["thinking", "content"] = "thinking" if last == THINK else "content"
    return Rendered(
        tuple(segments),
        tuple(images[int(source.path)] for source in prompt.image_sources),
        starts,
        turns[-1].text if turns[-1].prefix else "",
    )


def plain_prompt(text: str, param: str = "prompt") -> Rendered:
    """The prompt of /v1/completions: the begin token and a text. Raises RequestError for a lone surrogate."""
    if not _is_unicode(text):
        raise RequestError(f"{param}: has half of a surrogate pair; send valid Unicode text", param=param)
    return Rendered((BOS, text) if text else (BOS,), (), "content")


@cache
def _recipe() -> Any:
    import deepseek_recipe

    return deepseek_recipe


@cache
def _encoding() -> deepseek_recipe.DeepseekV41Encoding:
    return _recipe().DeepseekV41Encoding()


def _conversation(recipe: Any, conversation: Conversation, messages: list[Any]) -> deepseek_recipe.Conversation:
    form = conversation.format
    shown: dict[str, Any] = {}
    if form is not None and form.shown and form.kind == "json_object":
        shown["response_format"] = "json_object"
    elif form is not None and form.shown and form.kind == "json_schema":
        shown["response_schema"] = form.value
    # All tools, whichever may be called: the prompt stays the same for the prefix cache.
    tools = () if conversation.tool_choice.mode == "none" else conversation.tools
    definitions = [_tool(recipe, tool) for tool in tools]
    try:
        return recipe.Conversation(
            messages,
            thinking_mode=conversation.thinking,
            tools=definitions,
            reasoning_effort=REFERENCE if conversation.thinking else None,
            **shown,
        )
    except _NOT_JSON as error:
        param = (form and form.param) or "response_format"
        raise RequestError(f"{param}: the schema cannot be shown to the model ({error})", param=param) from None


def _tool(recipe: Any, tool: Tool) -> deepseek_recipe.ToolDefinition:
    """The schema is shown as it is, also a strict one: the grammar enforces that very schema."""
    try:
        return recipe.ToolDefinition(tool.name, tool.description, tool.parameters or {}, tool.strict)
    except _NOT_JSON as error:
        name = ascii(tool.name)[:80]
        raise RequestError(f"tools: the tool {name} cannot be shown to the model ({error})", param="tools") from None


def _message(recipe: Any, turns: Sequence[Turn], index: int, images: list[Image]) -> deepseek_recipe.Message:
    """The reference's message. Of a picture it only needs the place: its path is the index in `images`. A call keeps
    its name; its arguments come later (_with_arguments)."""
    turn = turns[index]
    try:
        sources = None
        if turn.images:
            sources = [recipe.UrlImageSource("", path=str(len(images) + place)) for place in range(len(turn.images))]
            images += turn.images
        if turn.role == "system":
            return recipe.SystemMessage(turn.text, sources, image_token=IMAGE)
        if turn.role == "user":
            return recipe.UserMessage(turn.text, sources, image_token=IMAGE)
        if turn.role == "tool":
            return recipe.ToolMessage(turn.text, turn.tool_call_id, sources, image_token=IMAGE)
        if turn.role == "latest_reminder":
            return recipe.LatestReminderMessage(turn.text)
        for call in turn.tool_calls:
            call.arguments.encode("utf-8")
        calls = [recipe.ToolCall(call.id, call.name, "{}") for call in turn.tool_calls]
        return recipe.AssistantMessage(turn.text, turn.reasoning, calls or None, turn.prefix)
    except UnicodeEncodeError:
        raise error_at(turns, index, "has half of a surrogate pair; send valid Unicode text") from None


def _segments(prompt: str, ranges: Iterable[tuple[int, int]]) -> Iterator[str]:
    """The prompt cut at its control tokens. ranges: their places, as (start, end) in characters.

    The reference also makes control tokens of grounding markup (<｜ref｜>, <｜box｜> and so on) that an assistant
    spells. Here no text becomes one (spec/codec.md 10.1), so those ranges stay in the text.
    """
    at = 0
    for start, end in ranges:
        control = _CONTROL.get(prompt[start:end])
        if control is None:
            continue
        if at < start:
            yield prompt[at:start]
        yield control
        at = end
    if at < len(prompt):
        yield prompt[at:]


def _with_arguments(segments: Sequence[str], turns: Iterable[Turn]) -> Iterator[str]:
    """The prompt with the arguments of its calls, which were rendered without any.

    Such a call is DSML, a text from its name to the closer's "</", and DSML again. DSML tokens come from the structure
    alone, so a text between two of them that begins like a call is one, once the tools' description has ended.
    """
    calls = (call for turn in turns for call in turn.tool_calls)
    in_history = False
    for before, segment in pairwise((BOS, *segments)):
        in_history = in_history or _is(segment, ASSISTANT)
        if not (in_history and _is(before, DSML) and segment.startswith(_CALL) and not isinstance(segment, Control)):
            yield segment
            continue
        call = next(calls)
        text = f'{_CALL}{call.name}">\n'
        if segment != text + "\n</":
            raise RuntimeError(f"{segment[:80]!r} is not a call without arguments; see deepseek_recipe's version")
        given = parameters(call.arguments)
        for key, value, is_string in given:
            yield text + "<"
            yield DSML
            yield f' parameter name="{key}" string="{"true" if is_string else "false"}">{value}</'
            yield DSML
            text = " parameter>\n"
        yield text + ("</" if given else "\n</")
    if (left := next(calls, None)) is not None:
        raise RuntimeError(f"the call {left.name!r} was not rendered; see deepseek_recipe's version")


def _is(segment: str, control: Control) -> bool:
    return isinstance(segment, Control) and segment == control


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
