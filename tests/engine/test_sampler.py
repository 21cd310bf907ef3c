"""The laws of sampling: which tokens may come, how often, and from which random number."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.engine.penalties import TokenHistory
from deepinfer.engine.random_streams import Stream, child_seed, gumbel, split_seeds
from deepinfer.engine.sampler import SampleRow, sample
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.truncation import ranked, truncate
from deepinfer.kernels.philox import philox, rounds_torch, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.5, 0.0, -1.0, -3.0, -torch.inf])
DRAWS = 8000


def row(params: SamplingParams, position: int = 0, seed: int = 7, **options) -> SampleRow:
    return SampleRow(params, seed, position, options.get("history"), options.get("forbidden", ()))


def draw(params: SamplingParams, seed: int = 7) -> torch.Tensor:
    """How often each token came, over DRAWS positions of one stream."""
    out = sample(LOGITS.expand(DRAWS, -1), [row(params, position, seed) for position in range(DRAWS)])
    assert all(out.valid)
    return torch.bincount(torch.tensor(out.token_ids), minlength=len(LOGITS)).double()


def assert_follows(counts: torch.Tensor, law: torch.Tensor) -> None:
    """Chi-square at 1 in 10,000 (seeds are fixed, so a pass stays a pass); impossible tokens never came."""
    law = law.double() / law.double().sum()
    assert counts[law == 0].sum() == 0
    expected = law[law > 0] * counts.sum()
    statistic = ((counts[law > 0] - expected) ** 2 / expected).sum()
    freedom = int((law > 0).sum()) - 1
    # Wilson-Hilferty: quantile 0.9999 of chi-square, z = 3.719
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert statistic <= limit


# -- the generator ----------------------------------------------------------------------------------------------------

KNOWN = [  # Random123's known-answer file for philox4x32-10: counter, key, output
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, expected) -> None:
    state = tuple(map(torch.tensor, (*counter, *key)))
    assert tuple(int(word) for word in philox(state[:4], state[4:])) == expected
    assert tuple(int(word) for word in rounds_torch(state)) == expected


def test_both_versions_of_philox_give_the_same_words() -> None:
    state = [torch.randint(0, 1 << 32, (5, 7), generator=torch.Generator().manual_seed(i)) for i in range(6)]
    state[4] = state[4][:, :1].expand(5, 7)  # keys: one per row, and one per counter
    for got, expected in zip(philox(tuple(state[:4]), tuple(state[4:])), rounds_torch(tuple(state)), strict=True):
        assert torch.equal(got, expected)


def test_noise_knows_only_seed_position_and_id() -> None:
    seeds, positions = [3, 2**64 - 1, 3], torch.tensor([5, 900_000, 6])
    whole = gumbel(split_seeds(seeds), positions, None, 9)
    ids = torch.tensor([[8, 1, 4], [0, 7, 3], [2, 2, 5]])
    assert torch.equal(gumbel(split_seeds(seeds), positions, ids, 3), whole.gather(1, ids))
    for i, seed in enumerate(seeds):
        assert torch.equal(gumbel(split_seeds([seed]), positions[i : i + 1], None, 9)[0], whole[i])
    assert len(set(whole.flatten().tolist())) == 27


def test_uniforms_never_reach_zero_or_one_and_streams_differ() -> None:
    key, positions = split_seeds([1]), torch.tensor([0])
    u = uniforms(key, Stream.TARGET, positions, None, 100_000)
    assert 0 < u.min() < 1e-4 and 1 - 1e-4 < u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    other = uniforms(key, Stream.ACCEPT, positions, None, 100_000)
    assert not (u == other).any()


def test_children_have_distinct_seeds_and_the_first_keeps_the_request_s() -> None:
    seeds = [child_seed(42, index) for index in range(100)]
    assert seeds[0] == 42 and len(set(seeds)) == 100


# -- laws -------------------------------------------------------------------------------------------------------------


def test_plain_sampling_follows_softmax() -> None:
    assert_follows(draw(SamplingParams(temperature=1)), torch.softmax(LOGITS, 0))


def test_temperature_divides_the_logits() -> None:
    assert_follows(draw(SamplingParams(temperature=0.6)), torch.softmax(LOGITS / 0.6, 0))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_top_k_keeps_the_k_best_and_ties_go_to_the_lower_id(k: int) -> None:
    law = torch.softmax(LOGITS, 0)
    law[k:] = 0  # LOGITS is sorted; ids 2 and 3 tie, and k = 3 keeps id 2
    assert_follows(draw(SamplingParams(top_k=k)), law)


@pytest.mark.parametrize("p", [0.3, 0.6, 0.9])
def test_top_p_keeps_the_shortest_list_that_reaches_p(p: float) -> None:
    law = torch.softmax(LOGITS, 0)
    kept = int((law.cumsum(0) < p).sum()) + 1
    law[kept:] = 0
    assert_follows(draw(SamplingParams(top_p=p)), law)


def test_min_p_drops_what_is_far_below_the_best() -> None:
    law = torch.softmax(LOGITS, 0)
    law[law < 0.2 * law.max()] = 0
    assert_follows(draw(SamplingParams(min_p=0.2)), law)


def test_top_p_counts_what_min_p_and_top_k_left() -> None:
    law = torch.softmax(LOGITS, 0)
    law[4:] = 0
    law /= law.sum()
    law[int((law.cumsum(0) < 0.8).sum()) + 1 :] = 0
    assert_follows(draw(SamplingParams(top_k=4, top_p=0.8)), law)


def test_truncation_is_exact_on_wide_rows() -> None:
    """4,000 ids with many ties, against a plain sort: the quick first look must not show."""
    logits = torch.randn(5, 4000, generator=torch.Generator().manual_seed(1)).mul(2).round(decimals=1)
    top_k, top_p, min_p = torch.tensor([0, 0, 50, 2000, 0]), torch.tensor([0.99, 1.0, 1.0, 0.7, 0.2]), torch.zeros(5)
    min_p[1] = 0.001
    values, ids = truncate(logits, min_p, top_k, top_p)
    for i in range(5):
        order = sorted(range(4000), key=lambda v: (-float(logits[i, v]), v))
        if top_k[i]:
            order = order[: int(top_k[i])]
        if min_p[i]:
            order = [v for v in order if logits[i, v] >= logits[i].max() + math.log(min_p[i])]
        law = torch.softmax(logits[i, order].double(), 0)
        if top_p[i] < 1:
            order = order[: int((law.cumsum(0) < float(top_p[i].double())).sum()) + 1]
        assert ids[i][values[i] > -torch.inf].tolist() == order


def test_ranking_puts_equal_logits_in_id_order() -> None:
    values, ids = ranked(torch.tensor([[0.0, 5.0, -0.0, 5.0, -torch.inf, -1.0]]), 6)
    assert ids.tolist() == [[1, 3, 0, 2, 5, 4]]
    assert values.tolist() == [[5.0, 5.0, 0.0, 0.0, -1.0, -math.inf]]
    rows = torch.randint(0, 4, (20, 30), generator=torch.Generator().manual_seed(3)).float()  # ties everywhere
    for width in range(1, 31):
        for row, got in zip(rows.tolist(), ranked(rows, width)[1].tolist(), strict=True):
            assert got == sorted(range(30), key=lambda v: (-row[v], v))[:width]


# -- rows of a batch --------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [-1.0, -1.0, -1.0, -1.0]])
    assert sample(logits, [row(SamplingParams(temperature=0))] * 2).token_ids == [1, 0]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    rows = [
        row(SamplingParams(temperature=0), 1),
        row(SamplingParams(temperature=1.3), 2, 11),
        row(SamplingParams(top_p=0.5), 3, 12),
        row(SamplingParams(top_k=7, min_p=0.01, logit_bias={4: 3.0}), 4, 13),
        row(SamplingParams(temperature=1e-6), 5, 14),
        row(SamplingParams(), 6, 15, forbidden=(1, 2)),
    ]
    together = sample(logits, rows).token_ids
    assert together == [sample(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(6)]
    back = sample(logits.flip(0), rows[::-1]).token_ids
    assert together == back[::-1]
    assert together[4] == int(logits[4].argmax())  # a temperature near 0 is greedy


def test_penalties_and_bias_follow_their_formulas_in_order() -> None:
    """Bias first, then repetition (prompt and output), then frequency and presence (output only)."""
    logits = torch.tensor([[1.0, 0.6, -0.5, 0.2]])
    params = SamplingParams(
        temperature=0, logit_bias={0: 1.0}, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5
    )
    history = TokenHistory.of([0, 2], [0, 0], 4, "cpu")
    out = sample(logits, [row(params, history=history)])
    # id 0: (1 + 1) / 2 - 2 * 0.25 - 0.5 = 0; id 1 untouched 0.6; id 2: -0.5 * 2 = -1; id 3: 0.2
    assert out.token_ids == [1]
    assert out.logprobs[0] == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())  # raw, not penalised
    assert logits.tolist() == [[1.0, pytest.approx(0.6), -0.5, pytest.approx(0.2)]]  # the input is not changed


def test_bias_can_forbid_and_force() -> None:
    assert draw(SamplingParams(logit_bias={0: -math.inf}))[0] == 0
    assert draw(SamplingParams(logit_bias={6: 100.0}))[6] == DRAWS


def test_forbidden_ids_never_come() -> None:
    out = sample(LOGITS.expand(500, -1), [row(SamplingParams(), i, forbidden=(0, 1)) for i in range(500)])
    assert not {0, 1} & set(out.token_ids)


def test_logprobs_are_of_the_raw_logits_best_first_with_the_chosen_token() -> None:
    truth = torch.log_softmax(LOGITS, 0)
    out = sample(LOGITS[None], [row(SamplingParams(temperature=0, logit_bias={5: 50.0}, logprobs=2))])
    assert out.token_ids == [5]
    assert list(out.top[0] or {}) == [0, 1, 5]
    assert (out.top[0] or {})[5] == pytest.approx(truth[5].item()) == pytest.approx(out.logprobs[0])
    none = sample(LOGITS[None], [row(SamplingParams(temperature=0, logprobs=0))])
    assert list(none.top[0] or {}) == [0]


def test_a_row_without_a_finite_best_logit_is_reported() -> None:
    logits = torch.zeros(4, 5)
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 0] = torch.inf
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5)):
        assert sample(logits, [row(params)] * 4).valid == [True, False, False, False]
