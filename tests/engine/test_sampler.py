"""The laws of sampling: which tokens may come, how often, and from which random number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from deepinfer.engine.plan import Admission
from deepinfer.engine.sampler import choose, list_top
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sampling_state import SamplingState
from deepinfer.engine.truncation import ranked, truncate
from deepinfer.kernels.argmax import argmax
from deepinfer.kernels.philox import philox, rounds_torch, uniforms
from deepinfer.kernels.random_streams import Stream, child_seed, gumbel, split_seeds

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.5, 0.0, -1.0, -3.0, -torch.inf])
DRAWS = 8000


class Row(NamedTuple):
    """One sequence whose next token is due. The position matters to noise and min_tokens; history is given where a test
    is about it."""

    params: SamplingParams
    position: int = 0
    seed: int = 7
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


class Sampled(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]
    top: list[dict[int, float] | None] | None
    valid: list[bool]


def admission(slot: int, row: Row) -> Admission:
    return Admission(slot, np.array(row.prompt + row.output, np.int32), len(row.prompt), row.params, row.seed)


def sample(logits: torch.Tensor, rows: list[Row], eos: tuple[int, ...] = ()) -> Sampled:
    """Every row in a slot of its own."""
    state = SamplingState(len(rows), logits.shape[1], eos_token_ids=eos)
    state.admit([admission(slot, row) for slot, row in enumerate(rows)])
    return sample_slots(logits, range(len(rows)), [row.position for row in rows], state)


def sample_slots(logits: torch.Tensor, slots: Iterable[int], positions: list[int], state: SamplingState) -> Sampled:
    where = np.array(list(slots), np.int64)
    chosen = choose(logits, where, np.array(positions, np.int64), state)
    top = list_top(logits, chosen.token_ids, where, state)
    return Sampled(chosen.token_ids.tolist(), chosen.logprobs.tolist(), top, chosen.valid.tolist())


def draw(params: SamplingParams, seed: int = 7) -> torch.Tensor:
    """How often each token came, over DRAWS positions of one stream."""
    state = SamplingState(1, len(LOGITS))
    state.admit([admission(0, Row(params, seed=seed))])
    out = sample_slots(LOGITS.expand(DRAWS, -1), [0] * DRAWS, list(range(DRAWS)), state)
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


EDGES = [{"temperature": 5e-324}, {"temperature": 1e-38}, {"temperature": 1.2e-38}, {"temperature": 1e-30}]
EDGES += [{"top_p": 5e-324}, {"min_p": 1.0}, {"temperature": 1e-30, "min_p": 5e-324, "top_p": 0.5}]
EDGES += [{"temperature": 1e-30, "repetition_penalty": penalty} for penalty in (0.01, 10)]


@pytest.mark.parametrize("fields", EDGES, ids=str)
def test_parameters_at_the_edge_of_their_ranges_give_the_best_token_and_no_infinities(fields: dict) -> None:
    logits = LOGITS.clone()
    logits[:6] *= 1000
    sampled = sample(logits[None], [Row(SamplingParams(**fields), prompt=(4, 5), output=(5,))])
    assert sampled.valid == [True] and sampled.token_ids == [0]
    assert all(map(math.isfinite, sampled.logprobs))


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


@pytest.mark.parametrize("top_k, min_p", [(0, 0.0), (1500, 0.0), (0, 1e-4)])
def test_what_top_p_keeps_of_a_row_does_not_depend_on_how_much_other_rows_keep(top_k: int, min_p: float) -> None:
    """At a mass of exactly top_p the last bit of the sum decides; a batch mate that looks at every token must not."""
    vocab = 4000
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(5))
    order = logits.double().sort(-1, descending=True).values
    cuts = order.exp().cumsum(-1) / order.exp().sum(-1, keepdim=True)
    top_p = cuts[:, 700].float()  # somewhere near the sum behind the 700th token
    ks, floors = torch.full((40,), top_k), torch.full((40,), min_p)

    def kept(rows: slice, *mates: torch.Tensor) -> list[list[int]]:
        extra = len(mates)
        values, ids = truncate(
            torch.cat((logits[rows], *mates)),
            torch.cat((floors[rows], torch.zeros(extra))),
            torch.cat((ks[rows], torch.zeros(extra, dtype=torch.int64))),
            torch.cat((top_p[rows], torch.ones(extra))),
        )
        return [i[v > -torch.inf].tolist() for v, i in zip(values, ids, strict=True)][: len(logits[rows])]

    together = kept(slice(None), torch.zeros(1, vocab))
    alone = [kept(slice(i, i + 1))[0] for i in range(40)]
    assert alone == kept(slice(None)) == together


def test_ranking_puts_equal_logits_in_id_order() -> None:
    values, ids = ranked(torch.tensor([[0.0, 5.0, -0.0, 5.0, -torch.inf, -1.0]]), 6)
    assert ids.tolist() == [[1, 3, 0, 2, 5, 4]]
    assert values.tolist() == [[5.0, 5.0, 0.0, 0.0, -1.0, -math.inf]]
    rows = torch.randint(0, 4, (20, 30), generator=torch.Generator().manual_seed(3)).float()  # ties everywhere
    for width in range(1, 31):
        for row, got in zip(rows.tolist(), ranked(rows, width)[1].tolist(), strict=True):
            assert got == sorted(range(30), key=lambda v: (-row[v], v))[:width]


def test_the_quick_argmax_agrees_with_torch_on_ties_and_nan() -> None:
    rows = torch.randint(0, 4, (300, 37), generator=torch.Generator().manual_seed(5)).float()
    rows[::7, 20] = rows[::14, 30] = torch.nan
    rows[1] = -torch.inf
    for values in (rows, rows.double(), rows.T.contiguous().T, rows.bfloat16()):
        assert torch.equal(argmax(values), torch.argmax(values, dim=-1))


# -- rows of a batch --------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [-1.0, -1.0, -1.0, -1.0]])
    assert sample(logits, [Row(SamplingParams(temperature=0))] * 2).token_ids == [1, 0]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    rows = [
        Row(SamplingParams(temperature=0), 1),
        Row(SamplingParams(temperature=1.3), 2, 11),
        Row(SamplingParams(top_p=0.5), 3, 12),
        Row(SamplingParams(top_k=7, min_p=0.01, logit_bias={4: 3.0}), 4, 13),
        Row(SamplingParams(temperature=1e-6), 5, 14),
        Row(SamplingParams(min_tokens=9, stop_token_ids=[1, 2]), 6, 15),
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
    out = sample(logits, [Row(params, prompt=(0, 2), output=(0, 0))])
    # id 0: (1 + 1) / 2 - 2 * 0.25 - 0.5 = 0; id 1 untouched 0.6; id 2: -0.5 * 2 = -1; id 3: 0.2
    assert out.token_ids == [1]
    assert out.logprobs[0] == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())  # raw, not penalised
    assert logits.tolist() == [[1.0, pytest.approx(0.6), -0.5, pytest.approx(0.2)]]  # the input is not changed


def test_bias_can_forbid_and_force() -> None:
    assert draw(SamplingParams(logit_bias={0: -math.inf}))[0] == 0
    assert draw(SamplingParams(logit_bias={6: 100.0}))[6] == DRAWS


def test_end_and_stop_ids_never_come_before_min_tokens_and_may_come_at_once_after() -> None:
    """Prompt of 3, min_tokens = 400: the token drawn from position p is output number p - 2, counted from 0."""
    params = SamplingParams(min_tokens=400, stop_token_ids=[0], max_tokens=600)
    state = SamplingState(2, len(LOGITS), eos_token_ids=[1])
    state.admit([admission(0, Row(params, prompt=(5, 5, 5))),
                 admission(1, Row(params.with_changes(ignore_eos=True), prompt=(5, 5, 5)))])  # fmt: skip
    positions = list(range(2, 602))
    for slot, banned in ((0, {0, 1}), (1, {0})):
        ids = sample_slots(LOGITS.expand(600, -1), [slot] * 600, positions, state).token_ids
        assert not banned & set(ids[:400])
        assert {0, 1} - banned <= set(ids[:400])
        assert set(ids[400:450]) >= {0, 1}
    certain = torch.full((1, 8), -50.0)
    certain[0, 0] = 50
    assert sample_slots(certain, [0], [401], state).token_ids != [0]
    assert sample_slots(certain, [0], [402], state).token_ids == [0]  # 400 tokens are out: this one may end it


def test_logprobs_are_of_the_raw_logits_best_first_with_the_chosen_token() -> None:
    truth = torch.log_softmax(LOGITS, 0)
    out = sample(LOGITS[None], [Row(SamplingParams(temperature=0, logit_bias={5: 50.0}, logprobs=2))])
    assert out.token_ids == [5]
    assert out.top is not None and out.top[0] is not None
    assert list(out.top[0]) == [0, 1, 5]
    assert out.top[0][5] == pytest.approx(truth[5].item()) == pytest.approx(out.logprobs[0])
    rows = [Row(SamplingParams(temperature=0)), Row(SamplingParams(temperature=0, logprobs=0))]
    top = sample(LOGITS.expand(2, -1), rows).top
    assert top is not None and top[0] is None and list(top[1] or {}) == [0]
    assert sample(LOGITS[None], rows[:1]).top is None


@pytest.mark.parametrize("vocab", [300, 6000])  # sorted whole, and by a first look at the best
def test_a_row_without_a_finite_best_logit_is_reported_and_touches_no_other(vocab: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(4))
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 0] = torch.inf
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(repetition_penalty=1.2, top_k=40, logprobs=2),
    ):
        rows = [Row(params, seed=i, prompt=(1, 2), output=(3,)) for i in range(5)]
        out = sample(logits, rows)
        assert out.valid == [True, False, False, False, True]
        assert [out.token_ids[0], out.token_ids[4]] == sample(logits[[0, 4]], [rows[0], rows[4]]).token_ids
        assert all(0 <= token < vocab for token in out.token_ids)  # the next step reads it before anyone drops the row


# -- against one row at a time ----------------------------------------------------------------------------------------


def one_row(logits: torch.Tensor, row: Row, eos: tuple[int, ...]) -> int | None:
    """The specification's order, spelled out for one row with Python's own sorting; None for an invalid row."""
    z, p, vocab = logits.clone(), row.params, len(logits)
    for token, bias in p.logit_bias.items():
        z[token] += bias
    said = Counter(row.output)
    for token in {*row.prompt, *row.output}:
        z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
    for token, times in said.items():
        z[token] -= p.frequency_penalty * times
        z[token] -= p.presence_penalty
    if len(row.output) < p.min_tokens:
        z[list(p.stop_token_ids) + ([] if p.ignore_eos else list(eos))] = -math.inf
    best = z.max()
    if not torch.isfinite(best):
        return None
    if p.temperature == 0:
        return min(v for v in range(vocab) if z[v] == best)
    t = ((z - best) / p.temperature).tolist()
    order = sorted((v for v in range(vocab) if t[v] > -math.inf), key=lambda v: (-t[v], v))
    if p.min_p:
        order = [v for v in order if t[v] >= math.log(p.min_p)]
    if p.top_k:
        order = order[: p.top_k]
    if p.top_p < 1:
        mass = np.cumsum(np.exp([t[v] for v in order]))
        order = order[: int((mass < p.top_p * mass[-1]).sum()) + 1]
    noise = gumbel(split_seeds([row.seed]), torch.tensor([row.position]), None, vocab)[0].tolist()
    return max(order, key=lambda v: (t[v] + noise[v], -v))


def random_params(rng: Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0, 0.5, 1, 1.3, 1e-6]),
        top_k=rng.choice([0, 0, 3, 50, 10**6]),
        top_p=rng.choice([1, 1, 0.5, 0.9]),
        min_p=rng.choice([0, 0, 0.05]),
        presence_penalty=rng.choice([0, 0, 0.5]),
        frequency_penalty=rng.choice([0, 0, 0.25]),
        repetition_penalty=rng.choice([1, 1, 1.3]),
        logit_bias=rng.choice([{}, {}, {3: 2.5, 7: -math.inf}]),
        min_tokens=rng.choice([0, 0, 4]),
        stop_token_ids=rng.choice([(), (5, 6)]),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice([None, None, 0, 3]),
    )


@pytest.mark.parametrize("vocab", [50, 700])
def test_any_mixture_of_parameters_gives_each_row_what_it_gets_alone(vocab: int) -> None:
    rng = Random(vocab)
    for trial in range(12):
        count = rng.choice([1, 2, 7, 30])
        logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(trial)) * 3
        if trial % 3 == 0:
            logits = logits.round(decimals=1)  # ties
        if trial % 4 == 0:
            logits[rng.randrange(count), rng.randrange(vocab)] = math.nan
        rows = []
        for _ in range(count):
            prompt, output = ([rng.randrange(vocab) for _ in range(rng.randint(low, 8))] for low in (1, 0))
            position = len(prompt + output) - 1
            rows.append(Row(random_params(rng), position, rng.getrandbits(64), tuple(prompt), tuple(output)))
        out = sample(logits, rows, eos=(1, 2))
        for i, row in enumerate(rows):
            expected = one_row(logits[i], row, (1, 2))
            assert out.valid[i] == (expected is not None)
            assert expected in (None, out.token_ids[i])


# -- what slots remember ----------------------------------------------------------------------------------------------


def test_a_slot_s_next_owner_inherits_nothing() -> None:
    rng = Random(1)
    logits = torch.randn(8, 60, generator=torch.Generator().manual_seed(6))
    state = SamplingState(8, 60, eos_token_ids=[1])
    for _ in range(30):
        rows = [
            Row(random_params(rng), 3, rng.getrandbits(64), (rng.randrange(60), 4), (rng.randrange(60), 5))
            for _ in range(8)
        ]
        state.admit([admission(slot, row) for slot, row in enumerate(rows)])
        got = sample_slots(logits, range(8), [3] * 8, state)
        assert got == sample(logits, rows, eos=(1,))
        # What the next owners must not see.
        state.append(np.arange(8), torch.tensor(got.token_ids), np.ones(8, np.bool_))


def test_tokens_appended_to_a_history_count_like_those_it_began_with() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=0.7, repetition_penalty=1.1)
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(8)).expand(3, -1)
    state = SamplingState(3, 20)
    state.admit([admission(slot, Row(params, prompt=(slot,))) for slot in (0, 2)])
    state.admit([admission(1, Row(SamplingParams(temperature=0)))])  # no history between two with one
    outputs: list[list[int]] = [[], [], []]
    for _ in range(12):
        got = sample_slots(logits, range(3), [0] * 3, state).token_ids
        for slot in (0, 2):
            alone = sample(logits[:1], [Row(params, prompt=(slot,), output=tuple(outputs[slot]))]).token_ids
            assert alone == [got[slot]]
        state.append(np.arange(3), torch.tensor(got), np.ones(3, np.bool_))
        for output, token in zip(outputs, got, strict=True):
            output.append(token)
    assert len(set(outputs[0])) > 3 and set(outputs[1]) == {int(logits[0].argmax())}


def test_histories_take_no_more_room_than_the_most_sequences_that_had_one_at_a_time() -> None:
    state = SamplingState(9, 20)
    penalised, plain = SamplingParams(frequency_penalty=1), SamplingParams()
    for turn in range(12):
        state.admit([admission(slot, Row(plain if slot % 3 else penalised)) for slot in range(9)])
        state.admit([admission(slot, Row(plain)) for slot in range(9)][turn % 9 :])
        state.admit([admission(slot, Row(plain)) for slot in range(9)][: turn % 9])
    assert len(state.histories.counts) <= 4  # three at a time, made one, two and four at once


def test_a_fork_chooses_as_its_parent_but_for_the_noise_and_then_goes_its_own_way() -> None:
    rng = Random(3)
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(9)).expand(2, -1)
    for _ in range(40):
        parent = Row(random_params(rng), 1, rng.getrandbits(64), (4, 9), ())
        child = parent._replace(seed=rng.getrandbits(64))
        state = SamplingState(2, 60, eos_token_ids=[1])
        state.admit([admission(1, Row(random_params(rng), 0, 5, (7,), (8,)))])  # the child's slot was somebody's
        state.admit([admission(0, parent)])
        state.fork(0, 1, child.seed)
        got = sample_slots(logits, range(2), [1, 1], state)
        assert got == sample(logits, [parent, child], eos=(1,))
        state.append(np.arange(2), torch.tensor([11, 12]), np.ones(2, np.bool_))
        after = [parent._replace(output=(11,), position=2), child._replace(output=(12,), position=2)]
        assert sample_slots(logits, range(2), [2, 2], state) == sample(logits, after, eos=(1,))
