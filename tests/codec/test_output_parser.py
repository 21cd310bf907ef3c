"""Thinking and content: what goes where, which tokens it came from, where it stops."""

from __future__ import annotations

import pytest
from outputs import END, NANO, PARIS, PARIS_CALL, WEATHER, D, E, Pieces, T, block, nano_ids, parse, run, spelled

from deepinfer.codec.conversation import Tool
from deepinfer.codec.events import Content, Event, Reasoning, ToolEnd, merged
from deepinfer.codec.generation import Finish
from deepinfer.codec.parsing import OutputParser, PlainParser
from deepinfer.engine.stop import OutputText

STOPPED = Finish("stop")


def parser(tokenizer: object = NANO, **options: object) -> OutputParser:
    options = {"starts": "content", "tools": None, "make_id": lambda: "id", **options}
    return OutputParser(tokenizer, **options)  # type: ignore[arg-type]


# -- thinking and content ---------------------------------------------------------------------------------------------


def test_thinking_ends_at_its_end_and_nothing_is_stripped() -> None:
    answer = parse(" a\n\n" + E + "\n\n b \n" + END)
    assert (answer.reasoning, answer.content, answer.finish) == (" a\n\n", "\n\n b \n", STOPPED)


def test_an_output_that_starts_as_content_is_content() -> None:
    assert parse("a" + END, starts="content").content == "a"


def test_thinking_that_begins_again_before_any_content_is_thinking() -> None:
    answer = parse("a" + E + T + "b" + E + "c" + END)
    assert (answer.reasoning, answer.content) == ("ab", "c")


def test_ends_and_roles_leave_no_text_wherever_they_come() -> None:
    spellings = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>")
    silent = [NANO.control_ids[name] for name in (*spellings, "<｜System｜>", "<｜deepseek_image｜>")]
    ids = [*nano_ids("ab"), *silent, *nano_ids("cd" + block(PARIS)), *silent]
    for cut in range(len(ids)):
        answer = run(ids, [cut], starts="content")
        assert answer.content == "abcd" and answer.calls == [PARIS_CALL]


def test_control_tokens_that_are_part_of_an_answer_are_spelled() -> None:
    ids = [NANO.control_id("<｜ref｜>"), *nano_ids("cat"), NANO.control_id("<｜/ref｜>")]
    assert run(ids, starts="content").content == "<｜ref｜>cat<｜/ref｜>"


def test_ids_that_no_token_has_leave_no_text() -> None:
    ids = [*nano_ids("a"), 10**6, NANO.vocab_size, *nano_ids("b")]
    assert run(ids, range(len(ids)), starts="content").events == [Content("ab", (0, 3))]


def test_without_tools_a_call_is_text() -> None:
    answer = parse("a" + E + "hi" + block(PARIS) + END, tools=None)
    assert answer.content == "hi" + spelled(block(PARIS)) and answer.finish == STOPPED and not answer.calls


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        "日本語 und 🦊🦊".encode(),
        b"\xff\xfe\xf0\x9f",
        b"a\xe6\x97",
        b"\xe6\x97a\xa5",
        b"\xf0\x9f\xa6",
        "���".encode(),
        b"\xed\xa0\x80",
        b"\xc3",
        b"\xc3\xc3\xc3\x28",
    ],
)
def test_bytes_that_are_no_text_become_replacement_characters_as_in_the_detokenizer(raw: bytes) -> None:
    pieces = Pieces()
    for size in (1, 2, 3, 5, 100):
        ids = [pieces.token(raw[at : at + size]) for at in range(0, len(raw), size)]
        for tools in (None, ()):
            for parsed in (parser(pieces, tools=tools, drop_calls=tools is not None), PlainParser(pieces)):
                events = [event for i in ids for event in parsed.push([i])] + parsed.finish("length")
                assert merged(events) == [Content(raw.decode("utf-8", "replace"), tuple(range(len(ids))))]


