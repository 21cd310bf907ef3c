"""Steps with drafts, driven by plans written by hand: what comes out is what decoding without drafts gives, whatever
the drafts, their number, and how they are chosen."""

from __future__ import annotations

from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from drafters import RowDrafter
from plans import GREEDY, MAX_LEN, Automaton, Chunk, Host, alone
from scripted import EOS, ScriptedModel, make_engine, noise_row, run
from torch import Tensor

from deepinfer.engine.plan import Fork, PromptScore
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sampling_state import RESIDUAL

PARAMS = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(top_p=0.9, top_k=20, min_tokens=9, presence_penalty=0.4),
    SamplingParams(temperature=0, frequency_penalty=1.5, logit_bias={5: 2.0, 9: -4.0}),
    SamplingParams(min_p=0.05, logprobs=2, logit_bias={7: 1.0}),
]
PROMPTS = [[5, 6], [9], [11, 12, 13], [30, 31, 32, 33], [8, 8, 8], [40]]


def drafting(right: float = 1.0, drafts: int = 5, model: ScriptedModel | None = None, slots: int = 6) -> Host:
    model = model or ScriptedModel()
    return Host(model, drafts=drafts, drafter=partial(RowDrafter, row=model.row, right=right), slots=slots)


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0], ids=["always wrong", "often right", "always right"])
@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
def test_tokens_are_those_without_drafts(right: float, constrained: bool) -> None:
    """Any number of drafts, any budget, steps that draft nothing: greedy and seeded, with everything that changes
    logits."""
    host, draw = drafting(right), Random(3)
    slots = [
        host.admit(prompt, own, 20 + i, constraint=Automaton() if constrained else None)
        for i, (prompt, own) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    said = host.speculate(*(Chunk(slot, 0, len(prompt)) for slot, prompt in zip(slots, PROMPTS, strict=True)))
    for _ in range(30):
        order = draw.sample(range(6), 6)
        caps, budget = [draw.randint(0, 5) for _ in order], draw.choice([None, None, 0, 4, 11])
        chunks = [Chunk(slots[i], 0) for i in order]
        parts = host.speculate(*chunks, caps=caps, budget=budget, propose=draw.random() < 0.8)
        for i, part in zip(order, parts, strict=True):
            said[i] += part
    for i, (prompt, params, tokens) in enumerate(zip(PROMPTS, PARAMS, said, strict=True)):
        constraint = Automaton() if constrained else None
        assert tokens == alone(prompt, params, 20 + i, len(tokens), constraint=constraint)
        if constrained:
            kept = host.runner.sampling.constraints.of(slots[i])
            assert isinstance(kept, Automaton) and kept.accepted == tokens


@pytest.mark.parametrize("drafts", [1, 3, 5])
@pytest.mark.parametrize("reproducible", [True, False], ids=["coupled", "residual"])
def test_a_draft_like_the_target_is_accepted_everywhere(drafts: int, reproducible: bool) -> None:
    plain = [GREEDY, SamplingParams(), SamplingParams(temperature=0.3), SamplingParams(temperature=1.7), GREEDY, GREEDY]
    host = drafting(1.0, drafts)
    slots = [
        host.admit(prompt, own, 20 + i, reproducible=reproducible)
        for i, (prompt, own) in enumerate(zip(PROMPTS, plain, strict=True))
    ]
    host.speculate(*(Chunk(slot, 0, len(prompt)) for slot, prompt in zip(slots, PROMPTS, strict=True)))
    for _ in range(40):
        parts = host.speculate(*(Chunk(slot, 0) for slot in slots), caps=[5] * 6)
        assert [len(part) for part in parts] == [drafts + 1] * 6


def test_one_that_is_never_right_gives_one_token_a_step() -> None:
    host = drafting(0.0)
    slot = host.admit([5, 6], SamplingParams())
    host.speculate(Chunk(slot, 0, 2))
    for _ in range(20):
        assert len(host.speculate(Chunk(slot, 0), caps=[5])[0]) == 1


def test_what_a_step_reports_is_per_token_and_of_the_row_that_gave_it() -> None:
    host = drafting(1.0)
    curious, plain = host.admit([5, 6], SamplingParams(temperature=0, logprobs=3)), host.admit([9])
    said = host.speculate(Chunk(curious, 0, 2), Chunk(plain, 0))
    result = host.runner.run(host.plan(Chunk(curious, 0), Chunk(plain, 0), caps=[3, 1], propose=True))
    assert result.counts is not None and result.counts.tolist() == [4, 2]
    assert result.num_verified is not None and result.num_verified.tolist() == [3, 1]
    assert result.survivals is not None and result.survivals.shape == (2, 5)
    assert (np.diff(result.survivals) < 0).all() and (result.survivals > 0.8).all()
    known = [*said[0], *result.token_ids[:4].tolist()]
    rows = [noise_row(token, 2 + i) for i, token in enumerate(known[:4])] + [
        noise_row(said[1][0], 1),
        noise_row(int(result.token_ids[4]), 2),
    ]
    truth = torch.log_softmax(torch.stack(rows), -1)
    assert result.logprobs == pytest.approx(truth.max(-1).values.numpy(), abs=1e-5)
    assert result.top is not None and result.top[4:] == [None, None]
    for entry, row in zip(result.top[:4], truth, strict=False):
        assert list(entry or {}) == row.topk(3).indices.tolist()


def test_a_step_with_decodes_prompts_forks_and_scores_keeps_them_apart() -> None:
    host = drafting(0.7)
    a = host.admit([5, 6], SamplingParams(), 20)
    said = host.speculate(Chunk(a, 0, 2))[0]
    prompt = list(range(10, 30))
    b = host.admit(prompt, SamplingParams(), 30)
    score = PromptScore(None, 0, np.array(prompt[11:16], np.int64), 1)  # type: ignore[arg-type]  # whose: host only
    plan = host.plan(Chunk(a, 0), Chunk(b, 0, 16, 6), caps=[5], scores=[score], propose=True)
    plan.draw_slots, plan.draw_rows = plan.draw_slots[:1], plan.draw_rows[:1]  # the prompt goes on
    result = host.runner.run(plan)
    said += result.token_ids.tolist()
    for i, entry in enumerate(result.scores[0]):
        truth = torch.log_softmax(noise_row(prompt[10 + i], 10 + i), -1)
        assert entry[prompt[11 + i]] == pytest.approx(truth[prompt[11 + i]].item(), abs=1e-5)
    child, edits = host.manager.fork(b, 20)
    first, *family = host.speculate(Chunk(a, 0), Chunk(b, 16, 4), caps=[2], forks=[Fork(b, child, 31, edits)])
    said += first
    host.manager.reserve(child, 400)
    for _ in range(8):
        parts = host.speculate(Chunk(child, 0), Chunk(a, 0), Chunk(b, 0), caps=[5, 4, 3])
        for tokens, part in zip((family[1], said, family[0]), parts, strict=True):
            tokens += part
    assert said == alone([5, 6], SamplingParams(), 20, len(said))
    for tokens, seed in zip(family, (30, 31), strict=True):
        assert tokens == alone(prompt, SamplingParams(), seed, len(tokens))


def test_completions_of_a_constrained_prompt_go_their_own_ways() -> None:
    host, prompt = drafting(0.8), [5, 9, 30]
    parent = host.admit(prompt, SamplingParams(), 30, constraint=Automaton())
    host.run(Chunk(parent, 0, 1, 0))
    child, edits = host.manager.fork(parent, 3)
    said = host.speculate(Chunk(parent, 1, 2), forks=[Fork(parent, child, 31, edits)])
    host.manager.reserve(child, 400)
    for _ in range(8):
        parts = host.speculate(Chunk(child, 0), Chunk(parent, 0), caps=[5, 4])
        said[1] += parts[0]
        said[0] += parts[1]
    for tokens, seed in zip(said, (30, 31), strict=True):
        assert tokens == alone(prompt, SamplingParams(), seed, len(tokens), constraint=Automaton())


def test_drafts_end_where_the_sequence_does_and_a_stale_step_beyond_harms_nobody() -> None:
    """Its limit is the table's end. The step after it was planned before anybody knew, and writes behind it."""
    host = drafting(1.0)
    neighbour = host.admit([9], seed=3)
    slot = host.admit(list(range(2, 50)) * 12, limit=MAX_LEN)
    host.manager.reserve(slot, MAX_LEN)
    known = 48 * 12
    host.speculate(Chunk(neighbour, 0), Chunk(slot, 0, 500, 0))
    said = host.speculate(Chunk(slot, 500, known - 500))[0]
    while known + len(said) < MAX_LEN:
        said += host.speculate(Chunk(slot, 0), caps=[5])[0]
    assert known + len(said) == MAX_LEN
    before = host.runner.tokens[neighbour].clone()
    host.runner.run(host.plan(Chunk(slot, 0), caps=[5], propose=True))
    assert torch.equal(host.runner.tokens[neighbour], before)
    host.manager.close(slot)
    again = host.admit([11, 12], seed=4)
    other = host.speculate(Chunk(neighbour, 0), Chunk(again, 0, 2), caps=[5])
    assert other[1] == alone([11, 12], GREEDY, 4, 1)


def test_a_slot_that_comes_back_has_no_drafts_of_its_last_owner() -> None:
    host = drafting(1.0)
    slot = host.admit([5, 6])
    said = host.speculate(Chunk(slot, 0, 2))[0]
    host.manager.close(slot)
    again = host.admit([5, 6], output=said)
    assert again == slot
    host.run(Chunk(again, 0, 2, 0))
    assert host.speculate(Chunk(again, 0), caps=[5]) == [alone([5, 6], GREEDY, 1, 2)[1:]]
    assert len(host.speculate(Chunk(again, 0), caps=[5])[0]) == 6


@pytest.mark.parametrize(
    ("options", "seq_seed", "residual"),
    [
        ({"seed": None}, None, True),
        ({"seed": None}, 7, False),
        ({"seed": 0}, None, False),
        ({"seed": None, "batch_invariant": True}, None, False),
    ],
)
def test_who_asked_for_no_seed_has_drafts_accepted_by_chance(
    options: dict, seq_seed: int | None, residual: bool
) -> None:
    engine = make_engine(drafts=4, overlap=True, right=1.0, **options)
    params = [SamplingParams(max_tokens=40, seq_seed=seq_seed), SamplingParams(max_tokens=40, temperature=0)]
    outputs = [output.outputs[0] for output in run(engine, [[5, 6], [9]], params)]
    flags = engine.core.loop._device._worker._runner.sampling.flags
    assert sorted((flags & RESIDUAL != 0).tolist()) == [False, False, False, residual]
    for output in outputs:
        assert len(output.token_id) == 40 and sum(output.accept_tok) == sum(output.draft_tok) == 31
    engine.core.shutdown()


class Damaged(ScriptedModel):
    """NaN behind one token id."""

    def forward(self, batch, storage) -> Tensor:
        logits = super().forward(batch, storage)
        logits[batch.token_ids[batch.logit_rows] == 62, 5] = torch.nan
        return logits


@pytest.mark.parametrize("reproducible", [True, False], ids=["coupled", "residual"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=9, frequency_penalty=0.3)])
def test_a_row_of_nan_ends_its_draw_and_touches_no_other(params: SamplingParams, reproducible: bool) -> None:
    def row(token: int, position: int) -> Tensor:
        out = noise_row(token, position)
        if position == 2:
            out[62] = 60  # the first draft
        return out

    model = Damaged(row)
    host = drafting(1.0, model=model)
    slots = [host.admit([first, 3], params, 9, reproducible=reproducible) for first in (10, 11)]
    host.speculate(Chunk(slots[0], 0, 2), Chunk(slots[1], 0, 1, 0))
    result = host.runner.run(host.plan(Chunk(slots[0], 0), Chunk(slots[1], 1), caps=[5], propose=True))
    assert result.valid.tolist() == [False, True]
    assert result.counts is not None and result.num_verified is not None and result.num_verified.tolist() == [5, 0]
    assert result.token_ids[result.counts[0] - 2] == 62
    assert EOS not in result.token_ids.tolist()
    host.runner.run(host.plan(Chunk(slots[0], 0), Chunk(slots[1], 0), caps=[5, 5], propose=True))  # stale
