"""The prompt is the one the model was trained on, for every kind of conversation, or the conversation is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepseek_recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.codec.conversation import Conversation, Format, Image, Tool, ToolCall, ToolChoice, Turn
from deepinfer.codec.errors import RequestError
from deepinfer.codec.spellings import DSML, END_THINK, IMAGE, PICTURE, THINK, Control
from deepinfer.codec.template import plain_prompt, render

GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "golden_prompts.json").read_text(encoding="utf-8"))
QUICK = settings(max_examples=150, deadline=None)

WEATHER = Tool(
    name="get_weather",
    description="Get weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
PICTURE_OF_A_CAT = Image("https://example.org/cat.png", param="messages.0.content.1")


def system(text: str, **fields: Any) -> Turn:
    return Turn(role="system", text=text, **fields)


def user(text: str, **fields: Any) -> Turn:
    return Turn(role="user", text=text, **fields)


def assistant(text: str = "", **fields: Any) -> Turn:
    return Turn(role="assistant", text=text, **fields)


def result(text: str, call: str | None, **fields: Any) -> Turn:
    return Turn(role="tool", text=text, tool_call_id=call, **fields)


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall(name, "get_weather", arguments)


def talk(*turns: Turn, **fields: Any) -> Conversation:
    return Conversation(turns=turns, **fields)


CITY_AND_DAYS = call("c1", '{"city":"Paris","days":2}')
LOOP = (
    user("Weather?"),
    assistant("Checking.", reasoning="need tool", tool_calls=(call("c1", '{"city": "Paris"}'),)),
    result("sun", "c1"),
)
EXAMPLES: dict[str, Conversation] = {
    "E1": talk(user("Hello")),
    "E2": talk(user("Hello"), thinking=False),
    "E3": talk(
        system("You are terse."), user("Hi"), assistant("Hello!", reasoning="greet"), user("Bye"), effort=50
    ),
    "E4": talk(
        system("You are terse."), user("Hi"), assistant("Hello!"), system("Now answer in French."), user("Bye"),
        thinking=False,
    ),
    "E5": talk(user("Hi"), assistant("Hello!"), system("Now answer in French.")),
    "E6": talk(system("You are terse."), user("Weather in Paris?"), tools=(WEATHER,)),
    "E7": talk(
        user("Compare Paris and Rome"),
        assistant(reasoning="need both", tool_calls=(CITY_AND_DAYS, call("c2", '{"city":"Rome"}'))),
        result("rain", "c2"), result("sun", "c1"),
        tools=(WEATHER,),
    ),
    "E8": talk(*LOOP, assistant("Sunny.", reasoning="done"), user("Thanks"), tools=(WEATHER,), effort=100),
    "E10": talk(user(f"What is\n\n{IMAGE}\n\nthis?", images=(PICTURE_OF_A_CAT,))),
    "E11": talk(user("Write a haiku"), assistant("Autumn", reasoning="plan", prefix=True)),
    "E12": talk(user("Write a haiku"), assistant(reasoning="Let me", prefix=True)),
    "E13": talk(system("s"), user("give json"), format=Format("json_object", shown=True)),
    "E14": talk(
        user("x"),
        format=Format("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}}, shown=True),
        thinking=False,
    ),
    "E15": talk(user("a"), Turn(role="latest_reminder", text="Today is Monday")),
    "E16": talk(user("a"), user("b"), thinking=False),
}  # fmt: skip


def golden(name: str) -> str:
    return GOLDEN[name].replace("{TOOLS}", GOLDEN["tools"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_prompts_are_those_of_the_format_to_the_byte(name: str) -> None:
    """The examples of spec/codec.md 1.5, which the vendor's own package rendered."""
    assert render(EXAMPLES[name]).text == golden(name)


def test_every_example_is_here_but_the_one_that_the_grammar_replaces() -> None:
    assert {*EXAMPLES, "E9", "tools"} == set(GOLDEN)


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("required", ("get_weather",)), ToolChoice()])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_forced_tool_choice_renders_like_a_free_one_also_while_thinking(choice: ToolChoice, thinking: bool) -> None:
    conversation = talk(user("Weather in Paris?"), tools=(WEATHER,), thinking=thinking)
    rendered = render(replace(conversation, tool_choice=choice))
    assert rendered == render(conversation)
    if not thinking:  # E9 opens the block in the prompt; here the grammar makes the model open it
        assert rendered.text + "\n\n<｜DSML｜ calls>\n" == golden("E9")