def test_half_a_character_does_not_run_into_what_a_control_token_begins() -> None:
    source = "a\udce6\udc97" + E + "\udca5b\udcf0" + block(PARIS) + END
    pieces = Pieces()
    answer = run(pieces.ids(source, range(999)), tokenizer=pieces)
    assert (answer.reasoning, answer.content, answer.calls) == ("a�", "�b�", [PARIS_CALL])


# -- which tokens -----------------------------------------------------------------------------------------------------


def test_every_token_of_the_text_is_listed_with_the_last_of_it() -> None:
    pieces = Pieces()
    ids = [pieces.token(piece) for piece in (b"a", b"b\xe6", b"\x97", b"\xa5c", b"\n", b"\n", b"<", b"d")]
    parsed = parser(pieces, drop_calls=True)
    events = [parsed.push([i]) for i in ids]
    assert events == [
        [Content("a", (0,))],
        [Content("b", ())],  # its token has the first byte of the next character, too
        [],
        [Content("日c", (1, 2, 3))],
        [],  # it may be the separator
        [],
        [],
        [Content("\n\n<d", (4, 5, 6, 7))],
    ]


def test_tokens_of_markup_are_in_no_event() -> None:
    pieces = Pieces()
    control = pieces.control_ids
    head = [pieces.token(b"why"), control["</think>"], pieces.token(b"hi.\n\n"), pieces.token(b"so<")]
    answer = run([*head, control["｜DSML｜"], *pieces.ids(f" calls>\n{PARIS}</{D} calls>", [])], tokenizer=pieces)
    texts = [event for event in answer.events if isinstance(event, Reasoning | Content)]
    assert texts == [Reasoning("why", (0,)), Content("hi.\n\nso", (2, 3))] and answer.calls == [PARIS_CALL]

    ids = [*head[:3], pieces.token(b"\n\n<"), control["｜DSML｜"], *pieces.ids(f" calls>\n{PARIS}</{D} calls>", [])]
    answer = run(ids, range(len(ids)), tokenizer=pieces)
    assert [event for event in answer.events if isinstance(event, Content)] == [Content("hi.\n\n", (2,))]


def test_a_token_that_ends_with_the_separator_is_listed_with_its_text() -> None:
    pieces = Pieces()
    ids = [pieces.token(b"Well"), pieces.token(b".\n\n"), *pieces.ids(block(PARIS).lstrip(), [])]
    assert run(ids, starts="content", tokenizer=pieces).events[0] == Content("Well.", (0, 1))


def test_reasoning_tokens_are_those_of_the_thought() -> None:
    ids = nano_ids("a b c" + E + "d e f")
    answer = run(ids)
    assert answer.reasoning_tokens == len(nano_ids("a b c")) < len(ids)
    called = nano_ids("need it" + block(PARIS))
    assert run(called).reasoning_tokens == len(nano_ids("need it")) and run(called).calls


# -- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_content_ends_at_the_first_stop_string(include: bool, tools: list[Tool] | None) -> None:
    answer = parse(
        "x STOP y" + E + "one two\n\nUser: STOP, three STOP" + END,
        stop=("STOP", "\n\nUser:"),
        include_stop=include,
        tools=tools,
    )
    assert answer.content == ("one two\n\nUser:" if include else "one two")
    assert answer.finish == Finish("stop", "\n\nUser:") and answer.done


def test_the_beginning_of_a_stop_string_at_the_end_is_content() -> None:
    answer = parse("a" + E + "one STO" + END, stop=("STOP",))
    assert answer.content == "one STO" and answer.finish == STOPPED


def test_a_stop_string_that_only_the_end_reveals_is_one() -> None:
    answer = parse("one\n\n" + END, stop=("\n\n",), starts="content")
    assert answer.content == "one" and answer.finish == Finish("stop", "\n\n")


def test_a_separator_is_no_content_and_so_no_stop_string() -> None:
    answer = parse("one" + block(PARIS) + END, stop=("\n\n",), starts="content")
    assert answer.content == "one" and answer.calls == [PARIS_CALL] and answer.finish == Finish("tool_calls")


def test_a_stop_string_in_front_of_a_call_comes_first() -> None:
    answer = parse("one." + block(PARIS) + END, stop=("e.",), starts="content")
    assert answer.content == "on" and not answer.calls and answer.finish == Finish("stop", "e.")


