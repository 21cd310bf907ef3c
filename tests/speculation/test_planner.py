"""How many drafts, and whether any: the planner's promises, and what they are worth in a model of an engine."""

from __future__ import annotations

import numpy as np
import pytest
from engine_model import Workload, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.speculation.budget import CostCurve, StepCosts, choose_budget
from deepinfer.speculation.planner import PROBE_DRAFTS, PROBE_EVERY, PROBE_SELDOM, DraftPlanner

# Seconds of a target pass by rows and of a draft pass by sequences.
CPU = StepCosts(CostCurve({1: 4e-3, 2: 5e-3, 6: 9e-3, 24: 25e-3, 384: 380e-3}), CostCurve({1: 1e-3, 64: 20e-3}))
GPU = StepCosts(
    CostCurve({8: 9e-3, 64: 10e-3, 256: 14e-3, 512: 22e-3, 1024: 44e-3}, buckets=[8, 16, 32, 64, 128, 256, 512]),
    CostCurve({1: 0.8e-3, 256: 2e-3}),
)
DEAR = StepCosts(CostCurve({1: 1e-3, 2: 2e-3, 64: 64e-3}), CostCurve({1: 1e-3, 64: 64e-3}))  # drafts never pay
SKEW = [0.6, 1.0, 1.3]  # the head promises too much, what comes true, too little (one factor mends no more than that)


def planner(costs: StepCosts | None, rows: int = 64, k: int = 5, *, varlen: bool = True) -> DraftPlanner:
    made = DraftPlanner(rows, k, varlen=varlen, costs=costs)
    for slot in range(rows):
        made.open(slot)
    return made


def all_slots(rows: int, cap: int = 5) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(rows), np.full(rows, cap)


# -- cost curves -------------------------------------------------------------------------------------------------------


def test_a_curve_is_straight_between_points_and_goes_on_with_its_last_slope() -> None:
    curve = CostCurve({1: 1.0, 3: 2.0, 5: 6.0})
    assert curve.up_to(7).tolist() == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_a_larger_step_that_measured_faster_costs_as_much() -> None:
    assert CostCurve({1: 2.0, 4: 1.0, 8: 3.0}).up_to(8).tolist() == [2, 2, 2, 2, 2, 2.25, 2.5, 2.75, 3]


def test_padded_sizes_cost_what_their_bucket_costs_and_nothing_crosses_the_largest() -> None:
    curve = CostCurve({2: 1.0, 4: 2.0, 8: 9.0, 10: 11.0}, buckets=[2, 4])
    assert curve.up_to(12).tolist() == [1, 1, 1, 2, 2, 9, 9, 9, 9, 10, 11, 12, 13]


def test_a_curve_may_end_at_its_largest_bucket() -> None:
    assert CostCurve({2: 1.0, 4: 2.0}, buckets=[2, 4]).up_to(6).tolist() == [1, 1, 1, 2, 2, 2.5, 3]


@pytest.mark.parametrize("points", [{}, {0: 1.0}, {1: 0.0}, {1: float("nan")}, {1: -1.0}])
def test_an_impossible_curve_is_refused(points: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="cost curve"):
        CostCurve(points)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0, 1), max_size=12),
    st.integers(1, 4),
    st.integers(0, 4),
    st.dictionaries(st.integers(1, 20), st.floats(1e-3, 10), min_size=1, max_size=6),
)
def test_no_other_budget_has_a_better_rate(
    survivals: list[float], samples: int, others: int, points: dict[int, float]
) -> None:
    curve, extra = CostCurve(points, buckets=[4, 8]), 0.5
    ranked = sorted(survivals, reverse=True)
    gains = np.concatenate(([0.0], np.cumsum(ranked)))
    rows = samples + others
    best, rate = choose_budget(gains, samples, rows, curve, extra)
    rates = [(samples + sum(ranked[:n])) / (curve.at(rows + n) + extra) for n in range(len(ranked) + 1)]
    assert rate == pytest.approx(max(rates)) and rates[best] == pytest.approx(rate)


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_fixed_length_verifies_all_that_there_is_room_for() -> None:
    made = planner(CPU, varlen=False)
    plan = made.plan(np.array([0, 1, 2]), np.array([5, 2, 7]))
    assert (plan.caps.tolist(), plan.budget, plan.propose) == ([5, 2, 5], None, True)
    plan = made.plan(np.array([0, 1, 2]), np.array([5, 2, 7]), room=4)
    assert (plan.caps.tolist(), plan.budget, plan.propose) == ([4, 2, 4], 4, True)
    assert made.explanation == "always 5 drafts a sequence"


