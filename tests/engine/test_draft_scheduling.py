"""The host with drafts: it schedules what may be, settles what was, and no accident of acceptance changes an answer."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import assert_all_free
from player import VOCAB, Player, token
from scripted import CONFIG, fixed_row, make_engine, run, tokens

from deepinfer.cache.blocks import BLOCK_TOKENS
from deepinfer.cache.manager import CacheManager
from deepinfer.config import EngineConfig
from deepinfer.engine.core import EngineCore
from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import CompletionOutput
from deepinfer.engine.plan import StepPlan
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sequence import Status
from deepinfer.kernels.random_streams import child_seed

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


def played(
    *, drafts: int = 5, right: float = 0.7, broken: float = 0.0, chance: random.Random | None = None, **options: Any
) -> Engine:
    """An engine whose device is a Player, and which checks itself after every plan and every step."""
    sizes = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 16}
    config = EngineConfig(drafts=drafts, **sizes | {"prefix_caching": "off", "seed": 0} | options)  # type: ignore[arg-type]
    player = Player(drafts, chance=chance or random.Random(1), right=right, broken=broken)
    manager = CacheManager.for_model(CONFIG, config, offload_blocks=config.offload_bytes // 1000)
    engine = Engine(EngineCore(player, manager, config, vocab_size=VOCAB, eos_token_ids=[1]))
    engine.core.scheduler.schedule = partial(_checked, engine, engine.core.scheduler.schedule)  # type: ignore[method-assign]
    return engine


def _checked(engine: Engine, schedule, now: float) -> StepPlan | None:
    plan = schedule(now)
    if plan is None:
        return None
    config, decodes = engine.core.config, plan.num_decodes
    caps, table = plan.draft_caps, engine.scheduler.table
    assert len(caps) == decodes and (caps >= 0).all() and (caps <= config.drafts).all()
    assert (plan.lengths[:decodes] == caps + 1).all() and (plan.num_logits[:decodes] == caps + 1).all()
    slots = plan.slots[:decodes]
    drafts = int(caps.sum()) if plan.draft_budget is None else min(plan.draft_budget, int(caps.sum()))
    assert decodes + drafts + int(plan.lengths[decodes:].sum()) <= config.max_num_batched_tokens
    assert (plan.starts[:decodes] < table.limit[slots]).all()
    written = np.minimum(plan.starts[:decodes] + plan.lengths[:decodes], table.limit[slots])
    assert (written <= engine.cache.capacity[slots]).all()
    return plan


def step(engine: Engine) -> list:
    """A step of the engine, and what must hold after every one (spec/engine.md 1.1)."""
    deltas = engine.step()
    engine.cache.check_integrity()
    table, idle = engine.scheduler.table, engine.core.loop.num_in_flight == 0
    for sequence in engine.scheduler.running:
        slot = sequence.slot
        done, known, least, total, computed, limit = (
            int(column[slot])
            for column in (table.done, table.known, table.least, table.total, table.computed, table.limit)
        )
        assert 0 <= done <= known <= least <= min(total, limit) and done <= computed <= total
        assert int(table.published[slot]) * BLOCK_TOKENS <= max(done, sequence.hit.length)
        if sequence.status is Status.DECODE:
            assert computed == total - 1
            assert not idle or done == known - 1 == computed
    return deltas


def finish(engine: Engine, most: int = 20_000) -> None:
    for _ in range(most):
        if not engine.has_unfinished:
            return
        step(engine)
    raise AssertionError("the engine did not finish")


def answer(prompt: list[int], params: SamplingParams, index: int, limit: int) -> tuple[list[int], str]:
    """What a completion must be, and why it ends."""
    seed, given = child_seed(params.seq_seed or 0, index), []
    while len(given) < limit:
        given.append(token(seed, len(prompt) + len(given)))
        if given[-1] in params.stop_token_ids:
            return given, "stop"
    return given, "length"


def assert_counted(completion: CompletionOutput, prefills: int = 1) -> None:
    """Every round gives the drafts that it accepted and a token more, unless the end cuts it."""
    drafted, accepted = completion.draft_tok, completion.accept_tok
    assert len(drafted) == len(accepted)
    assert all(0 <= kept <= tried for kept, tried in zip(accepted, drafted, strict=True))
    whole = prefills + len(accepted) + sum(accepted)
    assert len(completion.token_id) in (whole, whole - 1) if accepted else len(completion.token_id) == prefills


# -- any run ----------------------------------------------------------------------------------------------------------

REQUEST = st.tuples(
    st.integers(1, 200),  # prompt length
    st.integers(1, 60),  # max_tokens
    st.sampled_from([1, 1, 1, 2, 4]),  # n
    st.integers(0, 12),  # step of submission
    st.one_of(st.none(), st.none(), st.integers(0, 25)),  # step of abortion
    st.sets(st.integers(2, VOCAB - 1), max_size=3),  # stop tokens
)


@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=6),
    drafts=st.integers(1, 5),
    right=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    seqs=st.integers(1, 4),
    batched=st.integers(4, 300),
    blocks=st.integers(3, 8),
    overlap=st.booleans(),
    offload=st.booleans(),
    caching=st.booleans(),
    luck=st.integers(0, 99),
)
def test_any_acceptance_under_any_schedule_gives_the_right_tokens_and_all_blocks_back(
    requests, drafts, right, seqs, batched, blocks, overlap, offload, caching, luck
) -> None:
    engine = played(
        max_model_len=300, max_num_seqs=seqs, max_num_batched_tokens=batched, num_blocks=blocks, overlap=overlap,
        drafts=drafts, right=right, chance=random.Random(luck), offload_bytes=5000 if offload else 0, offload_tokens=1,
        prefix_caching="exact" if caching else "off", window_entries=3 if caching else 0,
    )  # fmt: skip
    prompts = [[2 + (j + i % 2) % 50 for j in range(length)] for i, (length, *_) in enumerate(requests)]
    params = [
        SamplingParams(seq_seed=i, n=n, max_tokens=most, stop_token_ids=tuple(stops))
        for i, (_, most, n, _, _, stops) in enumerate(requests)
    ]
    for number in range(3000):
        for i, (_, _, _, enter, leave, _) in enumerate(requests):
            if enter == number:
                engine.add_request(str(i), prompts[i], params[i])
            if leave == number:
                engine.abort(str(i))
        if number > 25 and not engine.has_unfinished:
            break
        step(engine)
    assert not engine.has_unfinished
    assert_all_free(engine.cache)
    engine.core.shutdown()
    for i, (length, most, _, enter, leave, _) in enumerate(requests):
        output = engine.pop_output(str(i))
        for completion in output.outputs:
            expected, reason = answer(prompts[i], params[i], completion.index, min(most, 300 - length))
            if leave is None or leave < enter or completion.finish_reason != "abort":
                assert (completion.token_id, completion.finish_reason) == (expected, reason)
            assert completion.token_id == expected[: len(completion.token_id)]
            if not output.metrics.preemptions and completion.finish_reason != "abort":
                assert_counted(completion)
        drafted = [completion.draft_tok for completion in output.outputs]
        assert output.metrics.drafts.drafted == sum(map(sum, drafted))
        assert output.metrics.drafts.rounds == sum(map(len, drafted))


@LOOPS
def test_a_row_without_numbers_ends_its_sequence_with_what_was_accepted_before_it(overlap: bool) -> None:
    engine = played(overlap=overlap, broken=0.05, right=0.9)
    prompts = [[2 + i] * 20 for i in range(12)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(seq_seed=i, max_tokens=60))
    finish(engine)
    reasons = set()
    for i, prompt in enumerate(prompts):
        (completion,) = engine.pop_output(str(i)).outputs
        expected, _ = answer(prompt, SamplingParams(seq_seed=i), 0, 60)
        assert completion.token_id == expected[: len(completion.token_id)]
        assert len(completion.token_id) == 60 or completion.finish_reason == "error"
        reasons.add(completion.finish_reason)
    assert reasons == {"error", "length"}
    assert engine.core.stats().totals.corrupted >= 1
    assert_all_free(engine.cache)
    engine.core.shutdown()


# -- ends -------------------------------------------------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("place", range(1, 9))
def test_what_was_accepted_behind_a_stop_token_is_no_output_and_enters_no_cache(place: int, overlap: bool) -> None:
    prompt = [2] * 125  # the answer crosses a block's end
    expected, _ = answer(prompt, SamplingParams(seq_seed=0), 0, 20)
    stop = expected[place]
    engine = played(
        right=1.0, overlap=overlap, prefix_caching="exact", window_entries=4, max_num_batched_tokens=128, max_num_seqs=1
    )
    engine.add_request("a", prompt, SamplingParams(seq_seed=0, max_tokens=20, stop_token_ids=(stop,)))
    finish(engine)
    (completion,) = engine.pop_output("a").outputs
    kept = expected[: expected.index(stop) + 1]
    assert completion.token_id == kept and completion.finish_reason == "stop"
    assert len(completion.token_logprobs) == len(kept)
    assert_counted(completion)
    written = len(prompt) + len(kept) - 1  # the state of the last token was never needed
    assert engine.cache.num_cached_blocks == written // BLOCK_TOKENS
    engine.core.shutdown()


@LOOPS
@pytest.mark.parametrize("most", range(1, 9))
def test_no_draft_is_verified_that_could_not_become_output(most: int, overlap: bool) -> None:
    engine = played(right=1.0, overlap=overlap)
    engine.add_request("a", [2, 3], SamplingParams(seq_seed=0, max_tokens=most))
    finish(engine)
    (completion,) = engine.pop_output("a").outputs
    assert len(completion.token_id) == most and completion.finish_reason == "length"
    assert sum(completion.draft_tok) + len(completion.draft_tok) + 1 == most  # all were right, so none was wasted
    engine.core.shutdown()


def test_a_stop_string_in_the_middle_of_a_run_cuts_what_is_counted_as_accepted() -> None:
    row = fixed_row([-9.0] * 50 + [9.0])  # id 50, "2", for ever
    from scripted import ScriptedModel

    engine = make_engine(ScriptedModel(row), drafts=5, right=1.0)
    (output,) = run(engine, [[40]], SamplingParams(temperature=0, max_tokens=40, stop=("222",)))
    (completion,) = output.outputs
    assert completion.text == "" and completion.token_id == [50, 50, 50]
    assert (completion.draft_tok, completion.accept_tok) == ([5], [2])
    assert_all_free(engine.cache)


# -- room -------------------------------------------------------------------------------------------------------------


@LOOPS
def test_drafts_take_no_block_away_from_anybody(overlap: bool) -> None:
    """Four sequences fill all blocks: there is room for what they need, not for drafts beyond a block's end."""
    engine = played(
        overlap=overlap, right=0.0, num_blocks=4, max_num_seqs=4, max_model_len=250, max_num_batched_tokens=600
    )
    for i in range(4):
        engine.add_request(str(i), [2 + i] * 100, SamplingParams(seq_seed=i, max_tokens=28))  # 128 tokens: one block
    finish(engine)
    assert engine.scheduler.num_preemptions == 0
    assert all(len(engine.pop_output(str(i)).outputs[0].token_id) == 28 for i in range(4))
    engine.core.shutdown()


