"""Where an output ends, and what a reader may see of it before."""

from __future__ import annotations

from itertools import pairwise

import pytest
import scripted
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import EOS, VOCAB, ScriptedModel, make_engine, run

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.stop import OutputText

PROMPT = [40, 41]


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "overlapped"])
def loop(request, monkeypatch) -> None:
    """Every promise here holds in both loops; the overlapped one computes tokens behind an end that nobody sees."""
    monkeypatch.setitem(scripted.DEFAULTS, "overlap", request.param)


def spelling(text: str):
    """A model that says `text` after a prompt of two tokens, then '~' for ever. Its tokens are characters, 1 = end."""

    def logits(token: int, position: int) -> torch.Tensor:
        at = position + 1 - len(PROMPT)
        row = torch.zeros(VOCAB)
        row[ord(text[at]) if at < len(text) else 0] = 50
        return row

    return ScriptedModel(logits)


def answer(text: str, **params):
    engine = make_engine(spelling(text))
    (output,) = run(engine, [PROMPT], SamplingParams(temperature=0, **params))
    return output.outputs[0]


def test_stop_string_across_tokens_is_cut_out() -> None:
    out = answer("12+-+34", max_tokens=20, stop="-+3")
    assert (out.text, out.finish_reason, out.stop_reason) == ("12+", "stop", "-+3")
    assert len(out.token_id) == 6  # the stop string's tokens count


def test_stop_string_may_stay() -> None:
    assert answer("12+-+34", max_tokens=20, stop="-+3", include_stop_str_in_output=True).text == "12+-+3"


def test_stop_token_and_end_token_stay_in_the_ids_and_leave_no_text() -> None:
    out = answer("123", max_tokens=9, stop_token_ids=[ord("2")])
    assert (out.text, out.token_id, out.finish_reason, out.stop_reason) == ("1", [49, 50], "stop", 50)
    out = answer("12\x013", max_tokens=9)
    assert (out.text, out.token_id, out.finish_reason, out.stop_reason) == ("12", [49, 50, EOS], "stop", None)
    assert answer("123", max_tokens=9, stop_token_ids=[50], include_stop_str_in_output=True).text == "12"


def test_ignore_eos_goes_on() -> None:
    out = answer("1\x0123", max_tokens=4, ignore_eos=True)
    assert (out.token_id, out.finish_reason) == ([49, EOS, 50, 51], "length")


def test_min_tokens_holds_off_every_kind_of_stop() -> None:
    assert answer("1\x0123", max_tokens=4, min_tokens=3).token_id[1] != EOS
    assert answer("+1+2+3", max_tokens=6, min_tokens=3, stop="+").text == "+1+2"
    assert answer("1223", max_tokens=4, min_tokens=2, stop_token_ids=[50]).token_id[:1] == [49]
    assert len(answer("1223", max_tokens=4, min_tokens=2, stop_token_ids=[50]).token_id) >= 2


def test_a_stop_on_the_last_allowed_token_counts_as_stop() -> None:
    assert answer("12", max_tokens=2, stop="2").finish_reason == "stop"
    assert answer("12", max_tokens=2).finish_reason == "length"


def test_held_back_text_comes_out_when_the_length_ends_it() -> None:
    assert answer("12+-", max_tokens=4, stop="+-+").text == "12+-"


def test_no_part_of_a_stop_string_is_ever_shown() -> None:
    engine = make_engine(spelling("1+-2+-+3"))
    engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=20, stop="+-+"))
    shown = ""
    while engine.has_unfinished:
        for delta in engine.step():
            shown += delta.text
            assert "1+-2".startswith(shown)
    assert shown == "1+-2" == engine.pop_output("a").outputs[0].text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab-", max_size=14),
    stops=st.lists(st.text("ab-", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 14)),
    include=st.booleans(),
)
def test_cut_anywhere_the_text_ends_at_the_same_place(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    end, start = min(ends, default=(len(text), len(text)))
    expected = text[:end] if include or not ends else text[:start]
    output, found = OutputText(tuple(stops), include), None
    borders = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    for left, right in pairwise(borders):
        _, found = output.push(text[left:right])
        assert expected.startswith(output.text)
        if found:
            break
    else:
        output.finish()
    assert output.text == expected
    assert (found is not None) == bool(ends)


def test_nan_logits_end_the_sequence_and_nothing_else() -> None:
    def logits(token: int, position: int) -> torch.Tensor:
        row = torch.zeros(VOCAB)
        row[50] = 9
        return row * torch.nan if token == 60 else row

    engine = make_engine(ScriptedModel(logits))
    bad, good = run(engine, [[40, 60], [40, 41]], SamplingParams(temperature=0, max_tokens=3))
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_id) == ("error", [])
    assert (good.outputs[0].finish_reason, good.outputs[0].token_id) == ("length", [50] * 3)


@pytest.mark.parametrize("n", [1, 3])
def test_stop_needs_a_tokenizer(n: int) -> None:
    engine = make_engine(detokenizer=None)
    with pytest.raises(ValueError, match="stop: stop strings need a tokenizer"):
        engine.add_request("a", PROMPT, SamplingParams(stop="x", n=n))
    assert not engine.has_unfinished
