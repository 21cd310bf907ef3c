"""The seam between drafts and grammar: wherever a step cuts, the answer is the one without drafts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from plans import Chunk, alone
from scripted import EOS, VOCAB, ScriptedModel
from test_structured_engine import gated_row
from test_verify_steps import drafting
from toy_grammar import Pairs, is_sentence

from deepinfer.engine.sampling_params import SamplingParams


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(0, 6),
    thinking=st.booleans(),
    right=st.sampled_from([0.0, 0.6, 1.0]),
    seed=st.integers(0, 999),
    greedy=st.booleans(),
    reproducible=st.booleans(),
    caps=st.lists(st.integers(0, 5), min_size=30, max_size=30),
)
def test_the_end_of_thinking_and_of_the_answer_may_lie_anywhere_among_the_drafts(
    count: int, thinking: bool, right: float, seed: int, greedy: bool, reproducible: bool, caps: list[int]
) -> None:
    params = SamplingParams(temperature=0.0 if greedy else 1.0)
    state = None if thinking else 0
    host = drafting(right, model=ScriptedModel(gated_row))
    slot = host.admit([5, 6], params, seed, reproducible=reproducible, constraint=Pairs(count, state, VOCAB))
    said = host.speculate(Chunk(slot, 0, 2))[0]
    for cap in caps:
        if EOS in said:
            break
        result = host.runner.run(host.plan(Chunk(slot, 0), caps=[cap], propose=True))
        said += result.token_ids.tolist()
        assert EOS in said or result.valid.all()  # behind the end this grammar lets nothing follow, and that is fine
    answer = said[: said.index(EOS) + 1] if EOS in said else said
    assert EOS not in said or is_sentence(answer, count, thinking)
    if reproducible or greedy:
        constraint = Pairs(count, state, VOCAB)
        assert answer == alone([5, 6], params, seed, len(answer), ScriptedModel(gated_row), constraint=constraint)