def test_a_cap_shrinks_to_what_the_blocks_hold_when_none_is_free() -> None:
    engine = played(right=0.0, num_blocks=3, max_num_seqs=3, max_model_len=250, max_num_batched_tokens=600)
    caps: dict[int, list[int]] = {}
    schedule = engine.core.scheduler.schedule

    def watched(now):
        plan = schedule(now)
        if plan is not None and plan.num_decodes == 3:
            for start, cap in zip(plan.starts.tolist(), plan.draft_caps.tolist(), strict=False):
                caps.setdefault(start, []).append(cap)
        return plan

    engine.core.scheduler.schedule = watched  # type: ignore[method-assign]
    engine.add_request("a", [2] * 120, SamplingParams(seq_seed=0, n=3, max_tokens=40))  # each copies the open block
    for _ in range(8):
        step(engine)
    assert {start: set(values) for start, values in caps.items()} == {
        120: {5}, 121: {5}, 122: {5}, 123: {4}, 124: {3}, 125: {2}, 126: {1},
    }  # fmt: skip
    assert engine.scheduler.num_preemptions == 0  # the next step has to take a block away: one token needs it
    finish(engine)
    assert engine.scheduler.num_preemptions > 0
    assert_all_free(engine.cache)


def test_a_running_batch_with_drafts_leaves_a_prefill_its_block_of_tokens() -> None:
    engine = played(right=0.5, max_num_seqs=60, max_num_batched_tokens=256, num_blocks=80, max_model_len=1000)
    for i in range(50):
        engine.add_request(str(i), [2 + i], SamplingParams(seq_seed=i, max_tokens=400))
    for _ in range(6):
        step(engine)
    plans = []
    schedule = engine.core.scheduler.schedule
    engine.core.scheduler.schedule = lambda now: plans.append(plan := schedule(now)) or plan  # type: ignore[method-assign]
    step(engine)
    assert plans[-1].draft_caps.tolist() == [5] * 50 and plans[-1].draft_budget == 206  # nobody waits
    engine.add_request("long", [2] * 600, SamplingParams(seq_seed=0, max_tokens=2))
    for _ in range(4):
        step(engine)
        assert int(plans[-1].lengths[50:].sum()) == BLOCK_TOKENS and plans[-1].draft_budget == 256 - 50 - BLOCK_TOKENS
    engine.abort_all()


