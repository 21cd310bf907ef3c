"""One round: which drafts are kept, what follows them, and that coupled drafts never change a token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy import GreedyTarget, RowTarget, Toy, plain_decode, random_key, random_language, table

from deepinfer.kernels.random_streams import Stream, accept_uniforms, gumbel
from deepinfer.speculation.propose import DraftLaw, Rule, draft_logprobs, draw_drafts
from deepinfer.speculation.selection import select_lengths
from deepinfer.speculation.verify import residual_logprobs, verify

V = 6


def greedy_target(best: list[int]) -> GreedyTarget:
    """Row r likes token best[r]; -1 makes it a row of NaN, -2 one where everything is forbidden."""
    logits = torch.zeros(len(best), V)
    for row, token in enumerate(best):
        logits[row, abs(token)] = {-1: math.nan}.get(token, 1.0)
        if token == -2:
            logits[row] = -math.inf
    return GreedyTarget(logits, random_key(len(best), 0), torch.arange(len(best)))


def test_a_round_keeps_the_drafts_that_the_target_agrees_with_and_adds_one_token() -> None:
    # Four requests of 3, 2, 0 and 3 drafts, whose rows lie behind one another.
    target = greedy_target([1, 2, 3, 4, 1, 2, 3, 5, 0, 0, 0, 0])
    drafts = torch.tensor([[1, 2, 3], [1, 4, 0], [3, 3, 3], [1, 0, 0]])
    verdict = verify(target, torch.tensor([0, 4, 7, 8]), torch.tensor([3, 2, 0, 3]), drafts)
    assert verdict.accepted.tolist() == [3, 1, 0, 0]
    assert verdict.token_ids.tolist() == [[1, 2, 3, 4], [1, 2, 0, 0], [5, 0, 0, 0], [0, 0, 0, 0]]
    assert verdict.valid.all()


def test_what_stands_behind_the_verified_drafts_is_not_read() -> None:
    target = greedy_target([1, 2, 3, 4])
    for beyond in (-1, 2, 10**9):
        verdict = verify(target, torch.tensor([0]), torch.tensor([1]), torch.tensor([[1, beyond, beyond]]))
        assert verdict.token_ids.tolist() == [[1, 2, 0, 0]]


def test_a_placeholder_is_never_accepted() -> None:
    verdict = verify(greedy_target([0, 0]), torch.tensor([0]), torch.tensor([1]), torch.tensor([[-1]]))
    assert verdict.accepted.tolist() == [0]


@pytest.mark.parametrize("broken", [-1, -2])
@pytest.mark.parametrize("judged_by_chance", [False, True])
def test_a_row_that_is_not_finite_accepts_nothing_and_says_so(broken: int, judged_by_chance: bool) -> None:
    target = greedy_target([1, broken, 3, 1, 1, 1])
    drafts = torch.tensor([[1, 2], [1, 1]])
    log_q = torch.full((2, 2, V), -math.inf).scatter_(2, drafts[:, :, None], 0.0)
    verdict = verify(
        target,
        torch.tensor([0, 3]),
        torch.tensor([2, 2]),
        drafts,
        residual=torch.tensor([judged_by_chance, False]),
        draft_logprobs=log_q,
        uniforms=torch.full((2, 2), 1e-9, dtype=torch.float64),
    )
    assert verdict.accepted.tolist() == [1, 2]
    assert verdict.valid.tolist() == [False, True]
    assert int(verdict.token_ids[0, 1]) in range(V)


def test_without_drafts_a_round_is_plain_decoding() -> None:
    target = greedy_target([4, 2])
    for residual in (None, torch.tensor([True, False])):
        verdict = verify(target, torch.arange(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 0).long(),
                         residual=residual)  # fmt: skip
        assert verdict.token_ids.tolist() == [[4], [2]]
    none = torch.zeros(0, dtype=torch.int64)
    assert verify(target, none, none, torch.zeros(0, 3).long()).token_ids.shape == (0, 4)


def test_requests_of_both_rules_share_a_batch_and_do_not_notice() -> None:
    rows, k = 60, 3
    target_law, draft_law = table(random_language(V, 1)), table(random_language(V, 2))
    key = random_key(rows, 3)
    at, anchors = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    mixed = Toy(target_law, draft_law, key, k, Rule.RESIDUAL)
    drafts, logits = mixed.draft_block(key, at, anchors)
    lengths = torch.arange(rows) % (k + 1)
    by_rule = {}
    for rule in (Rule.COUPLED, Rule.RESIDUAL):
        by_rule[rule] = Toy(target_law, draft_law, key, k, rule).round(key, at, anchors, drafts, logits, lengths)
    places = at[:, None] + torch.arange(k + 1)
    path = torch.cat((anchors[:, None], drafts), 1)
    z = target_law(places.flatten(), path.flatten())
    wide = (key[0].repeat_interleave(k + 1), key[1].repeat_interleave(k + 1))
    chance = torch.arange(rows) % 3 == 0
    own = (key[0].repeat_interleave(k), key[1].repeat_interleave(k))
    verdict = verify(
        RowTarget(z, wide, places.flatten()),
        torch.arange(rows) * (k + 1),
        lengths,
        drafts,
        residual=chance,
        draft_logprobs=draft_logprobs(logits, torch.ones(rows)),
        uniforms=accept_uniforms(own, places[:, :-1].flatten()).view(rows, k),
    )
    for got, coupled, residual in zip(verdict, by_rule[Rule.COUPLED], by_rule[Rule.RESIDUAL], strict=True):
        wanted = torch.where(chance.view(-1, *[1] * (got.dim() - 1)), residual, coupled)
        assert torch.equal(got, wanted)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.integers(1, 5), st.data())
def test_coupled_drafts_never_change_a_token(seed: int, greedy: bool, k: int, data: st.DataObject) -> None:
    rows, tokens = 24, 12
    make_target = GreedyTarget if greedy else RowTarget
    language = table(random_language(V, seed))
    key = random_key(rows, seed)
    key[0][::3], key[1][::3] = 5, 7  # some share their seed
    expected = plain_decode(language, key, tokens, make_target)
    kind = data.draw(st.sampled_from(["anything", "placeholders", "the target's own", "a draft model's"]))
    generator = torch.Generator().manual_seed(seed)
    rule = Rule.GREEDY if greedy else Rule.COUPLED
    case = Toy(language, language if "own" in kind else table(random_language(V, seed + 1)), key, k, rule,
               make_target=make_target)  # fmt: skip
    if kind in ("anything", "placeholders"):
        low = 0 if kind == "anything" else -1
        block = case.draft_block

        def arbitrary(*anchored: Tensor) -> tuple[Tensor, Tensor]:
            drafts, logits = block(*anchored)  # type: ignore[arg-type]
            return torch.randint(low, V, drafts.shape, generator=generator), logits

        case.draft_block = arbitrary  # type: ignore[method-assign, assignment]
    how = data.draw(st.sampled_from(["random", "all", "by confidence"]))

    def lengths(which: Tensor, anchors: Tensor, drafts: Tensor) -> Tensor:
        caps = torch.randint(k + 1, which.shape, generator=generator)
        if how == "random":
            return caps
        if how == "all":
            return torch.full_like(which, k)
        # The worst of rules, made of the very drafts that it judges: coupled tokens do not care.
        survivals = torch.rand(V, generator=generator)[drafts.clamp(min=0)].cumprod(1)
        return select_lengths(survivals, caps, len(which))

    got, accepted = case.run(tokens, lengths)
    assert torch.equal(got, expected)
    if kind == "the target's own" and how == "all":
        assert (accepted == k).all()


def test_coupled_drafts_agree_more_often_than_independent_ones() -> None:
    rows = 20_000
    target_law, draft_law = table(random_language(V, 1, 1.0)), table(random_language(V, 4, 1.0))
    key = random_key(rows, 0)
    rates = {}
    for rule in (Rule.COUPLED, Rule.RESIDUAL):
        law = DraftLaw(np.full(rows, rule, np.uint8), torch.ones(rows), key)
        at, anchors = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        drafts = draw_drafts(draft_law(at, anchors), law, at, 1)
        own = RowTarget(target_law(at, anchors), key, at).draw(torch.arange(rows))
        rates[rule] = float((drafts == own).double().mean())
    p, q = (torch.softmax(language(at[:1], at[:1])[0], -1) for language in (target_law, draft_law))
    apart = float((p - q).abs().sum() / 2)
    assert rates[Rule.COUPLED] >= (1 - apart) / (1 + apart) - 0.02  # the bound of Gumbel coupling
    assert rates[Rule.COUPLED] > rates[Rule.RESIDUAL] + 0.1


def test_the_residual_is_what_the_draft_left_over() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2, 0.0]]), torch.tensor([[0.2, 0.5, 0.1, 0.2]])
    left = residual_logprobs(p.log(), q.log())
    assert torch.allclose(left.exp(), torch.tensor([[0.3, 0.0, 0.1, 0.0]]), atol=1e-6)
    # Nobody drafted: all of p. The same law, up to rounding, or one that is no law: p as well.
    for other in (torch.zeros_like(p), p, p * (1 + 1e-7), torch.full_like(p, math.nan)):
        assert torch.allclose(residual_logprobs(p.log(), other.log()).exp(), p, atol=1e-6)


def test_streams_of_one_seed_share_no_noise() -> None:
    key, at = random_key(4, 1), torch.arange(4)
    draws = [gumbel(key, at, None, 8, stream=Stream.TARGET)]
    draws += [gumbel(key, at, None, 8, stream=Stream.DRAFT, slot=slot) for slot in range(1, 6)]
    draws += [gumbel(key, at, None, 8, stream=Stream.ACCEPT)]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert not (one == other).any()
    u = accept_uniforms(key, at)
    assert u.dtype == torch.float64 and ((u > 0) & (u < 1)).all() and len(set(u.tolist())) == 4
    for row in range(4):  # of its own seed and position alone
        own = accept_uniforms((key[0][row : row + 1], key[1][row : row + 1]), at[row : row + 1])
        assert torch.equal(own, u[row : row + 1])
