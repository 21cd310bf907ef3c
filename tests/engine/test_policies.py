"""Who goes first, who is passed by, who is dropped: the scheduler's policies, on the scripted model."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
from integrity import assert_all_free
from scripted import ScriptedModel, drain, make_engine

from deepinfer.cache.hashing import HashChain
from deepinfer.config import EngineConfig
from deepinfer.engine.blocked import FutureCondition
from deepinfer.engine.messages import EngineRequest
from deepinfer.engine.queue_policy import AGING_SECONDS, FairShare
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.scheduler import MAX_PREEMPTIONS
from deepinfer.engine.sequence import Sequence

SHORT = SamplingParams(temperature=0, max_tokens=2)


def order_of_ends(engine) -> list[str]:
    ended = []
    while engine.has_unfinished:
        ended += [delta.request_id for delta in engine.step() if delta.finish_reason]
    return ended


# -- waiting for something else ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_a_request_whose_grammar_is_not_ready_keeps_nobody_from_starting(overlap: bool) -> None:
    engine = make_engine(max_num_seqs=1, overlap=overlap)
    grammar: Future = Future()
    engine.add_request("blocked", [3], SHORT, blocked_on=[FutureCondition("grammar", grammar)])
    engine.add_request("free", [4], SHORT)
    ended = []
    for _ in range(12):
        ended += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert ended == ["free"] and engine.has_unfinished
    assert engine.core.stats().totals.waiting_by_reason == {"grammar": 1}
    grammar.set_result("compiled")
    assert order_of_ends(engine) == ["blocked"]
    assert_all_free(engine.cache)
    engine.core.shutdown()


def test_a_request_whose_grammar_fails_ends_with_an_error_and_nobody_else_does() -> None:
    engine = make_engine(max_num_seqs=1)
    grammar: Future = Future()
    engine.add_request("bad", [3], SamplingParams(n=2, max_tokens=2), blocked_on=[FutureCondition("grammar", grammar)])
    engine.add_request("good", [4], SHORT)
    grammar.set_exception(ValueError("no such rule"))
    drain(engine)
    assert [completion.finish_reason for completion in engine.pop_output("bad").outputs] == ["error", "error"]
    assert engine.pop_output("good").outputs[0].finish_reason == "length"
    assert_all_free(engine.cache)


def test_a_blocked_request_can_be_aborted_and_can_expire() -> None:
    now = [0.0]
    engine = make_engine(clock=lambda: now[0])
    engine.add_request("aborted", [3], SHORT, blocked_on=[FutureCondition("vision", Future())])
    engine.add_request("late", [3], SHORT.with_changes(deadline=5), blocked_on=[FutureCondition("kv", Future())])
    assert engine.step() == []
    assert engine.abort("aborted")
    now[0] = 5.0
    assert [(d.request_id, d.finish_reason) for d in engine.step()] == [("late", "deadline")]
    assert not engine.has_unfinished


# -- order ------------------------------------------------------------------------------------------------------------


def test_priority_comes_before_arrival() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add_request("batch", [3], SHORT.with_changes(priority=2))
    engine.add_request("agent", [3], SHORT.with_changes(priority=1))
    engine.add_request("chat", [3], SHORT)
    assert order_of_ends(engine) == ["chat", "agent", "batch"]


def test_a_tenant_with_many_requests_does_not_starve_the_others() -> None:
    engine = make_engine(max_num_seqs=1, queue_policy="fair")
    for i in range(6):
        engine.add_request(f"crowd{i}", [3] * 20, SHORT, tenant="crowd")
    engine.step()
    engine.add_request("guest", [4] * 20, SHORT, tenant="guest")
    ended = order_of_ends(engine)
    assert ended.index("guest") <= 1  # after the one that ran already
    first_come = make_engine(max_num_seqs=1)
    for i in range(6):
        first_come.add_request(f"crowd{i}", [3] * 20, SHORT, tenant="crowd")
    first_come.add_request("guest", [4] * 20, SHORT, tenant="guest")
    assert order_of_ends(first_come)[-1] == "guest"


def test_a_tenant_pays_for_the_tokens_that_its_drafts_brought() -> None:
    def charged(**options) -> float:
        engine = make_engine(max_num_seqs=1, queue_policy="fair", **options)
        engine.add_request("a", [3] * 20, SHORT.with_changes(max_tokens=41), tenant="a")
        queue, seen = engine.scheduler.waiting, 0.0
        while engine.has_unfinished:
            engine.step()
            seen = max(seen, float(queue._charged.max()))
        return seen

    assert charged(drafts=5, right=1.0) == charged(drafts=5, right=0.3) == charged()


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    engine = make_engine(max_num_seqs=1, queue_policy="fair")
    engine.add_request("early", [3] * 2, SHORT, tenant="away")
    drain(engine)
    for i in range(3):
        engine.add_request(f"busy{i}", [3] * 30, SHORT, tenant="busy")
        drain(engine)
    for i in range(3):
        engine.add_request(f"b{i}", [3] * 30, SHORT, tenant="busy")
        engine.add_request(f"a{i}", [3] * 30, SHORT, tenant="away")
    ended = order_of_ends(engine)
    assert ended[:4] != ["a0", "a1", "a2", "b0"]  # it does not run through its whole queue first
    assert {ended[0][0], ended[1][0]} == {"a", "b"}


def policy_sequence(number: int, tenant: str, arrival: float = 0.0, **params) -> Sequence:
    """A waiting sequence as the policies see it."""
    prompt = np.array([3], np.int32)
    request = EngineRequest(
        number=number,
        request_id=str(number),
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        max_tokens=1,
        tenant=tenant,
    )
    return Sequence(
        request, index=0, seed=0, arrival=arrival, limit=2, chain=HashChain(b""), token_ids=prompt, siblings=[]
    )


def serve(policy: FairShare, tokens: int) -> Sequence:
    """The next in line starts, computes and ends."""
    sequence = next(policy.candidates(0.0))
    tenant = policy.enter(sequence.request.tenant)
    policy.remove(sequence)
    policy.charge_prefill(tenant, tokens)
    policy.leave(tenant)
    return sequence


def test_whoever_was_served_alone_for_long_is_not_punished_when_another_comes() -> None:
    policy = FairShare()
    for number in range(100):
        policy.push(policy_sequence(number, "busy"))
        serve(policy, 100)
    policy.push(policy_sequence(99, "busy"))  # somebody of it is there all the time
    for number in range(1000, 1100):
        policy.push(policy_sequence(number, "busy"))
        serve(policy, 10_000)
    for number in range(100, 500):
        policy.push(policy_sequence(number, "late" if number % 2 else "busy"))
    served = [serve(policy, 100).request.tenant for _ in range(200)]
    assert 45 <= served[100:].count("busy") <= 55  # the latecomer may catch up with one request, of 10,000 tokens


def test_of_one_tenant_the_request_that_is_due_first_goes_first() -> None:
    policy = FairShare()
    policy.push(policy_sequence(0, "a", arrival=0.0, deadline=10))  # due at 10
    policy.push(policy_sequence(1, "a", arrival=5.0, deadline=8))  # due at 13
    policy.push(policy_sequence(2, "a", arrival=1.0))
    assert [sequence.request.number for sequence in policy.candidates(6.0)] == [0, 1, 2]


def test_a_tenant_that_has_gone_and_owes_nothing_is_forgotten() -> None:
    policy = FairShare()
    policy.push(policy_sequence(0, "always there", priority=1))
    for number in range(1, 5000):
        policy.push(policy_sequence(number, f"user {number}"))
        serve(policy, number % 7 + 1)
    assert len(policy._charged) <= 2048 and len(policy) == 1


def test_who_waits_long_moves_up_one_priority() -> None:
    now = [0.0]
    engine = make_engine(max_num_seqs=1, queue_policy="fair", clock=lambda: now[0])
    engine.add_request("runs", [3], SamplingParams(temperature=0, max_tokens=30))
    engine.step()
    engine.add_request("old", [3], SHORT.with_changes(priority=1))
    engine.step()
    now[0] = 2 * AGING_SECONDS + 1
    engine.add_request("new", [3], SHORT.with_changes(priority=0))
    assert order_of_ends(engine) == ["runs", "old", "new"]


@pytest.mark.parametrize("policy", ["first-come", "fair"])
def test_completions_that_find_no_room_while_others_are_let_in_wait_their_turn(policy: str) -> None:
    """The queue is being walked when they come back to it."""
    engine = make_engine(max_num_seqs=2, num_blocks=6, max_num_batched_tokens=256, queue_policy=policy)
    wide = SamplingParams(n=5, temperature=0, max_tokens=3)
    for i in range(4):
        engine.add_request(str(i), [3 + i] * 20, wide.with_changes(priority=i % 2))
    drain(engine)
    for i in range(4):
        assert [len(completion.token_id) for completion in engine.pop_output(str(i)).outputs] == [3] * 5
    assert_all_free(engine.cache)


# -- prefill and decode -----------------------------------------------------------------------------------------------


def test_a_long_prompt_is_held_to_its_share_while_others_run() -> None:
    model = ScriptedModel()
    engine = make_engine(model, max_num_batched_tokens=128, long_prefill_tokens=32)
    engine.add_request("short", [3], SamplingParams(temperature=0, max_tokens=30))
    engine.step()
    engine.add_request("long", [4] * 200, SHORT)
    engine.step()
    assert model.steps[-1].lengths.tolist() == [1, 32]
    engine.abort("short")
    engine.step()
    assert model.steps[-1].lengths.tolist() == [96]  # alone it takes the budget, up to a block's end
    drain(engine)


def test_decode_steps_come_between_prefills_when_asked_for() -> None:
    model = ScriptedModel()
    engine = make_engine(model, max_num_batched_tokens=64, prefill_interval=3)
    engine.add_request("runs", [3], SamplingParams(temperature=0, max_tokens=60))
    engine.step()
    engine.add_request("long", [4] * 192, SHORT)
    kinds = []
    for _ in range(12):
        engine.step()
        kinds.append(len(model.steps[-1].lengths) > 1)
    assert kinds == [False] * 3 + [True] + [False] * 3 + [True] + [False] * 3 + [True]
    drain(engine)


def test_a_prefill_interval_does_not_hold_up_an_engine_that_decodes_nobody() -> None:
    engine = make_engine(prefill_interval=50)
    engine.add_request("a", [4] * 200, SHORT)
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
    assert steps <= 6


# -- preemption and deadlines -----------------------------------------------------------------------------------------


def test_a_request_is_preempted_so_many_times_at_most() -> None:
    """Two long outputs that do not fit together, and a stream of older ones that take their blocks."""
    engine = make_engine(max_num_seqs=3, num_blocks=4, max_model_len=400, max_num_batched_tokens=256)
    long = SamplingParams(temperature=0, max_tokens=250)
    for name in ("a", "b", "c"):
        engine.add_request(name, [3] * 120, long)
    drain(engine)
    preemptions = [engine.pop_output(name).metrics.preemptions for name in ("a", "b", "c")]
    assert 0 < max(preemptions) <= MAX_PREEMPTIONS
    assert_all_free(engine.cache)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_a_preempted_sequence_comes_back_from_host_memory_without_computing_again(overlap: bool) -> None:
    model = ScriptedModel()
    engine = make_engine(
        model, num_blocks=5, overlap=overlap, offload_bytes=64 * 1024, offload_tokens=1, max_num_batched_tokens=512
    )
    params = SamplingParams(temperature=0, max_tokens=40)
    for i in range(4):
        engine.add_request(str(i), [10 + i] * 110, params)
    drain(engine)
    assert engine.scheduler.num_offloaded > 0 and engine.scheduler.num_recomputed == 0
    rows = sum(int(step.lengths.sum()) for step in model.steps)
    lost = engine.scheduler.num_offloaded + 4  # a row in flight when its sequence was preempted or had ended
    assert 4 * (110 + 39) <= rows <= 4 * (110 + 39) + (lost if overlap else 0)
    assert_all_free(engine.cache)
    engine.core.shutdown()


def test_a_request_that_cannot_begin_in_time_is_dropped_before_it_costs_anything() -> None:
    now = [0.0]

    class Slow(ScriptedModel):
        def forward(self, batch, storage):
            now[0] += float(batch.lengths.sum()) / 10  # ten tokens per second
            return super().forward(batch, storage)

    model = Slow()
    engine = make_engine(model, max_num_seqs=1, clock=lambda: now[0])
    engine.core.loop._runner._clock = lambda: now[0]
    engine.add_request("measured", [3] * 60, SHORT)
    drain(engine)
    engine.add_request("first", [3] * 60, SHORT)
    engine.add_request("hopeless", [4] * 60, SHORT.with_changes(ttft_deadline=8))
    engine.add_request("patient", [5] * 60, SHORT.with_changes(ttft_deadline=1000))
    reasons = {}
    while engine.has_unfinished:
        reasons |= {d.request_id: d.finish_reason for d in engine.step() if d.finish_reason}
    assert reasons == {"first": "length", "hopeless": "deadline", "patient": "length"}
    assert engine.pop_output("hopeless").outputs[0].token_id == []
    assert sum(4 in step.token_ids.tolist() and int(step.lengths.max()) > 1 for step in model.steps) == 0


def test_slow_decoding_does_not_make_an_idle_engine_refuse_prompts() -> None:
    now = [0.0]

    class Clocked(ScriptedModel):
        def forward(self, batch, storage):
            now[0] += 0.05 + int(batch.lengths.sum()) / 1000  # a step costs 50 ms, however small it is
            return super().forward(batch, storage)

    engine = make_engine(Clocked(), clock=lambda: now[0], max_num_batched_tokens=512)
    engine.core.loop._runner._clock = lambda: now[0]
    for name, prompt, most in (("prompt", [3] * 400, 1), ("decode", [3], 60), ("small", [3] * 3, 1)):
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=most))
        drain(engine)
    engine.add_request("again", [4] * 400, SHORT.with_changes(ttft_deadline=0.5))  # takes 0.45 s
    drain(engine)
    assert engine.pop_output("again").outputs[0].finish_reason == "length"


def test_a_cached_prompt_is_not_given_up_for_its_length() -> None:
    now = [0.0]

    class Clocked(ScriptedModel):
        def forward(self, batch, storage):
            now[0] += int(batch.lengths.sum()) / 1000
            return super().forward(batch, storage)

    engine = make_engine(
        Clocked(), clock=lambda: now[0], max_num_batched_tokens=512, prefix_caching="bounded", window_entries=4
    )
    engine.core.loop._runner._clock = lambda: now[0]
    engine.add_request("cold", [3] * 400, SHORT)
    drain(engine)
    engine.add_request("hot", [3] * 400, SHORT.with_changes(ttft_deadline=0.3))  # 0.4 s without the cache
    engine.add_request("cold too", [4] * 400, SHORT.with_changes(ttft_deadline=0.3))
    drain(engine)
    assert engine.pop_output("hot").outputs[0].finish_reason == "length"
    assert engine.pop_output("cold too").outputs[0].finish_reason == "deadline"


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("prefix_caching", {"prefix_caching": "maybe"}), ("kv_format", {"kv_format": "fp3"}),
        ("queue_policy", {"queue_policy": "random"}), ("window_entries", {"window_entries": -1}),
        ("long_prefill_tokens", {"long_prefill_tokens": 0}), ("keep_tokens", {"keep_tokens": 0}),
        ("prefill_interval", {"prefill_interval": 1.5}), ("offload_bytes", {"offload_bytes": -1}),
    ],
)  # fmt: skip
def test_impossible_policies_are_refused(field: str, options: dict) -> None:
    good = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 8}
    with pytest.raises(ValueError, match=f"^{field}: "):
        EngineConfig(**good | options)