@LOOPS
def test_a_sequence_that_leaves_with_a_verify_step_in_flight_comes_back_with_its_state(overlap: bool) -> None:
    engine = played(overlap=overlap, offload_bytes=100_000, offload_tokens=1, num_blocks=16)
    engine.add_request("a", [2] * 60, SamplingParams(seq_seed=3, max_tokens=80))
    for _ in range(9):
        step(engine)
    for _ in range(4):
        (sequence,) = engine.scheduler.running
        assert sequence.status is Status.DECODE
        known = int(engine.scheduler.table.known[sequence.slot])
        engine.scheduler._preempt(sequence)
        assert sequence.offloaded == known - 1  # not computed again
        for _ in range(5):
            step(engine)
    assert engine.scheduler.num_offloaded == 4
    finish(engine)
    (completion,) = engine.pop_output("a").outputs
    assert completion.token_id == answer([2] * 60, SamplingParams(seq_seed=3), 0, 80)[0]
    engine.core.shutdown()


# -- the real runner and the real cache -------------------------------------------------------------------------------


@LOOPS
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_windows_and_blocks_kept_with_drafts_are_found_again(right: float, overlap: bool) -> None:
    """The cache's tensors refuse a window whose content is not certain; the second turn of a conversation hits what the
    first one's answer left."""
    options = {"prefix_caching": "exact", "window_entries": 8, "num_blocks": 24, "max_num_batched_tokens": 256}
    engine = make_engine(drafts=5, right=right, overlap=overlap, **options)
    params = SamplingParams(temperature=0, max_tokens=160, ignore_eos=True)
    prompt = [3 + i % 50 for i in range(120)]
    (first,) = run(engine, [prompt], params)
    again = [*prompt, *first.outputs[0].token_id, *prompt[:30]]
    (second,) = run(engine, [again], params)
    assert second.cached_tokens == 256  # with its window: nothing is replayed
    cold = make_engine(overlap=overlap, num_blocks=24, max_num_batched_tokens=256)
    assert tokens([first, second]) == tokens([*run(cold, [prompt], params), *run(cold, [again], params)])
    engine.core.shutdown()


@LOOPS
def test_without_drafts_nothing_about_drafts_is_said(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    (output,) = run(engine, [[3]], SamplingParams(temperature=0, max_tokens=9))
    assert output.outputs[0].draft_tok == output.outputs[0].accept_tok == [] and not output.metrics.drafts.rounds
    assert engine.scheduler.planner is None and not engine.core.stats().drafts.rounds
    engine.core.shutdown()


def test_drafting_is_counted_alike_for_requests_and_for_the_engine() -> None:
    engine = played(right=0.8)
    for i in range(6):
        engine.add_request(str(i), [2] * 10, SamplingParams(seq_seed=i, max_tokens=50))
    finish(engine)
    requests = [engine.pop_output(str(i)) for i in range(6)]
    whole = engine.core.stats().drafts
    for name in ("rounds", "drafted", "accepted"):
        assert getattr(whole, name) == sum(getattr(output.metrics.drafts, name) for output in requests)
    assert whole.rounds == sum(len(output.outputs[0].draft_tok) for output in requests)
    totals = engine.core.stats().totals
    assert totals.draft_tokens == whole.drafted <= totals.draft_budget
    assert totals.generated_tokens == 300