@pytest.mark.parametrize("costs", [None, StepCosts(CostCurve({1: 1.0, 64: 1.01}), CostCurve({1: 1.0}))])
def test_without_a_cost_that_grows_everything_is_verified_and_that_is_said(costs: StepCosts | None) -> None:
    made = planner(costs)
    plan = made.plan(*all_slots(8))
    assert (plan.caps.tolist(), plan.budget, plan.propose) == ([5] * 8, None, True)
    assert "always 5" in made.explanation and ("unknown" in made.explanation or "the same" in made.explanation)


def test_no_drafts_asked_for_means_none() -> None:
    made = planner(CPU, k=0)
    plan = made.plan(*all_slots(3))
    assert (plan.caps.tolist(), plan.propose, made.explanation) == ([0, 0, 0], False, "no drafts")
    made.settle(np.arange(3), np.zeros(3, np.int64), np.zeros(3, np.int64), None)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_plan_keeps_to_caps_and_room(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 12))
    made = planner(data.draw(st.sampled_from([CPU, GPU, DEAR])), rows)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for _ in range(6):
        slots = np.sort(rng.permutation(rows)[: data.draw(st.integers(0, rows))])
        most = rng.integers(0, 7, len(slots))
        room = data.draw(st.sampled_from([0, 1, 7, 1000]))
        others = data.draw(st.sampled_from([0, 50]))
        plan = made.plan(slots, most, others, min(others, 1), room)
        assert (plan.caps <= np.minimum(most, 5)).all() and (plan.caps >= 0).all()
        total = int(plan.caps.sum()) if plan.budget is None else plan.budget
        assert total <= room and plan.caps.max(initial=0) <= total
        lengths = rng.integers(0, plan.caps + 1)
        survivals = rng.random((len(slots), 5), np.float32).cumprod(1) if plan.propose else None
        made.settle(slots, lengths, rng.integers(0, lengths + 1), survivals)


def test_a_step_without_sequences_is_planned() -> None:
    made = planner(CPU)
    none = np.empty(0, np.int64)
    assert not made.plan(none, none, other_rows=100).propose
    plan = made.plan(none, none, other_rows=100, other_samples=2)
    assert (plan.caps.tolist(), plan.budget, plan.propose) == ([], None, True)


def test_what_the_device_says_of_drafts_counts_only_once_they_have_been_verified() -> None:
    """Two engines that differ in the live confidences alone plan the same step; the next plan may differ."""
    plans = []
    for live in (1.0, 0.01):
        made = planner(GPU, 128)
        slots, most = all_slots(128)
        usual = np.full((128, 5), 0.6, np.float32).cumprod(1)
        made.plan(slots, most)
        made.settle(slots, np.zeros(128, np.int64), np.zeros(128, np.int64), usual)
        made.plan(slots, most)
        made.settle(slots, np.full(128, 5), np.full(128, 1), np.full((128, 5), live, np.float32).cumprod(1))
        before = made.plan(slots, most)
        assert np.allclose(made.predicted(slots)[:, 0], live)
        made.settle(slots, np.full(128, 2), np.full(128, 1), usual)
        plans.append((before, made.plan(slots, most)))
    (one, later), (other, later_too) = plans
    assert (one.caps == other.caps).all() and one[1:] == other[1:]
    assert later.budget != later_too.budget


def test_predictions_that_do_not_come_true_are_corrected() -> None:
    made = planner(GPU, 8)
    slots, most = all_slots(8)
    for _ in range(60):
        made.plan(slots, most)
        made.settle(slots, np.full(8, 5), np.full(8, 1), np.full((8, 5), 0.9, np.float32).cumprod(1))
    predicted = float(np.full(5, 0.9).cumprod().sum())
    assert made.correction == pytest.approx(max(1 / predicted, 0.25), rel=0.1)


def test_a_request_that_says_nan_does_not_spoil_the_plans_of_others() -> None:
    plans = []
    for broken in (0.0, np.nan):
        made = planner(GPU, 4)
        slots, most = all_slots(4)
        for _ in range(10):
            plan = made.plan(slots, most)
            survivals = np.full((4, 5), 0.8, np.float32).cumprod(1)
            survivals[2] = broken
            made.settle(slots, np.minimum(plan.caps, 3), np.full(4, 2), survivals)
        plans.append(plan)
    assert plans[0].propose and plans[0].budget == plans[1].budget and (plans[0].caps == plans[1].caps).all()


def test_a_new_sequence_is_believed_in_until_others_have_shown_what_to_expect() -> None:
    made = planner(CPU, 2)
    slots, most = np.array([0]), np.array([5])
    assert made.plan(slots, most).caps.tolist() == [5]
    for _ in range(80):
        made.settle(slots, np.full(1, 1), np.zeros(1, np.int64), np.full((1, 5), 0.02, np.float32).cumprod(1))
        made.plan(slots, most)
    made.open(1)
    assert not made.plan(np.array([1]), most).propose