def test_tool_choice_none_shows_no_tools() -> None:
    conversation = talk(user("Hello"), tools=(WEATHER,), tool_choice=ToolChoice("none"))
    assert render(conversation) == render(talk(user("Hello")))


def test_limiting_the_choice_leaves_the_prompt_as_it_is_for_the_cache() -> None:
    tools = (WEATHER, Tool(name="other"))
    conversation = talk(user("Hello"), tools=tools)
    limited = replace(conversation, tool_choice=ToolChoice("auto", ("other",)))
    assert render(limited) == render(conversation)


@pytest.mark.parametrize("effort", [1, 2, 33, 50, 75, 99, 100])
def test_every_effort_has_its_own_prompt(effort: int) -> None:
    text = render(replace(EXAMPLES["E1"], effort=effort)).text
    assert text == golden("E1").replace("Effort: 75", f"Effort: {effort}")


@pytest.mark.parametrize("effort", [0, 101, -1])
def test_an_effort_out_of_range_is_refused(effort: int) -> None:
    with pytest.raises(RequestError, match="1 to 100"):
        render(talk(user("x"), effort=effort))


def test_effort_lines_that_people_write_stay_as_they_are() -> None:
    lie = "Reasoning Effort: 75 (range 1-100, ...)"
    segments = render(talk(system(lie), user(lie), effort=3)).segments
    assert segments[2].startswith("Reasoning Effort: 3 ")
    assert segments[2].endswith(lie)
    assert segments[4] == lie
    without = render(talk(system(lie), user("x"), thinking=False))
    assert without.segments[2] == lie


@pytest.mark.parametrize(
    ("conversation", "starts", "continued"),
    [
        (EXAMPLES["E1"], "thinking", ""),
        (EXAMPLES["E2"], "content", ""),
        (EXAMPLES["E8"], "thinking", ""),
        (EXAMPLES["E11"], "content", "Autumn"),
        (EXAMPLES["E12"], "thinking", ""),
        (talk(user("x"), assistant("Au", prefix=True)), "content", "Au"),  # <think></think>Au
        (talk(user("x"), assistant("Au", prefix=True), thinking=False), "content", "Au"),
        (talk(user("x"), assistant(prefix=True)), "thinking", ""),
        (talk(user("x"), assistant(prefix=True), thinking=False), "content", ""),
        (talk(user("x"), assistant("</think> <think>", prefix=True), thinking=False), "content", "</think> <think>"),
        (talk(user("</think>"), assistant("</think>")), "thinking", ""),
    ],
)
def test_the_answer_is_read_from_where_the_prompt_ends(conversation: Conversation, starts: str, continued: str) -> None:
    rendered = render(conversation)
    assert (rendered.starts, rendered.continued) == (starts, continued)


def test_an_answer_that_is_continued_has_no_end_and_another_one_a_new_turn() -> None:
    said = (user("Hi"), assistant("Hello"))
    assert render(talk(*said, thinking=False)).text.endswith("Hello<｜end▁of▁sentence｜><｜Assistant｜></think>")
    continued = talk(said[0], replace(said[1], prefix=True), thinking=False)
    assert render(continued).text.endswith("<｜Assistant｜></think>Hello")


def test_history_without_reasoning_is_accepted_and_kept_reasoning_is_not_asked_for() -> None:
    without = [replace(turn, reasoning=None) for turn in LOOP]
    empty = [replace(turn, reasoning="") for turn in LOOP]
    rendered = render(talk(*without, tools=(WEATHER,)))
    assert rendered == render(talk(*empty, tools=(WEATHER,)))
    assert "<｜Assistant｜><think></think>Checking." in rendered.text


def test_a_tool_result_may_show_a_picture() -> None:
    shot = result(f"shot\n\n{IMAGE}", "c1", images=(PICTURE_OF_A_CAT,))
    assert "<tool_result>shot\n\n<｜image｜></tool_result>" in render(talk(*LOOP[:2], shot)).text


