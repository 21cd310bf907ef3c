"""Stochastic verification gives the target's own law, however bad the drafts, whatever decides how many are verified.

Each case draws the first three tokens of 200,000 sequences and compares their joint law with the exact one. The last
tests make the known mistakes and show that the comparison finds them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from toy import LengthRule, RowTarget, Toy, joint_law, p_value, random_key, random_language, table

from deepinfer.kernels.random_streams import Stream, gumbel
from deepinfer.speculation.propose import Rule
from deepinfer.speculation.selection import select_lengths
from deepinfer.speculation.verify import residual_logprobs

DRAWS, VOCAB, TOKENS, K = 200_000, 3, 3, 3
SURE = 1e-3  # below it we call two laws different; all seeds are fixed
TARGET = random_language(VOCAB, 1, spread=0.7)
FORBIDDEN = TARGET.clone()
FORBIDDEN[:, :, 1] = -torch.inf  # p = 0 there
INF = torch.inf

DRAFTS: dict[str, tuple[Tensor, Tensor]] = {  # of each: the target's logits and the draft's
    "unrelated": (TARGET, random_language(VOCAB, 2)),
    "equal to the target": (TARGET, TARGET),
    "nearly always wrong": (TARGET, -8 * TARGET),
    "tied to the token before": (TARGET, 4 * torch.eye(VOCAB).expand(4, VOCAB, VOCAB)),
    "peaked where p is 0": (FORBIDDEN, torch.tensor([0.0, 5.0, 0.0]).expand(4, VOCAB, VOCAB)),
    "always where p is 0": (FORBIDDEN, torch.tensor([-INF, 0.0, -INF]).expand(4, VOCAB, VOCAB)),
    "one-hot": (TARGET, torch.zeros_like(TARGET).masked_fill_(TARGET.amax(-1, keepdim=True) > TARGET, -INF)),
}

QUICK = ("unrelated", "tied to the token before", "peaked where p is 0", "one-hot")
some_drafts = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTS]
)


def toy(name: str, seed: int = 0, **changes: object) -> tuple[Toy, Tensor]:
    target, draft = (table(logits) for logits in DRAFTS[name])
    return Toy(target, draft, random_key(DRAWS, seed), K, **changes), joint_law(target, VOCAB, TOKENS)  # type: ignore[arg-type]


def fixed(length: int) -> LengthRule:
    return lambda rows, anchors, drafts: torch.full_like(rows, length)


def follows_at_length(name: str, length: int) -> bool:
    case, law = toy(name)
    return p_value(case.run(TOKENS, fixed(length))[0], law, VOCAB) > SURE


@pytest.mark.parametrize("length", range(K + 1))
def test_tokens_follow_the_target_at_any_fixed_length(length: int) -> None:
    assert follows_at_length("unrelated", length)


@pytest.mark.parametrize("name", ["tied to the token before", "always where p is 0"])
def test_tokens_follow_the_target_whatever_the_draft(name: str) -> None:
    assert follows_at_length(name, K)


@pytest.mark.slow
@pytest.mark.parametrize("length", range(K + 1))
@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_follow_the_target_whatever_the_draft_and_the_length(name: str, length: int) -> None:
    assert follows_at_length(name, length)


@some_drafts
def test_tokens_follow_the_target_at_random_lengths(name: str) -> None:
    case, law = toy(name, seed=3)
    generator = torch.Generator().manual_seed(4)
    tokens, _ = case.run(TOKENS, lambda rows, *_: torch.randint(K + 1, rows.shape, generator=generator))
    assert p_value(tokens, law, VOCAB) > SURE


def test_tokens_follow_the_target_when_the_draft_is_drawn_at_another_temperature() -> None:
    case, law = toy("unrelated", draft_temperature=0.6)
    tokens, _ = case.run(TOKENS, fixed(2))
    assert p_value(tokens, law, VOCAB) > SURE


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    language = table(TARGET)
    case = Toy(language, language, random_key(DRAWS // 10, 0), K)
    for length in range(K + 1):
        assert (case.run(TOKENS, fixed(length))[1] == length).all()


def test_acceptance_is_the_overlap_of_the_two_laws() -> None:
    case, _ = toy("unrelated")
    _, accepted = case.run(1, fixed(1))
    zero = torch.zeros(1, dtype=torch.int64)
    p, q = (torch.softmax(language(zero, zero)[0], -1) for language in (case.target, case.draft))
    overlap = float(torch.minimum(p, q).sum())
    assert abs(float(accepted.double().mean()) - overlap) < 4 * (overlap * (1 - overlap) / DRAWS) ** 0.5


# -- lengths from confidences: several requests share a budget ---------------------------------------------------------

GROUP = 4  # requests of one batch
CONFIDENCE = torch.tensor([0.95, 0.15, 0.6])  # of the next draft, by the token before: as telling as can be


def live_survivals(anchors: Tensor, drafts: Tensor) -> Tensor:
    """[N, k]: known before each draft, but not from it."""
    return CONFIDENCE[torch.cat((anchors[:, None], drafts[:, :-1]), 1)].cumprod(1)


def select_in_groups(survivals: Tensor, caps: Tensor, budgets: Tensor) -> Tensor:
    """select_lengths of many batches of GROUP rows at once: survivals [batches * GROUP, k], budgets [batches]."""
    k = survivals.shape[1]
    allowed = torch.arange(k) < caps[:, None]
    scores = survivals.masked_fill(~allowed, -1).view(-1, GROUP, k).transpose(1, 2).flatten(1)
    rank = scores.argsort(dim=1, descending=True, stable=True).argsort(1)
    taken = (rank < budgets[:, None]).view(-1, k, GROUP).transpose(1, 2).reshape(-1, k)
    return (taken & allowed).sum(1)


def best_budgets(survivals: Tensor) -> Tensor:
    """The rate-maximising budget of each batch on a staircase of costs: a decision that hangs on every survival."""
    k = survivals.shape[1]
    gains = survivals.view(-1, GROUP * k).sort(1, descending=True).values.cumsum(1)
    rates = (GROUP + torch.cat((torch.zeros(len(gains), 1), gains), 1)) / (
        1 + 0.25 * torch.ceil(torch.arange(GROUP * k + 1) / 3)
    )
    return rates.argmax(1)


class SharedBudget:
    """The length rule of a running engine: the budget from confidences of drafts that are verified already, the
    ranking from those of the drafts at hand."""

    def __init__(self, *, look_ahead: bool = False) -> None:
        self.look_ahead = look_ahead  # the mistake: the budget from the drafts at hand
        past = torch.randint(VOCAB, (DRAWS, K), generator=torch.Generator().manual_seed(11))
        self._verified = CONFIDENCE[past].cumprod(1)
        self.seen: list[Tensor] = []

    def __call__(self, rows: Tensor, anchors: Tensor, drafts: Tensor) -> Tensor:
        live = live_survivals(anchors, drafts)
        budgets = best_budgets(live if self.look_ahead else self._verified[rows])
        lengths = select_in_groups(live, torch.full_like(rows, K), budgets)
        self._verified[rows] = live
        self.seen.append(lengths)
        return lengths


def test_batches_of_the_simulation_select_as_the_engine_does() -> None:
    generator = torch.Generator().manual_seed(5)
    levels = torch.tensor([1.0, 0.9, 0.5, 0.2])  # few, so that ties are common
    survivals = levels[torch.randint(4, (300 * GROUP, K), generator=generator)].cumprod(1)
    caps = torch.randint(K + 1, (300 * GROUP,), generator=generator)
    budgets = torch.randint(GROUP * K + 1, (300,), generator=generator)
    got = select_in_groups(survivals, caps, budgets).view(-1, GROUP)
    for batch in range(300):
        rows = slice(batch * GROUP, (batch + 1) * GROUP)
        assert torch.equal(got[batch], select_lengths(survivals[rows], caps[rows], int(budgets[batch])))


@some_drafts
def test_confidence_that_decides_how_many_drafts_are_verified_does_not_leak_into_the_tokens(name: str) -> None:
    case, law = toy(name, seed=6)
    rule = SharedBudget()
    tokens, _ = case.run(TOKENS, rule, GROUP)
    assert len(set(torch.cat(rule.seen).tolist())) > 2, "the rule is to give different lengths"
    for request in range(GROUP):
        assert p_value(tokens[request::GROUP], law, VOCAB) > SURE
    assert p_value(tokens, law, VOCAB) > SURE


# -- the mistakes, each of which the comparison finds ------------------------------------------------------------------

CERTAIN = 1e-12


def test_a_budget_from_the_drafts_at_hand_leaks() -> None:
    # The paper's example: p = (0.7, 0.3), q = (0.5, 0.5), rates 1, 0.5, 0.45. The second draft is sure behind token 0
    # and hopeless behind token 1, so a budget that sees it verifies the first draft only where it is token 0.
    p, q = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.5, 0.5]).log()
    case = Toy(table(p.expand(1, 2, 2)), table(q.expand(1, 2, 2)), random_key(DRAWS, 7), k=2)

    def look_ahead(rows: Tensor, anchors: Tensor, drafts: Tensor) -> Tensor:
        second = torch.where(drafts[:, 0] == 0, 0.9, 0.0)
        rates = torch.stack(
            (torch.ones_like(second), torch.full_like(second, 1.8 * 0.5), (1.8 + 0.8 * second) * 0.45), 1
        )
        return rates.argmax(1)

    tokens, _ = case.run(1, look_ahead)
    assert p_value(tokens, joint_law(case.target, 2, 1), 2) < CERTAIN
    assert abs(float((tokens == 0).double().mean()) - 0.85) < 0.005

    case, law = toy("unrelated", seed=6)
    assert p_value(case.run(TOKENS, SharedBudget(look_ahead=True), GROUP)[0], law, VOCAB) < CERTAIN


class ReusesTheDraftsNoise(RowTarget):
    def draw_residual(self, rows: Tensor, draft_logprobs: Tensor) -> Tensor:
        left = residual_logprobs(torch.log_softmax(self.logits[rows], -1), draft_logprobs)
        key = (self.key[0][rows], self.key[1][rows])
        noise = gumbel(key, self.positions[rows], None, VOCAB, stream=Stream.DRAFT, slot=1)
        return (left.double() + noise).argmax(-1)


class CorrectsFromTheTarget(RowTarget):
    def draw_residual(self, rows: Tensor, draft_logprobs: Tensor) -> Tensor:
        return self.draw(rows)


@pytest.mark.parametrize("mistake", [ReusesTheDraftsNoise, CorrectsFromTheTarget])
def test_a_correction_from_the_wrong_noise_or_law_shows(mistake: type[RowTarget]) -> None:
    case, law = toy("unrelated", make_target=mistake)
    assert p_value(case.run(TOKENS, fixed(1))[0], law, VOCAB) < CERTAIN


def test_the_likeliest_draft_judged_as_if_it_had_been_drawn_shows() -> None:
    case, law = toy("unrelated", soft_draft=False)
    assert p_value(case.run(TOKENS, fixed(1))[0], law, VOCAB) < CERTAIN


def test_requests_that_share_a_seed_and_a_budget_would_leak() -> None:
    # Why only requests with random seeds of their own are judged by chance: with one seed, a neighbour's drafts tell of
    # one's own, and they decide whether one's own are verified.
    p, q = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.5, 0.5]).log()
    low, high = random_key(DRAWS, 8)
    shared = (low[::2].repeat_interleave(2), high[::2].repeat_interleave(2))
    results = []
    for key in ((low, high), shared):
        case = Toy(table(p.expand(1, 2, 2)), table(q.expand(1, 2, 2)), key, k=2)

        def neighbours(rows: Tensor, anchors: Tensor, drafts: Tensor) -> Tensor:
            # Two drafts for two requests: the even one's first, and its second or, behind token 1, the odd one's first.
            second = drafts[::2, 0] == 0
            return torch.stack((1 + second.long(), (~second).long()), 1).flatten()

        tokens, _ = case.run(1, neighbours, 2)
        results.append(p_value(tokens[1::2], joint_law(case.target, 2, 1), 2))
    assert results[0] > SURE
    assert results[1] < CERTAIN


def test_drafts_with_the_targets_own_noise_are_for_the_coupled_rule_only() -> None:
    # Judged by chance, such a draft is tied to the correction that replaces it.
    case, law = toy("unrelated", rule=Rule.RESIDUAL)
    draw = case.draft_block

    def with_the_targets_noise(*anchored: object) -> tuple[Tensor, Tensor]:
        case.rule = Rule.COUPLED
        drawn = draw(*anchored)  # type: ignore[arg-type]
        case.rule = Rule.RESIDUAL
        return drawn

    case.draft_block = with_the_targets_noise  # type: ignore[method-assign]
    assert p_value(case.run(TOKENS, fixed(1))[0], law, VOCAB) < CERTAIN