# -- what it is worth --------------------------------------------------------------------------------------------------


def falls_behind(costs: StepCosts, work: Workload, steps: int, *, overlapped: bool) -> str:
    """What the planner loses against, if anything."""
    rows = work.sequences
    plain, drafting = costs.verify.at(rows), costs.draft.at(rows)
    off = rows / plain
    fixed = rows * (1 + work.expected()) / (costs.verify.at(rows * 6) + drafting)
    made = DraftPlanner(rows, 5, varlen=True, costs=costs)
    got = simulate(made, work, costs, steps, overlapped=overlapped).tokens_per_second
    probe = (drafting + costs.verify.at(rows + PROBE_DRAFTS) - plain) / plain / PROBE_EVERY
    if got < off * (1 - probe - 0.02):
        return f"{got:.1f} tokens/s, without drafts {off:.1f}"
    # One sequence near the point where drafts begin to pay: a few poor rounds end them until a probe.
    near = 0.94 if rows == 1 else 0.97
    return f"{got:.1f} tokens/s, always five drafts {fixed:.1f}" if got < fixed * near else ""


@pytest.mark.parametrize("acceptance", [0.15, 0.5, 0.9])
@pytest.mark.parametrize(("sequences", "steps"), [(1, 1500), (16, 500), (64, 300)])
@pytest.mark.parametrize("costs", [CPU, GPU], ids=["cpu", "gpu"])
def test_it_does_not_lose_against_no_drafts_or_a_fixed_number(
    costs: StepCosts, sequences: int, steps: int, acceptance: float
) -> None:
    assert not falls_behind(costs, Workload(sequences, acceptance), steps, overlapped=True)


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("says", SKEW)
@pytest.mark.parametrize("acceptance", [0.15, 0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("sequences", [1, 4, 16, 64])
@pytest.mark.parametrize("costs", [CPU, GPU], ids=["cpu", "gpu"])
def test_it_does_not_lose_with_a_head_that_promises_too_much_or_too_little(
    costs: StepCosts, sequences: int, acceptance: float, says: float, overlapped: bool
) -> None:
    work = Workload(sequences, acceptance, says=says)
    assert not falls_behind(costs, work, 3000 if sequences == 1 else 600, overlapped=overlapped)


def test_where_drafts_never_pay_it_probes_and_does_nothing_else() -> None:
    work = Workload(8, 0.7)
    got = simulate(DraftPlanner(8, 5, varlen=True, costs=DEAR), work, DEAR, 640, overlapped=True)
    assert got.proposed <= 640 / PROBE_EVERY + 3
    assert got.verified <= 640 / PROBE_EVERY * PROBE_DRAFTS + 3 * 8 * 5


def test_it_looks_ever_more_seldom_where_many_sequences_never_gain() -> None:
    got = simulate(DraftPlanner(32, 5, varlen=True, costs=DEAR), Workload(32, 0.7), DEAR, 2000, overlapped=False)
    looks = 32 + 64 + 128  # steps, and then 256 between two
    assert got.proposed <= 3 + (2000 - looks) / PROBE_SELDOM + 3


def test_it_comes_back_when_the_load_falls() -> None:
    costs = StepCosts(CostCurve({1: 5e-3, 32: 5.2e-3, 64: 40e-3, 384: 400e-3}), CostCurve({1: 1e-3, 64: 4e-3}))
    made = planner(costs)
    slots, most = all_slots(64)
    survivals = np.full((64, 5), 0.7, np.float32).cumprod(1)
    for _ in range(10):
        plan = made.plan(slots, most)
        made.settle(slots, plan.caps, plan.caps // 2, survivals if plan.propose else None)
    assert not plan.propose
    few = slots[:4]
    assert made.plan(few, most[:4]).propose


def test_it_comes_back_when_the_text_becomes_easy() -> None:
    made = planner(CPU, 1)
    slots, most = all_slots(1)
    plan = made.plan(slots, most)
    kept = []
    for step in range(400):
        confidence = 0.05 if step < 200 else 0.95
        drafts = min(int(plan.caps[0]), 5 if plan.budget is None else plan.budget)
        survivals = np.full((1, 5), confidence, np.float32).cumprod(1) if plan.propose else None
        made.settle(slots, np.array([drafts]), np.array([drafts if step > 200 else 0]), survivals)
        plan = made.plan(slots, most)
        kept.append(plan.propose)
    assert sum(kept[50:200]) <= 150 / PROBE_EVERY + 1
    assert all(kept[200 + PROBE_EVERY * 3 :])