def test_pictures_keep_their_places_whatever_the_texts_spell() -> None:
    first, second, third = (Image(f"https://example.org/{n}.png") for n in range(3))
    spelt = "<｜image｜><｜deepseek_image｜>"
    rendered = render(
        talk(
            user(f"{spelt}{IMAGE}{spelt}", images=(first,)),
            assistant(f"{spelt}", tool_calls=(call("a", "{}"), call("b", "{}"))),
            result(f"{IMAGE}{spelt}", "b", images=(third,)),
            result(f"{spelt}{IMAGE}", "a", images=(second,)),
            user(IMAGE),
        )
    )
    assert rendered.images == (first, second, third)  # results are in the order of the calls
    assert [s for s in rendered.segments if s == PICTURE and isinstance(s, Control)] == [PICTURE] * 3
    places = [i for i, s in enumerate(rendered.segments) if isinstance(s, Control) and s == PICTURE]
    assert rendered.segments[places[0] - 1].endswith(spelt)
    assert rendered.segments[places[0] + 1] == spelt
    assert rendered.segments[places[1] - 1].endswith(f"<tool_result>{spelt}")
    assert rendered.segments[places[2] - 1].endswith("<tool_result>")
    assert rendered.segments[-3].endswith(IMAGE)  # without a picture the sign is a text like any other


def test_forced_signs_cannot_move_a_picture() -> None:
    with pytest.raises(RequestError, match="U\\+FDD0") as caught:
        render(talk(user(f"{IMAGE}{IMAGE}", images=(PICTURE_OF_A_CAT,))))
    assert caught.value.param == "messages.0"


def test_only_json_formats_that_were_asked_for_by_name_are_shown() -> None:
    plain = render(talk(user("x")))
    for form in [
        Format("json_object"),
        Format("json_schema", {"type": "object"}),
        Format("regex", "a+", shown=True),
        Format("ebnf", 'root ::= "a"', shown=True),
        Format("choice", ["a", "b"], shown=True),
    ]:
        assert render(talk(user("x"), format=form)) == plain
    assert "reply:\ntrue<" in render(talk(user("x"), format=Format("json_schema", True, shown=True))).text


def test_tools_without_description_or_parameters_are_shown() -> None:
    text = render(talk(user("x"), tools=(Tool(name="now"), Tool(name="add", strict=True)))).text
    assert '{"name": "now", "description": "", "parameters": {}}\n{"name": "add",' in text


