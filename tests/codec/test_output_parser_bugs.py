"""The public bugs of spec/codec.md 11 that are the parser's: each complaint is a test, at every cut of the output."""

from __future__ import annotations

import pytest
from outputs import (
    END,
    NANO,
    PARIS,
    PARIS_CALL,
    WEATHER,
    Call,
    D,
    E,
    T,
    block,
    invoke,
    nano_ids,
    parameter,
    parse,
    run,
    spelled,
)

from deepinfer.codec.conversation import Tool
from deepinfer.codec.events import Content, Reasoning, ToolArguments, ToolEnd, ToolStart
from deepinfer.codec.generation import Finish
from deepinfer.codec.parsing import OutputParser

CALLED = Finish("tool_calls")
STOPPED = Finish("stop")
WRITE = Tool(
    name="write", parameters={"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
)


def test_01_a_closing_tag_does_not_leak_into_the_arguments() -> None:
    answer = parse(block(PARIS), starts="content")
    assert answer.calls == [PARIS_CALL] and answer.content == "" and answer.finish == CALLED


@pytest.mark.parametrize("value", ["ls 2>&1", "a <", "a </", "<", "</", "x></", "1 < 2 > 0", f"</{D}", "</ parameter>"])
def test_02_a_value_that_looks_like_the_beginning_of_a_closer_is_exact(value: str) -> None:
    answer = parse(block(invoke("get_weather", parameter("city", value))), starts="content")
    assert [call.value for call in answer.calls] == [{"city": spelled(value)}]


def test_03_an_opener_in_pieces_does_not_leak_as_content() -> None:
    ids = nano_ids(f"<{D} cal") + nano_ids("ls") + nano_ids(f">\n{PARIS}</{D} calls>")
    for cut in range(len(ids)):
        answer = run(ids, [cut], starts="content")
        assert answer.content == "" and answer.calls == [PARIS_CALL]


def test_04_arguments_do_not_all_come_at_the_end() -> None:
    lines = "".join(f"{n}: words that fill a line\n" for n in range(200))
    ids = nano_ids(block(invoke("write", parameter("path", "a.txt"), parameter("text", lines))))
    tokens = run(ids, range(len(ids)), starts="content", tools=[WRITE])
    assert tokens.calls[0].value == {"path": "a.txt", "text": lines}
    assert tokens == run(ids, starts="content", tools=[WRITE])

    parser = OutputParser(NANO, starts="content", tools=[WRITE], make_id=lambda: "id")
    sizes = [sum(len(e.text) for e in parser.push([i]) if isinstance(e, ToolArguments)) for i in ids]
    assert max(sizes) < 40 and sum(size > 0 for size in sizes) > 1000


def test_05_text_that_waited_at_the_end_is_not_lost() -> None:
    for text in ("2 <", "2 </", "a\n", "a\n\n", "a\n\n<", f"a\n\n<{D}", f"a\n\n<{D} calls", f"<{D} calls>\n<{D} inv"):
        assert parse(text + END, starts="content").content == spelled(text)
        assert parse(text + END).reasoning == spelled(text)


@pytest.mark.parametrize("key", ["arguments", "input"])
@pytest.mark.parametrize("string", [True, False])
def test_06_an_object_of_arguments_in_a_wrapper_is_taken_out_of_it(key: str, string: bool) -> None:
    wrapped = parameter(key, ' {"city": "Paris", "days":2}\n', string)
    answer = parse(block(invoke("get_weather", wrapped)), starts="content")
    assert answer.calls == [Call("get_weather", '{"city": "Paris", "days":2}')]


def test_06_what_is_no_wrapper_keeps_its_key() -> None:
    def arguments(tool: Tool, *parameters: str) -> object:
        (call,) = parse(block(invoke(tool.name, *parameters)), starts="content", tools=[tool]).calls
        return call.value

    declared = Tool(name="run", parameters={"properties": {"input": {"type": "object"}, "a": {}}})
    assert arguments(declared, parameter("input", '{"a": 1}', False)) == {"input": {"a": 1}}
    assert arguments(WEATHER, parameter("input", '{"a": 1}', False)) == {"input": {"a": 1}}  # keys of another thing
    assert arguments(WEATHER, parameter("arguments", "[1]", False)) == {"arguments": [1]}
    assert arguments(WEATHER, parameter("arguments", "not JSON")) == {"arguments": "not JSON"}
    both = parameter("arguments", '{"city": "x"}', False), parameter("days", "2", False)
    assert arguments(WEATHER, *both) == {"arguments": {"city": "x"}, "days": 2}
    assert arguments(WEATHER, *reversed(both)) == {"days": 2, "arguments": {"city": "x"}}
    assert arguments(Tool(name="now"), parameter("arguments", "{}", False)) == {}
    assert arguments(Tool(name="now", parameters={"properties": 3}), parameter("input", "1", False)) == {"input": 1}


def test_07_the_end_token_is_never_visible_and_an_unfinished_thought_can_be_the_answer() -> None:
    answer = parse("Good morning!" + END)
    assert (answer.reasoning, answer.content, answer.finish) == ("Good morning!", "", STOPPED)
    assert parse("Good morning!" + END, promote_unterminated=True).content == "Good morning!"
    assert parse("Good morning!", promote_unterminated=True, reason="length").content == ""  # a thought that was cut
    assert parse("a" + E + "b" + END, promote_unterminated=True).content == "b"
    assert parse("a" + E + END, promote_unterminated=True).content == ""
    assert parse("a" + block(PARIS) + END, promote_unterminated=True).content == ""


def test_08_a_call_inside_an_open_thought_is_a_call() -> None:
    for separator in ("", "\n\n"):
        answer = parse("need" + separator + block(PARIS).lstrip() + END)
        assert (answer.reasoning, answer.content, answer.calls, answer.finish) == ("need", "", [PARIS_CALL], CALLED)


def test_09_every_answer_is_divided_anew() -> None:
    for _ in range(2):
        answer = parse("thought" + E + "answer" + END)
        assert (answer.reasoning, answer.content) == ("thought", "answer")


def test_10_without_tool_choice_no_markup_leaks() -> None:
    for tools in (None, [WEATHER]):
        answer = parse("a" + E + "hi" + block(PARIS, invoke("x")) + END, tools=tools, drop_calls=True)
        assert (answer.content, answer.calls, answer.finish, answer.done) == ("hi", [], STOPPED, True)
    cut = parse("hi" + block(PARIS)[:60], starts="content", drop_calls=True, reason="length")
    assert (cut.content, cut.calls, cut.finish) == ("hi", [], Finish("length"))
    assert parse("hi" + PARIS + END, starts="content", drop_calls=True).content == "hi"


@pytest.mark.parametrize("value", ["echo stamp", "parameter", " a ", "\n", "calls>", "invoke", "\tx\n\n"])
def test_11_no_character_is_stripped_from_a_value(value: str) -> None:
    (call,) = parse(block(invoke("get_weather", parameter("city", value))), starts="content").calls
    assert call.value == {"city": value}


@pytest.mark.parametrize(
    "malformed",
    [
        f'<{D} invoke nme="get_weather">\n</{D} invoke>\n',
        f'<{D} invoke name="get_weather"\n</{D} invoke>\n',
        f'<{D} invoke name="get_weather">"Haifa"</{D} invoke>\n',
        f'<{D} invoke name="get_weather">{{"city": "Ha</{D} invoke>\n',
        f'<{D} invoke name="get_weather">{{"city": }}</{D} invoke>\n',
        f'<{D} invoke name="get_weather">{{"city": 1}} or so</{D} invoke>\n',
        f'<{D} invoke name="get_weather">{{"city": 1\n',
        f'<{D} invoke name="get_weather">\n',
        f"<{D} invoke>\n",
    ],
)
def test_12_a_malformed_call_does_not_take_a_good_one_with_it(malformed: str) -> None:
    first = parse(block(malformed, PARIS) + END, starts="content")
    assert first.calls == [PARIS_CALL] and first.finish == CALLED
    assert first.content == spelled(block(malformed).removesuffix(f"</{D} calls>")).rstrip("\n")
    between = parse(block(PARIS, malformed, PARIS) + END, starts="content")
    assert [call for call in between.calls if call.complete] == [PARIS_CALL, PARIS_CALL]
    last = parse(block(PARIS, malformed) + END, starts="content")
    assert last.calls[0] == PARIS_CALL and last.finish == CALLED


def test_13_three_calls_are_three_calls_however_they_are_cut() -> None:
    rome = invoke("get_weather", parameter("city", "Rome"), parameter("days", "3", False))
    answer = parse("a" + E + "b" + block(PARIS, rome, invoke("get_time")) + END)
    assert answer.calls == [PARIS_CALL, Call("get_weather", '{"city": "Rome", "days": 3}'), Call("get_time", "{}")]


def test_14_a_whole_block_in_one_piece_is_a_call() -> None:
    assert run(nano_ids(block(PARIS) + END), starts="content").calls == [PARIS_CALL]


@pytest.mark.parametrize("value", ['{"code":123}', '{"a":{"b":"x"}}', "[1, 2]", "12", "true", "null", "-1.5e3"])
def test_15_arguments_that_do_not_end_in_a_quote_are_whole(value: str) -> None:
    answer = parse(block(invoke("get_weather", parameter("where", value, False))), starts="content")
    assert answer.calls == [Call("get_weather", f'{{"where": {value}}}')]


@pytest.mark.parametrize("word", ["toolcalls", "tool", "tool_calls", "function_calls", "call"])
def test_16_a_misspelled_block_with_a_declared_tool_is_a_call(word: str) -> None:
    source = "hi" + block(PARIS, invoke("get_time")).replace(" calls>", f" {word}>")
    answer = parse(source + END, starts="content")
    assert answer.content == "hi" and answer.calls == [PARIS_CALL, Call("get_time", "{}")] and answer.finish == CALLED


def test_16_a_call_without_a_block_around_it_is_a_call() -> None:
    answer = parse("hi\n\n" + PARIS + END, starts="content")
    assert answer.content == "hi" and answer.calls == [PARIS_CALL]


@pytest.mark.parametrize("around", ["", f"<{D} toolcalls>\n"])
def test_16_but_neither_undeclared_nor_unfinished_ones(around: str) -> None:
    undeclared = around + invoke("rm", parameter("path", "/"))
    unfinished = around + PARIS.removesuffix(f"</{D} invoke>\n")
    for source in (undeclared, unfinished):
        for reason in ("stop", "length"):
            answer = parse("hi\n\n" + source + END, starts="content", reason=reason)
            assert answer.content == "hi\n\n" + spelled(source) and not answer.calls
            assert answer.finish == Finish(reason)


def test_17_a_closer_behind_the_closer_is_dropped() -> None:
    for block_of in (block(PARIS), PARIS):
        answer = parse("a" + E + "hi" + block_of + f"</{D} calls></{D} calls></{D} invoke>" + END)
        assert answer.content == "hi" and answer.calls == [PARIS_CALL]
    assert parse(f"hi</{D} calls> you</{D} parameter>", starts="content").content == "hi you"


def test_18_an_answer_without_content_is_reported_as_one() -> None:
    answer = parse("thought" + E + END)
    assert (answer.reasoning, answer.content, answer.finish) == ("thought", "", STOPPED)


@pytest.mark.parametrize("body", ['"Haifa"', "Haifa", "12", "[1]", "null", "{'city': 'Haifa'}", "{}{}"])
def test_20_a_call_whose_body_is_no_object_is_not_made(body: str) -> None:
    source = block(f'<{D} invoke name="get_weather">{body}</{D} invoke>\n')
    answer = parse(source + END, starts="content")
    assert not answer.calls and answer.finish == STOPPED and answer.content == spelled(source)


@pytest.mark.parametrize(
    "body",
    [
        '{"a":1}',
        "{}",
        '{"a": "\\"</x>\\\\"}',
        f'{{"a": "</{D} invoke>\\n<{D} invoke>"}}',
        '{\n  "a": {\n    "b": 1}\n}',
    ],
)
def test_21_a_body_that_is_an_object_is_the_arguments(body: str) -> None:
    for around in ("", "\n", "  "):
        source = block(f'<{D} invoke name="get_time">{around}{body}{around}</{D} invoke>\n', PARIS)
        answer = parse(source + END, starts="content")
        assert answer.calls == [Call("get_time", spelled(body)), PARIS_CALL] and not answer.content


def test_27_a_stop_string_in_the_reasoning_does_not_end_the_answer() -> None:
    answer = parse("9.11 or 9.8?" + E + "It is 9.8, I think" + END, stop=("9.8",))
    assert (answer.reasoning, answer.content) == ("9.11 or 9.8?", "It is ")
    assert answer.finish == Finish("stop", "9.8") and answer.done


def test_27_nor_does_one_in_a_call() -> None:
    answer = parse("a" + E + block(PARIS) + END, stop=("Paris", "\n\n", "<", "｜DSML｜"))
    assert answer.calls == [PARIS_CALL] and answer.finish == CALLED


def test_30_the_first_token_is_delivered_and_no_event_is_empty() -> None:
    ids = nano_ids("U") + nano_ids("BS")
    for tools in (None, [WEATHER]):
        assert run(ids, [1], starts="content", tools=tools).events == [Content("UBS", tuple(range(len(ids))))]


def test_31_the_dialect_of_the_model_before_is_understood() -> None:
    answer = parse("hi" + block(PARIS).replace(f"{D} ", D).replace("calls>", "tool_calls>") + END, starts="content")
    assert answer.content == "hi" and answer.calls == [PARIS_CALL]


def test_32_a_closer_without_its_space_closes_all_the_same() -> None:
    answer = parse("hi" + block(PARIS).replace(f"/{D} ", f"/{D}") + END, starts="content")
    assert answer.content == "hi" and answer.calls == [PARIS_CALL] and answer.done


@pytest.mark.parametrize("bar", ["|", "｜"])
def test_33_markup_that_is_only_spelled_is_text(bar: str) -> None:
    text = block(PARIS).replace(D, f"{bar}DSML{bar}")
    for starts in ("thinking", "content"):
        answer = parse(text + END, starts=starts)
        assert answer.content + answer.reasoning == text and not answer.calls and answer.finish == STOPPED


def test_33_spelled_ends_of_thinking_are_text_too() -> None:
    answer = parse("it writes </think> and <think>, then" + E + "</think>" + END)
    assert answer.reasoning == "it writes </think> and <think>, then" and answer.content == "</think>"


@pytest.mark.parametrize(
    "mention",
    [
        f"the {D} token",
        f"the <{D} token",
        f"<{D} calls and",
        f"<{D} calls> begins a block",
        f"<{D} calls>\n\n",
        f'<{D} invoke name="get_weather">\n</{D} invoke>',
        f"<{D} calls>\n" + invoke("rm"),
        f"<{D} toolcalls>\n" + PARIS,
        f"</{D} calls>",
        f"<{D} calls></{D} calls>",
    ],
)
def test_35_a_thought_about_markup_is_not_the_end_of_it(mention: str) -> None:
    answer = parse(f"about {mention}." + E + "answer" + block(PARIS) + END)
    assert answer.reasoning == f"about {spelled(mention)}." and answer.content == "answer"
    assert answer.calls == [PARIS_CALL]


# -- what the package of the vendor does not do (spec/codec.md 5, numbers 11 to 14) -----------------------------------


def test_a_bare_token_does_not_swallow_the_answer() -> None:
    for mention in (f"the {D} token", f"<{D}", f"<{D} is", f"<{D} calls> is", f"<{D} parameter x"):
        assert parse(f"a{mention} b" + END, starts="content").content == f"a{spelled(mention)} b"


def test_a_second_begin_of_thinking_is_absorbed() -> None:
    answer = parse(T + "a" + T + "b" + E + "c" + T + "d" + E + "e" + END)
    assert (answer.reasoning, answer.content) == ("ab", "cde")


def test_a_model_that_thinks_though_it_was_not_asked_to_is_not_believed_to_answer() -> None:
    answer = parse(T + "a" + E + "b" + END, starts="content")
    assert (answer.reasoning, answer.content) == ("a", "b")
    assert parse(E + "b" + END, starts="content").content == "b"


def test_text_behind_a_block_and_a_second_block_are_dropped() -> None:
    answer = parse("a" + E + block(PARIS) + "\n\nThat was it." + block(PARIS) + END)
    assert answer.calls == [PARIS_CALL] and answer.content == "" and answer.done


def test_a_parameter_without_its_string_attribute_is_read_by_the_schema() -> None:
    def bare(key: str, value: str) -> str:
        return f'<{D} parameter name="{key}">{value}</{D} parameter>\n'

    answer = parse(block(invoke("get_weather", bare("city", "12"), bare("days", "12"), bare("x", "a b"))) + END)
    assert answer.calls[0].value == {"city": "12", "days": 12, "x": "a b"}


@pytest.mark.parametrize(
    "value", ["", "Paris", "NaN", "01", "{", '"\\ud800"', "1e999", "9" * 5000, "[" * 3000 + "]" * 3000]
)
def test_a_value_that_should_be_json_and_is_not_is_a_string(value: str) -> None:
    ids = nano_ids(block(invoke("get_weather", parameter("days", value, False))))
    (call,) = run(ids, starts="content").calls
    assert call.value == {"days": value}


def test_a_key_that_comes_twice_has_its_first_value() -> None:
    answer = parse(block(invoke("get_weather", parameter("city", "a"), parameter("city", "b"))), starts="content")
    assert answer.calls == [Call("get_weather", '{"city": "a"}')]


def test_an_empty_name_or_an_undeclared_one_is_no_call() -> None:
    for name in ("", "get_weathe", "get_weather2", "Get_weather"):
        source = "hi" + block(invoke(name, parameter("city", "x")))
        answer = parse(source + END, starts="content")
        assert answer.content == spelled(source) and not answer.calls and answer.finish == STOPPED


def test_an_undeclared_call_among_others_is_shown_as_text() -> None:
    bad = invoke("rm", parameter("path", "/")).strip()
    answer = parse("hi" + block(PARIS, bad, PARIS) + END, starts="content")
    assert answer.calls == [PARIS_CALL, PARIS_CALL] and answer.content == "hi" + spelled(bad)
    kinds = [type(event) for event in answer.events]
    assert kinds == [Content, *[ToolStart, ToolArguments, ToolEnd], Content, *[ToolStart, ToolArguments, ToolEnd]]


def test_a_call_that_is_cut_off_is_not_one_that_can_be_made() -> None:
    whole = block(PARIS, invoke("get_weather", parameter("city", "Rome")))
    ids = nano_ids("a" + E + whole)
    first = len(nano_ids("a" + E + block(PARIS).removesuffix(f"</{D} calls>")))
    for reason in ("stop", "length"):
        for end in range(2, len(ids)):
            answer = run(ids[:end], reason=reason)
            complete = sum(call.complete for call in answer.calls)
            assert complete == (end >= first - 1) + (end >= len(ids) - len(nano_ids(f"\n</{D} calls>")))
            if reason == "stop":
                assert answer.finish.reason == ("tool_calls" if complete else "stop")
            else:
                assert answer.finish.reason == "length"
            assert D not in answer.content and Reasoning("a", (0,)) == answer.events[0]
    assert run(ids, reason="length").finish == CALLED  # the block is whole: nothing is missing


def test_markup_of_a_block_that_was_cut_at_its_head_is_not_shown() -> None:
    """A required call and a small max_tokens: the content would end in half of an opener."""
    ids = nano_ids("hi" + block(PARIS))
    head = len(nano_ids("hi\n\n<")) + 1  # with the control id
    for end in range(head, len(ids)):
        answer = run(ids[:end], reason="length", starts="content")
        assert answer.content == "hi" and answer.finish == Finish("length")
