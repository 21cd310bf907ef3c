"""Scheduling changes when tokens come, never which; and whatever happens, every block comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import assert_all_free
from scripted import DEFAULTS, VOCAB, ScriptedModel, drain, make_engine, noise_row, run, tokens

from deepinfer.config import EngineConfig
from deepinfer.engine.errors import EngineStepError, InvalidRequestError
from deepinfer.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [list(range(3, 3 + size)) for size in (5, 1, 40, 17, 60)]
PARAMS = [
    GREEDY,
    SamplingParams(seq_seed=1, max_tokens=9),
    SamplingParams(seq_seed=2, top_p=0.8, max_tokens=14, frequency_penalty=0.3),
    SamplingParams(seq_seed=3, n=3, max_tokens=6, top_k=10),
    SamplingParams(seq_seed=4, max_tokens=10, repetition_penalty=1.2, min_p=0.02),
]


@pytest.fixture(autouse=True, params=["plain", "overlapped", "overlapped with drafts"], scope="module")
def loop(request) -> Iterator[str]:
    """Every test holds under both loops, and with drafts of which four in five are right."""
    DEFAULTS["overlap"] = request.param != "plain"
    DEFAULTS["drafts"] = 5 if "drafts" in request.param else 0
    yield request.param
    DEFAULTS["overlap"], DEFAULTS["drafts"] = False, 0


@pytest.fixture(scope="module")
def alone(loop) -> list[list[list[int]]]:
    """Each request in an engine of its own, whole prompts in one chunk, without drafts."""
    engines = (make_engine(max_num_seqs=3, drafts=0) for _ in PROMPTS)
    return [tokens(run(engine, [p], own))[0] for engine, p, own in zip(engines, PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(("seqs", "batched"), [(1, 1), (1, 64), (2, 2), (3, 7), (8, 64)])
def test_tokens_do_not_depend_on_slots_or_chunk_size(alone, seqs: int, batched: int) -> None:
    engine = make_engine(max_num_seqs=seqs, max_num_batched_tokens=batched)
    assert tokens(run(engine, PROMPTS, PARAMS)) == alone
    assert_all_free(engine.cache)


def test_tokens_do_not_depend_on_submission_order(alone) -> None:
    engine = make_engine(max_num_seqs=3)
    assert tokens(run(engine, PROMPTS[::-1], PARAMS[::-1])) == alone[::-1]


def test_tokens_do_not_depend_on_priority(alone) -> None:
    engine = make_engine(max_num_seqs=1)
    mixed = [own.with_changes(priority=-i) for i, own in enumerate(PARAMS)]
    assert tokens(run(engine, PROMPTS, mixed)) == alone


def test_a_step_stays_within_its_budgets_and_decodes_come_first() -> None:
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=16)
    steps = []

    schedule = engine.scheduler.schedule

    def watched(now):
        plan = schedule(now)
        if plan is not None:
            steps.append((plan, engine.scheduler.table.number[plan.slots[: plan.num_decodes]]))
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    run(engine, PROMPTS, PARAMS)
    for plan, decoding in steps:
        rows = plan.num_tokens - int(plan.draft_caps.sum())
        allowed = int(plan.draft_caps.sum()) if plan.draft_budget is None else plan.draft_budget
        assert 0 < rows <= rows + min(int(plan.draft_caps.sum()), allowed) <= 16
        assert len(plan.slots) <= 3
        assert all(plan.starts[: plan.num_decodes] >= [len(PROMPTS[number]) for number in decoding])
        assert all(plan.lengths[: plan.num_decodes] == 1 + (plan.draft_caps if plan.draft_caps.size else 0))


def test_a_waiting_long_prompt_is_not_overtaken() -> None:
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=8)
    for name, prompt in (("first", [3] * 4), ("long", [4] * 200), ("short", [5])):
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=2))
    finished = []
    while engine.has_unfinished:
        finished += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert finished == ["first", "long", "short"]


# -- when blocks run out ----------------------------------------------------------------------------------------------


def test_preemption_gives_the_same_tokens() -> None:
    """Four sequences of 110 + 40 tokens need 8 blocks; 5 are there."""
    prompts = [[10 + i] * 110 for i in range(4)]
    params = [SamplingParams(seq_seed=i, max_tokens=40, temperature=0 if i == 0 else 1, frequency_penalty=0.1 * i)
              for i in range(4)]  # fmt: skip
    tight, roomy = make_engine(num_blocks=5), make_engine(num_blocks=16)
    assert tokens(run(tight, prompts, params)) == tokens(run(roomy, prompts, params))
    assert tight.scheduler.num_preemptions > 0 and roomy.scheduler.num_preemptions == 0
    assert_all_free(tight.cache)


def test_preempted_prompt_logprobs_are_scored_once() -> None:
    params = SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=1)
    prompts = [[10 + i] * 120 for i in range(3)]
    tight = make_engine(num_blocks=4, max_model_len=400, max_num_batched_tokens=256)
    outputs = run(tight, prompts, params)
    assert tight.scheduler.num_preemptions > 0
    for output, reference in zip(outputs, run(make_engine(), prompts, params), strict=True):
        assert output.prompt_logprobs == reference.prompt_logprobs
        assert len(output.prompt_logprobs or []) == 120


def test_children_that_find_no_room_compute_the_prompt_themselves() -> None:
    params = SamplingParams(seq_seed=5, n=6, max_tokens=20)
    small = run(make_engine(max_num_seqs=2, num_blocks=4), [[3] * 130], params)
    large = run(make_engine(max_num_seqs=6, num_blocks=30), [[3] * 130], params)
    assert tokens(small) == tokens(large)
    assert len({tuple(t) for t in tokens(large)[0]}) == 6


def test_children_share_the_prompt() -> None:
    model = ScriptedModel()
    engine = make_engine(model, max_num_seqs=4, drafts=0)
    engine.add_request("a", [3] * 384, SamplingParams(n=4, max_tokens=3))
    for _ in range(6):
        engine.step()  # 6 x 64 = 384 tokens
    # three full blocks shared by all; the next token opens one for each
    assert engine.cache.num_blocks - engine.cache.num_free_blocks == 3
    drain(engine)
    assert sum(int(step.lengths.sum()) for step in model.steps) == 384 + 4 * 2
    assert_all_free(engine.cache)


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_abort_in_any_state_frees_everything(alone, steps: int) -> None:
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=16)
    for i, (prompt, own) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), prompt, own)
    for _ in range(steps):
        engine.step()
    for victim in ("3", "0"):
        aborted = engine.abort(victim)
        assert aborted is (not engine.abort(victim)) or not aborted  # a second abort does nothing
    drain(engine)
    for i in range(5):
        output = engine.pop_output(str(i))
        for completion, expected in zip(output.outputs, alone[i], strict=True):
            if completion.finish_reason == "abort":
                assert str(i) in ("3", "0") and completion.token_id == expected[: len(completion.token_id)]
            else:
                assert completion.token_id == expected
    assert_all_free(engine.cache)


def test_unknown_or_finished_requests_cannot_be_aborted() -> None:
    engine = make_engine()
    assert not engine.abort("nobody")
    run(engine, [[3]], GREEDY)
    assert not engine.abort("r0")


def test_deadline_ends_running_and_waiting_requests_with_what_they_have(loop) -> None:
    now = [100.0]
    engine = make_engine(max_num_seqs=1, clock=lambda: now[0], drafts=0)
    limited = SamplingParams(temperature=0, max_tokens=50, deadline=10)
    engine.add_request("running", [3], limited)
    engine.add_request("waiting", [3], limited)
    engine.add_request("patient", [3], GREEDY)
    for _ in range(4):
        engine.step()
        now[0] += 1
    now[0] = 110.0
    ended = {delta.request_id: delta.finish_reason for delta in engine.step() if delta.finish_reason}
    assert ended == {"running": "deadline", "waiting": "deadline"}
    drain(engine)
    # the overlapped loop gives a step's tokens one turn later
    assert len(engine.pop_output("running").outputs[0].token_id) == (4 if loop == "plain" else 3)
    assert engine.pop_output("waiting").outputs[0].token_id == []
    assert engine.pop_output("patient").outputs[0].finish_reason == "length"
    assert_all_free(engine.cache)


def test_a_failing_step_frees_everything_and_the_engine_goes_on() -> None:
    class Breaks(ScriptedModel):
        def forward(self, chunks, cache):
            if len(self.steps) == 3:
                self.steps.append([])
                raise MemoryError("no room")
            return super().forward(chunks, cache)

    engine = make_engine(Breaks())
    engine.add_request("a", [3], SamplingParams(n=2, max_tokens=30))
    engine.add_request("b", [3] * 300, GREEDY)
    with pytest.raises(EngineStepError, match="no room") as error:
        drain(engine)
    assert isinstance(error.value.__cause__, MemoryError)
    assert_all_free(engine.cache)
    assert engine.pop_output("a").outputs[0].finish_reason == "abort"
    assert len(tokens(run(engine, [[3]], GREEDY))[0][0]) == 12


def test_times_are_those_of_the_clock(loop) -> None:
    now = [0.0]
    engine = make_engine(max_num_seqs=1, clock=lambda: now[0], drafts=0)
    engine.add_request("a", [3], SamplingParams(temperature=0, max_tokens=3))
    engine.add_request("b", [3], SamplingParams(temperature=0, max_tokens=1))
    while engine.has_unfinished:
        now[0] += 2.0
        engine.step()
    first, second = engine.pop_output("a").metrics, engine.pop_output("b").metrics
    late = 0.0 if loop == "plain" else 2.0  # the overlapped loop gives a step's tokens one turn later
    assert (first.queue, first.ttft, first.tbt) == (2.0, 2.0 + late, 2.0)
    assert (second.queue, second.ttft, second.tbt) == (8.0 + late, 8.0 + 2 * late, None)


# -- the door ---------------------------------------------------------------------------------------------------------

DOOR = [
    ("prompt_token_ids: is empty", [], {}),
    ("prompt_token_ids: entry 1", [3, VOCAB], {}),
    ("prompt_token_ids: entry 0", [-1], {}),
    ("prompt_token_ids: entry 0", [2.5], {}),
    ("prompt_token_ids: entry 0", [True], {}),
    ("prompt_token_ids: entry 0: id 9 means nothing", [9], {}),
    ("prompt: has 512 tokens", [3] * 512, {}),
    ("min_tokens: 20 does not fit", [3] * 500, {"min_tokens": 20}),
    ("stop_token_ids: token ids must be", [3], {"stop_token_ids": [VOCAB]}),
    ("logit_bias: token ids must be", [3], {"logit_bias": {VOCAB: 1.0}}),
    ("logit_bias: forbids every token", [3], {"logit_bias": dict.fromkeys(range(VOCAB), -torch.inf)}),
    ("ignore_eos: conflicts with stop_token_ids", [3], {"ignore_eos": True, "stop_token_ids": [1]}),
    ("logprobs: must be at most", [3], {"logprobs": VOCAB + 1}),
]


@pytest.mark.parametrize(("message", "prompt", "options"), DOOR, ids=[m[:40] for m, _, _ in DOOR])
def test_bad_requests_stop_at_the_door_and_disturb_nobody(message: str, prompt: list, options: dict) -> None:
    engine = make_engine(refused_ids={9: "means nothing"})
    engine.add_request("good", [3], GREEDY)
    engine.step()
    with pytest.raises(InvalidRequestError) as error:
        engine.add_request("bad", prompt, SamplingParams(**options))
    assert str(error.value).startswith(message)
    drain(engine)
    assert len(engine.pop_output("good").outputs[0].token_id) == 12
    assert_all_free(engine.cache)


def test_a_request_id_is_used_once() -> None:
    engine = make_engine()
    engine.add_request("a", [3], GREEDY)
    with pytest.raises(InvalidRequestError, match="request_id: 'a' is already in use"):
        engine.add_request("a", [3], GREEDY)
    drain(engine)


def test_the_context_ends_the_output_exactly() -> None:
    engine = make_engine(max_model_len=20)
    for asked in (None, 100):
        (output,) = run(engine, [[3] * 15], SamplingParams(temperature=0, max_tokens=asked))
        assert (len(output.outputs[0].token_id), output.outputs[0].finish_reason) == (5, "length")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("max_model_len", {"max_model_len": 1}), ("max_num_seqs", {"max_num_seqs": 0}),
        ("max_num_batched_tokens", {"max_num_batched_tokens": 3}), ("num_blocks", {"num_blocks": 1}),
        ("seed", {"seed": -1}),
    ],
)  # fmt: skip
def test_impossible_engine_settings_are_refused(field: str, options: dict) -> None:
    good = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 8}
    with pytest.raises(ValueError, match=f"^{field}: "):
        EngineConfig(**good | options)


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_same_seed_same_tokens_and_other_seeds_differ() -> None:
    engine = make_engine()
    same = tokens(run(engine, [[3]] * 4, SamplingParams(seq_seed=9, max_tokens=20)))
    assert all(completion == same[0] for completion in same)
    other = tokens(run(engine, [[3]] * 2, [SamplingParams(seq_seed=s, max_tokens=20) for s in (10, 2**64 - 1)]))
    assert len({tuple(t[0]) for t in [same[0], *other]}) == 3


def test_requests_without_a_seed_each_get_their_own_and_a_script_repeats() -> None:
    first = tokens(run(make_engine(), [[3]] * 5, SamplingParams(max_tokens=20)))
    assert len({tuple(t[0]) for t in first}) == 5
    assert first == tokens(run(make_engine(), [[3]] * 5, SamplingParams(max_tokens=20)))


# -- anything at all --------------------------------------------------------------------------------------------------

REQUEST = st.tuples(
    st.integers(1, 260),  # prompt length
    st.integers(1, 25),  # max_tokens
    st.sampled_from([1, 1, 1, 2, 5]),  # n
    st.integers(0, 12),  # step of submission
    st.one_of(st.none(), st.none(), st.integers(0, 25)),  # step of abortion
    st.integers(-1, 1),  # priority
)


@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=6),
    seqs=st.integers(1, 4),
    batched=st.integers(4, 300),
    blocks=st.integers(3, 8),
)
def test_any_schedule_with_aborts_ends_with_the_right_tokens_and_all_blocks(requests, seqs, batched, blocks) -> None:
    engine = make_engine(max_model_len=300, max_num_seqs=seqs, max_num_batched_tokens=batched, num_blocks=blocks)
    for step in range(3000):
        for i, (length, most, n, enter, leave, priority) in enumerate(requests):
            if enter == step:
                params = SamplingParams(seq_seed=i, n=n, max_tokens=most, temperature=0.0, priority=priority)
                engine.add_request(str(i), [3 + (i + j) % 50 for j in range(length)], params)
            if leave == step:
                engine.abort(str(i))
        if step > 25 and not engine.has_unfinished:
            break
        engine.step()
        engine.cache.check_integrity()
    assert not engine.has_unfinished
    assert_all_free(engine.cache)
    for i, (length, most, _, enter, leave, _) in enumerate(requests):
        expected, token = [], 3 + (i + length - 1) % 50
        for position in range(length - 1, length - 1 + most):
            token = int(noise_row(token, position).argmax())
            expected.append(token)
        for completion in engine.pop_output(str(i)).outputs:
            assert completion.token_id == expected[: len(completion.token_id)]
            if leave is None or leave < enter:
                assert completion.finish_reason == "length" and completion.token_id == expected