REFUSED = {
    "no message": (talk(), "messages", "at least one"),
    "prefix before the end": (talk(assistant("a", prefix=True), user("b")), "messages.0", "last"),
    "prefix of a user": (talk(user("b", prefix=True)), "messages.0", "assistant"),
    "prefix with tools": (
        talk(user("a"), assistant("b", prefix=True), tools=(WEATHER,)), "messages.1", "together with tools",
    ),
    "prefix with a JSON format": (
        talk(user("a"), assistant("b", prefix=True), format=Format("json_object", shown=True, param="response_format")),
        "messages.1", "response_format",
    ),
    "prefix with calls": (
        talk(user("a"), assistant(tool_calls=(CITY_AND_DAYS,), prefix=True)), "messages.1", "tool calls",
    ),
    "picture of the assistant": (talk(assistant(IMAGE, images=(PICTURE_OF_A_CAT,))), "messages.0", "pictures"),
    "picture in a reminder": (
        talk(Turn(role="latest_reminder", text=IMAGE, images=(PICTURE_OF_A_CAT,))), "messages.0", "pictures",
    ),
    "picture without a place": (talk(user("", images=(PICTURE_OF_A_CAT,))), "messages.0", "0 places"),
    "result without calls": (talk(user("a"), result("b", "c1")), "messages.1", "follow the assistant"),
    "result of another call": (talk(*LOOP[:2], result("x", "c9")), "messages.2", "'c9'"),
    "result without an id": (talk(*LOOP[:2], result("x", None)), "messages.2", "needs the id"),
    "second result": (talk(*LOOP, result("x", "c1")), "messages.3", "second result"),
    "result that is too late": (talk(*LOOP[:2], user("and?"), LOOP[2]), "messages.1", "'c1' has no result"),
    "call at the end": (talk(*LOOP[:2]), "messages.1", "'c1' has no result"),
    "calls of one id": (
        talk(user("a"), assistant(tool_calls=(CITY_AND_DAYS, CITY_AND_DAYS))), "messages.1", "same id",
    ),
    "half a character": (talk(user("a"), assistant("b\ud800")), "messages.1", "surrogate"),
    "half a character in thoughts": (talk(assistant("b", reasoning="\udfff")), "messages.0", "surrogate"),
    "half a character in arguments": (
        talk(user("a"), assistant(tool_calls=(call("c1", '{"a": "\ud800"}'),)), result("b", "c1")),
        "messages.1", "surrogate",
    ),
    "half a character in a tool": (talk(user("a"), tools=(Tool(name="f", description="\ud800"),)), "tools", "'f'"),
    "number beyond JSON in a tool": (
        talk(user("a"), tools=(Tool(name="f", parameters={"maximum": 10**30}),)), "tools", "'f'",
    ),
    "no JSON in a schema": (
        talk(user("a"), format=Format("json_schema", {"minimum": float("nan")}, shown=True, param="text.format")),
        "text.format", "shown",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_rendered_is_refused_by_name(what: str) -> None:
    conversation, param, reason = REFUSED[what]
    with pytest.raises(RequestError) as caught:
        render(conversation)
    assert caught.value.param == param
    assert reason in caught.value.message
    assert caught.value.status == 400


def test_errors_name_the_field_that_the_client_wrote() -> None:
    with pytest.raises(RequestError) as caught:
        render(talk(replace(assistant("b\ud800"), param="input.7")))
    assert caught.value.param == "input.7"


def test_schemas_nested_without_end_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(50_000):
        schema = {"not": schema}
    with pytest.raises(RequestError, match="'f'"):
        render(talk(user("a"), tools=(Tool(name="f", parameters=schema),)))
    with pytest.raises(RequestError, match="response_format"):
        render(talk(user("a"), format=Format("json_schema", schema, shown=True)))
    while schema:  # or Python frees it recursively
        schema = schema.pop("not")


def test_a_call_id_may_return_in_a_later_turn() -> None:
    second = (assistant(tool_calls=(call("c1", "{}"), call("c0", "{}"))), result("r0", "c0"), result("r1", "c1"))
    text = render(talk(*LOOP, *second)).text
    assert text.index("sun") < text.index("r1") < text.index("r0")


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@QUICK
@given(
    names=st.lists(st.lists(NAMES, min_size=1, max_size=3), max_size=3),
    tools=st.booleans(),
    thinking=st.booleans(),
)
def test_calls_of_any_name_render_as_the_reference_does(names: list[list[str]], tools: bool, thinking: bool) -> None:
    """With arguments that the reference gets right; test_arguments.py has the others."""
    turns = [user("q")]
    theirs: list[deepseek_recipe.Message] = [deepseek_recipe.UserMessage("q")]
    arguments = ["{}", '{"s":"｜DSML｜ invoke","n":[1,2.5]}', ' {"a":{"b":null}} ']
    for calls in names:
        made = tuple(ToolCall(str(i), name, arguments[i]) for i, name in enumerate(calls))
        turns += [assistant("c", reasoning="r", tool_calls=made), *(result(f"r{i}", str(i)) for i in range(len(made)))]
        theirs += [
            deepseek_recipe.AssistantMessage("c", "r", [deepseek_recipe.ToolCall(*one) for one in made]),
            *(deepseek_recipe.ToolMessage(f"r{i}", str(i)) for i in range(len(made))),
        ]
    ours = render(talk(*turns, tools=(WEATHER,) if tools else (), thinking=thinking))
    schema = deepseek_recipe.ToolDefinition(WEATHER.name, WEATHER.description, WEATHER.parameters)
    reference = deepseek_recipe.DeepseekV41Encoding().render_conversation(
        deepseek_recipe.Conversation(theirs, tools=[schema] if tools else [], thinking_mode=thinking)
    )
    assert ours.text == reference.prompt
    controls = [reference.prompt[start:end] for start, end in reference.special_ranges]
    assert [s for s in ours.segments if isinstance(s, Control)] == controls
    assert DSML in controls or not names


def test_a_raw_prompt_is_the_begin_token_and_a_text() -> None:
    assert plain_prompt("<think>").segments == ("<｜begin▁of▁sentence｜>", "<think>")
    assert not isinstance(plain_prompt(THINK + END_THINK).segments[1], Control)
    assert plain_prompt("").text == "<｜begin▁of▁sentence｜>"
    with pytest.raises(RequestError, match=r"prompt\.2: has half"):
        plain_prompt("\ud800", param="prompt.2")