def test_tokens_behind_a_stop_string_are_not_listed() -> None:
    pieces = Pieces()
    ids = [pieces.token(piece) for piece in (b"a", b" b9", b".", b"8 c", b"d")]
    for tools in (None, ()):
        parsed = parser(pieces, stop=OutputText(("9.8",)), tools=tools, drop_calls=tools is not None)
        events = [event for i in ids for event in parsed.push([i])] + parsed.finish("abort")
        assert merged(events) == [Content("a b", (0, 1))]
        assert parsed.result == Finish("stop", "9.8") and parsed.stopped == "9.8" and parsed.done


def test_stop_strings_among_the_first_tokens_do_not_count() -> None:
    pieces = Pieces()
    ids = [pieces.token(piece) for piece in (b"a.", b"b.", b"c.", b"d")]
    for cuts in ([], range(4)):
        answer = run(ids, cuts, tokenizer=pieces, starts="content", stop=(".",), min_tokens=2)
        assert answer.content == "a.b.c" and answer.finish == Finish("stop", ".")


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "deadline", "error"])
def test_the_engines_reason_is_the_reason_unless_the_answer_was_complete(reason: str) -> None:
    assert run(nano_ids("a" + E + "b"), reason=reason).finish == Finish(reason)
    assert run(nano_ids("a" + block(PARIS)), reason=reason).finish == Finish("tool_calls")
    assert run(nano_ids("a" + E + "b."), reason=reason, stop=(".",)).finish == Finish("stop", ".")


def test_one_call_is_enough_where_calls_may_not_be_parallel() -> None:
    ids = nano_ids("a" + block(PARIS, PARIS))
    parsed = parser(starts="thinking", tools=[WEATHER], max_calls=1)
    events: list[Event] = []
    read = 0
    while not parsed.done:
        events += parsed.push([ids[read]])
        read += 1
    assert read < len(ids) - 10 and isinstance(events[-1], ToolEnd) and events[-1].complete
    assert parsed.push(ids[read:]) == [] and parsed.finish("abort") == []
    assert parsed.result == Finish("tool_calls")


def test_the_end_of_a_block_is_the_end_of_the_answer() -> None:
    ids = nano_ids("a" + block(PARIS))
    parsed = parser(starts="thinking", tools=[WEATHER])
    for token in ids:
        assert not parsed.done
        parsed.push([token])
    assert parsed.done


def test_tokens_behind_the_end_of_a_block_are_not_counted_however_they_come() -> None:
    ids = nano_ids(block(PARIS) + END)
    counts = set()
    for cut in range(len(ids) + 1):
        parsed = parser(tools=[WEATHER])
        for piece in (ids[:cut], ids[cut:]):
            parsed.push(piece)
        counts.add(parsed.num_read)
    assert parsed.done and counts == {len(ids) - 1}


# -- /v1/completions --------------------------------------------------------------------------------------------------


def test_a_completion_is_content_whatever_it_looks_like() -> None:
    source = T + "a" + E + "b" + block(PARIS) + "\n" + END
    parsed = PlainParser(NANO)
    events = [event for i in nano_ids(source) for event in parsed.push([i])] + parsed.finish("stop")
    text = "".join(event.text for event in events if isinstance(event, Content))
    assert text == "ab" + block(PARIS).replace(D, "") + "\n" and parsed.result == STOPPED and parsed.stopped is None
    assert parsed.reasoning_tokens == 0


def test_a_completion_ends_at_a_stop_string() -> None:
    ids = nano_ids("one STOP two")
    for cut in range(len(ids)):
        parsed = PlainParser(NANO, stop=OutputText(("STOP",)))
        events = parsed.push(ids[:cut]) + parsed.push(ids[cut:]) + parsed.finish("abort")
        assert "".join(event.text for event in events if isinstance(event, Content)) == "one "
        assert parsed.done and parsed.result == Finish("stop", "STOP")
    late = PlainParser(NANO, stop=OutputText(("STOP",)), min_tokens=len(ids))
    assert late.push(ids) and not late.done
