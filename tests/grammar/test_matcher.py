"""Reasoning, content and calls of one sequence; drafts, copies and restarts; masks of a whole step."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from grammar_cases import SCHEMAS, TOOLS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from walks import EOS, MARK, allows, block, encoded, ids_of, nano, parse_block, prototype, rendered, walk

from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.fill import MaskFiller
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.structure import Grammar, Structure, ToolGrammar

PERSON = Grammar("json_schema", json.dumps(SCHEMAS["person"]))
STRICT = tuple(ToolGrammar(name, json.dumps(schema), True) for name, schema in TOOLS.items())
LOOSE = tuple(ToolGrammar(name) for name in TOOLS)
STRUCTURES = {
    "json": Structure(content=PERSON),
    "json, thinking": Structure(content=PERSON, thinking=True),
    "json, short thinking": Structure(content=PERSON, thinking=True, thinking_budget=7),
    "json behind a prefix": Structure(content=PERSON, prefix='{"name": "A'),
    "regex": Structure(content=Grammar("regex", "[a-c]{2,6}(x|y)+")),
    "choice": Structure(content=Grammar("choice", '["yes", "no"]')),
    "required, thinking": Structure(tools=STRICT, tool_mode="required", thinking=True),
    "required, one call": Structure(tools=LOOSE, tool_mode="required", parallel_calls=False),
    "auto": Structure(tools=STRICT, tool_mode="auto"),
    "auto, thinking": Structure(tools=LOOSE, tool_mode="auto", thinking=True),
    "json or calls, thinking": Structure(content=PERSON, tools=STRICT, tool_mode="auto", thinking=True),
    "budget alone": Structure(thinking=True, thinking_budget=5),
}
PROTOTYPES = {name: prototype(structure) for name, structure in STRUCTURES.items()}
THINK, END_THINK, DSML = nano().think, nano().end_think, nano().dsml
TEXT = nano().tokenize("Let me see. ")


def after(matcher: Matcher, ids: list[int]) -> Matcher:
    matcher = matcher.copy()
    matcher.accept(ids)
    assert matcher.error is None, matcher.error
    return matcher


def row(matcher: Matcher) -> np.ndarray:
    return matcher.masks([])[0]


def accepts(structure: Structure, ids: list[int]) -> bool:
    matcher = prototype(structure).start()
    matcher.accept(ids)
    return matcher.error is None and matcher.ended


# -- reasoning -------------------------------------------------------------------------------------------------------


def test_the_answer_is_constrained_only_behind_the_reasoning() -> None:
    matcher = PROTOTYPES["json, thinking"].start()
    assert all(allows(row(matcher), token) for token in TEXT)
    thought = after(matcher, [*TEXT, END_THINK])
    assert {nano().token_bytes(token)[:1] for token in ids_of(row(thought))} == {b"{"}


def test_an_answer_cannot_end_or_call_or_think_again_inside_its_reasoning() -> None:
    inside = row(after(PROTOTYPES["required, thinking"].start(), TEXT))
    for token in (EOS, THINK, DSML):
        assert not allows(inside, token)
    assert allows(inside, END_THINK)


def test_reasoning_beyond_its_budget_is_closed_and_not_cut_off() -> None:
    matcher = PROTOTYPES["json, short thinking"].start()
    for token in TEXT[:1] * 7:
        assert len(ids_of(row(matcher))) > 1000
        matcher.accept([token])
    assert ids_of(row(matcher)) == [END_THINK]
    matcher.accept([END_THINK])
    assert matcher.error is None
    assert not allows(row(matcher), EOS)


def test_a_budget_of_nothing_closes_the_reasoning_at_once() -> None:
    matcher = prototype(Structure(thinking=True, thinking_budget=0)).start()
    assert ids_of(row(matcher)) == [END_THINK]


def test_content_without_a_grammar_stays_free_but_for_control_tokens() -> None:
    matcher = after(PROTOTYPES["budget alone"].start(), [END_THINK])
    free = row(matcher)
    assert allows(free, EOS) and allows(free, DSML), "calls are nobody's business here"
    for spelling in ("<think>", "</think>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜deepseek_image｜>"):
        assert not allows(free, nano().control_id(spelling))
    matcher.accept([*TEXT, EOS])
    assert matcher.error is None and matcher.ended


# -- calls -----------------------------------------------------------------------------------------------------------

WEATHER_CALL = block(("get_weather", {"city": "Paris <b> </x>", "days": 2, "unit": "celsius"}))


def test_a_call_that_is_wanted_comes_right_behind_the_reasoning() -> None:
    structure = STRUCTURES["required, thinking"]
    assert accepts(structure, [*TEXT, END_THINK, *encoded(WEATHER_CALL), EOS])
    assert not accepts(structure, [*TEXT, END_THINK, *TEXT, *encoded(WEATHER_CALL), EOS])
    assert not accepts(structure, [*TEXT, END_THINK, EOS])


@pytest.mark.parametrize("content", ["", "I will look. ", "a < b"])
def test_with_tools_content_is_free_until_a_block_begins(content: str) -> None:
    structure = STRUCTURES["auto"]
    assert accepts(structure, [*encoded(content), EOS])
    assert accepts(structure, [*encoded(content + WEATHER_CALL), EOS])


@pytest.mark.parametrize(
    "wrong",
    [
        WEATHER_CALL.replace("get_weather", "get_whether"),
        WEATHER_CALL.replace("celsius", "kelvin"),
        WEATHER_CALL.replace(">2<", ">two<"),
        WEATHER_CALL.replace(">2<", ">99<"),
        WEATHER_CALL.replace('name="city"', 'name="town"'),
        WEATHER_CALL.replace("parameter name", "param name"),
        block(("get_weather", {"days": 2})),
        block(("now", {"x": "1"})),
        WEATHER_CALL + "\nThat was it.",
        WEATHER_CALL + WEATHER_CALL,
        WEATHER_CALL.rpartition(f"\n</{MARK}")[0],
        f"\n\n<{MARK} tools>\n",
    ],
)
def test_a_block_that_begins_is_a_call_of_a_declared_tool(wrong: str) -> None:
    for name in ("auto", "required, thinking"):
        before = [END_THINK] if STRUCTURES[name].thinking else []
        assert not accepts(STRUCTURES[name], [*before, *encoded(wrong), EOS])


def test_a_dsml_token_in_the_middle_of_a_word_begins_nothing() -> None:
    matcher = after(PROTOTYPES["auto"].start(), TEXT)
    assert not allows(row(matcher), DSML)
    assert allows(row(after(matcher, nano().tokenize("\n\n<"))), DSML)


def test_one_call_is_one_call_where_parallel_calls_are_off() -> None:
    one, two = block(("now", {})), block(("now", {}), ("now", {}))
    assert accepts(STRUCTURES["required, one call"], [*encoded(one), EOS])
    assert not accepts(STRUCTURES["required, one call"], [*encoded(two), EOS])
    assert accepts(Structure(tools=LOOSE, tool_mode="required"), [*encoded(two), EOS])


def test_tools_without_strict_take_any_arguments() -> None:
    values = {"x": 'text </parameter>\n"quoted"', "n": [1, {"a": None}], "ä ö": True, "o": {"k": "v, : "}}
    text = block(("now", values))
    assert parse_block(text) == [("now", values)]
    assert accepts(Structure(tools=LOOSE, tool_mode="required"), [*encoded(text), EOS])


def test_an_empty_line_stands_for_no_arguments_as_in_the_prompt() -> None:
    assert accepts(Structure(tools=LOOSE, tool_mode="required"), [*encoded(block(("now", {}))), EOS])
    bare = block(("now", {})).replace('name="now">\n\n', 'name="now">\n')
    assert not accepts(Structure(tools=LOOSE, tool_mode="required"), [*encoded(bare), EOS])


def test_where_no_tool_may_be_called_no_block_begins() -> None:
    matcher = after(prototype(Structure(tool_mode="auto")).start(), nano().tokenize("\n\n<"))
    assert not allows(row(matcher), DSML)


# -- positions -------------------------------------------------------------------------------------------------------


def test_an_answer_that_the_prompt_has_begun_goes_on_where_it_stands() -> None:
    matcher = PROTOTYPES["json behind a prefix"].start()
    matcher.accept([*nano().tokenize('nn", "age": 3, "email": null}'), EOS])
    assert matcher.error is None and matcher.ended


def test_a_beginning_that_contradicts_the_grammar_is_refused_before_the_answer() -> None:
    with pytest.raises(GrammarError, match="does not fit"):
        prototype(Structure(content=PERSON, prefix="Sure! {"))


def test_a_token_that_may_not_stand_there_is_an_error_of_this_sequence_alone() -> None:
    start = PROTOTYPES["json"].start()
    lost = start.copy()
    lost.accept(nano().tokenize("nonsense"))
    assert lost.error is not None
    assert ids_of(row(lost)) == [EOS]
    assert start.error is None and not allows(row(start), EOS)


def test_an_end_where_the_answer_may_not_end_is_an_error() -> None:
    matcher = after(PROTOTYPES["json"].start(), nano().tokenize("{"))
    matcher.accept([EOS])
    assert matcher.error is not None and not matcher.ended


# The lexer's state holds every place at which an "a" stood: the tables are full after some hundred tokens.
GREEDY = Structure(content=Grammar("regex", "(?s:.*)a(?s:.{1000})b(?s:.*)"))


def test_an_answer_that_fills_the_matchers_tables_harms_no_other() -> None:
    """Copies of one prototype share the tables of the lexer, which have a limit: a popular structure would be used up
    for everybody, by one client or by time."""
    letters = [nano().tokenize(letter)[0] for letter in "abcdef"]
    shared = prototype(GREEDY)
    neighbour = shared.start()
    neighbour.accept(letters)
    retired = 0
    for seed in range(3):
        matcher, chance = shared.start(), random.Random(seed)
        for _ in range(400):
            matcher.masks([])
            assert matcher.error is None
            matcher.accept([chance.choice(letters)])
        retired = shared.content._source.generation  # type: ignore[union-attr]
    assert retired > 0, "the tables were never full"
    fresh = prototype(GREEDY).start(letters)
    assert np.array_equal(neighbour.masks(letters), fresh.masks(letters))
    neighbour.accept(letters)
    assert neighbour.error is None


def test_an_answer_that_fills_them_again_and_again_is_ended() -> None:
    letters = [nano().tokenize(letter)[0] for letter in "abcdef"]
    explosive = "|".join(
        f"(?s:.*){a}(?s:.{{{n}}}){b}(?s:.*)" for a, b, n in (("a", "b", 50), ("c", "d", 70), ("e", "f", 90))
    )
    matcher, chance = prototype(Structure(content=Grammar("regex", explosive))).start(), random.Random(0)
    for _ in range(600):
        matcher.masks([])
        if matcher.error is not None:
            break
        matcher.accept([chance.choice(letters)])
    assert matcher.error is not None and "too many" in matcher.error
    assert ids_of(row(matcher)) == [EOS]


def sampled(name: str, seed: int, most: int = 120) -> list[int]:
    return walk(PROTOTYPES[name].start(), random.Random(seed), most).ids


@pytest.mark.parametrize("name", STRUCTURES)
def test_masks_of_drafts_are_those_of_one_step_after_another(name: str) -> None:
    walked = walk(PROTOTYPES[name].start(), random.Random(3), 60)
    ids = walked.ids + [EOS] * walked.ended
    for begin in range(0, len(walked.ids), 5):
        matcher = after(PROTOTYPES[name].start(), ids[:begin])
        drafts = ids[begin : begin + 7]
        expected = walked.rows[begin : begin + len(drafts) + 1]
        rows = matcher.masks(drafts)
        assert np.array_equal(rows[: len(expected)], expected)
        assert (rows[len(expected) :] == -1).all()
        assert np.array_equal(matcher.masks(drafts), rows), "asking changes nothing"


@pytest.mark.parametrize("name", STRUCTURES)
def test_rows_behind_a_draft_that_may_not_stand_there_forbid_nothing(name: str) -> None:
    ids = sampled(name, 5)
    chance = random.Random(5)
    for begin in range(0, len(ids), 7):
        matcher = after(PROTOTYPES[name].start(), ids[:begin])
        drafts = ids[begin : begin + 5]
        wrong = chance.randrange(len(drafts))
        here = matcher.masks(drafts)[wrong]
        banned = [token for token in range(8192) if not allows(here, token)]
        if banned:
            rows = matcher.masks([*drafts[:wrong], chance.choice(banned), *drafts[wrong + 1 :]])
            assert np.array_equal(rows[wrong], here)
            assert (rows[wrong + 1 :] == -1).all()


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_sequence_that_was_preempted_goes_on_as_if_nothing_had_been(name: str) -> None:
    ids = sampled(name, 11)
    for kept in range(0, len(ids) + 1, 9):
        again = PROTOTYPES[name].start(ids[:kept])
        assert np.array_equal(
            again.masks(ids[kept : kept + 4]), after(PROTOTYPES[name].start(), ids[:kept]).masks(ids[kept : kept + 4])
        )


@pytest.mark.parametrize("name", STRUCTURES)
def test_copies_go_their_own_ways(name: str) -> None:
    ids, others = sampled(name, 1), sampled(name, 2)
    first = PROTOTYPES[name].start()
    second = first.copy()
    for n in range(max(len(ids), len(others))):
        first.accept(ids[n : n + 1])
        second.accept(others[n : n + 1])
        third = second.copy()
        third.accept(TEXT)
    assert first.error is None and second.error is None
    assert np.array_equal(row(first), row(PROTOTYPES[name].start(ids)))
    assert np.array_equal(row(second), row(PROTOTYPES[name].start(others)))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_step_of_many_sequences_has_the_rows_of_each_alone(data: st.DataObject) -> None:
    filler = MaskFiller(nano(), threads=data.draw(st.sampled_from([1, 2])))
    rows = []
    for _ in range(data.draw(st.integers(0, 6))):
        name = data.draw(st.sampled_from(list(STRUCTURES)))
        ids = sampled(name, data.draw(st.integers(0, 3)), 40)
        kept = data.draw(st.integers(0, len(ids)))
        drafts = ids[kept : kept + data.draw(st.integers(0, 6))]
        if drafts and data.draw(st.booleans()):
            drafts[data.draw(st.integers(0, len(drafts) - 1))] = data.draw(st.integers(0, 8191))
        rows.append((PROTOTYPES[name].start(ids[:kept]), drafts))
    got = filler.begin(rows).result()
    alone = [matcher.masks(drafts) for matcher, drafts in rows]
    assert np.array_equal(got, np.concatenate(alone) if alone else np.empty((0, nano().words), np.int32))
    filler.close()


def test_text_of_a_walk_survives_the_round_trip() -> None:
    """The helper that these tests read blocks with is right about where tokens begin."""
    ids = encoded(WEATHER_CALL)
    assert rendered(ids) == WEATHER_CALL
    assert parse_block(WEATHER_CALL)[0][0] == "get_weather"
