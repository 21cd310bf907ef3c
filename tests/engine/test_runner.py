"""The device's side of a step, driven by plans written by hand: it computes the tokens that a slot holds, whoever held
it before, and one bad row or step stays one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plans import GREEDY, MAX_LEN, SLOTS, Chunk, Host, alone, greedy_tokens
from scripted import EOS, VOCAB, ScriptedModel, noise_row
from torch import Tensor

from deepinfer.cache.storage import CacheStorage
from deepinfer.engine.device_thread import DeviceThread, StepNotRunError
from deepinfer.engine.plan import Admission, Fork, PromptScore, StepResult
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model.batch import Batch

PENALISED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, temperature=0.8)


# -- tokens by slot and position --------------------------------------------------------------------------------------


def test_rows_of_a_mixed_step_are_the_tokens_that_their_sequences_hold() -> None:
    rng = np.random.default_rng(0)
    long, short = rng.integers(2, VOCAB, 300).tolist(), [7, 8, 9]
    host = Host()
    a = host.admit(short)
    assert host.run(Chunk(a, 0, 3)) == greedy_tokens(short, 1)
    assert host.last == short
    b = host.admit(long)
    said = greedy_tokens(short, 20)
    position, computed = 3, 0
    for size in (1, 7, 128, 2, 162):
        computed += size
        last = computed == len(long)
        drawn = host.run(Chunk(a, position), Chunk(b, computed - size, size, int(last)))
        assert host.last == [said[position - 3], *long[computed - size : computed]]
        position += 1
        assert drawn == [said[position - 3]] + greedy_tokens(long, 1) * last
    for i, expected in enumerate(greedy_tokens(long, 5)[1:]):
        assert host.run(Chunk(b, 300 + i), Chunk(a, position + i)) == [expected, said[position - 2 + i]]


def test_a_plan_may_be_made_before_the_tokens_it_starts_from_are_drawn() -> None:
    """Two plans in flight on the device's thread; the tokens are those of one step at a time."""
    prompts = [[5, 6], [9], [11, 12, 13]]
    host = Host()
    slots = [host.admit(prompt, SamplingParams(), seed=i) for i, prompt in enumerate(prompts)]
    plans = [host.plan(*(Chunk(slot, 0, len(prompt)) for slot, prompt in zip(slots, prompts, strict=True)))]
    for i in range(30):
        plans.append(host.plan(*(Chunk(s, len(p) + i) for s, p in zip(slots, prompts, strict=True))))
    device = DeviceThread(host.runner)
    results: list[StepResult] = []
    for plan in plans:
        device.submit(plan)
        if device.in_flight == 2:
            results.append(device.result())
    results.append(device.result())
    device.close()
    assert all(result.error is None for result in results)
    for column, (i, prompt) in zip(
        np.stack([result.token_ids for result in results]).T, enumerate(prompts), strict=True
    ):
        assert column.tolist() == alone(prompt, SamplingParams(), i, 31)


def test_a_sequence_goes_on_after_a_preemption_as_if_nothing_had_been() -> None:
    """Penalties count prompt and output also when both come back through an admission; the slot it left is taken over
    by another sequence with penalties, which must not see its history, nor it that one's."""
    prompt, other = [5, 6, 7], [40, 41]
    expected, expected_other = alone(prompt, PENALISED, 3, 30), alone(other, PENALISED, 4, 20)
    host = Host()
    first = host.admit(prompt, PENALISED, 3)
    said = host.run(Chunk(first, 0, 3)) + host.generate(first, 3, 11)
    host.manager.close(first)
    second = host.admit(other, PENALISED, 4)
    assert second == first
    other_said = host.run(Chunk(second, 0, 2)) + host.generate(second, 2, 9)
    again = host.admit(prompt, PENALISED, 3, output=said)
    known = len(prompt) + len(said)
    assert host.run(Chunk(again, 0, 10, 0), Chunk(second, 11)) == [expected_other[10]]
    said += host.run(Chunk(again, 10, known - 10))
    assert host.last == [*prompt, *said[:-1]][10:]
    said += host.generate(again, known, 17)
    assert said == expected
    assert other_said == expected_other[:10]


def test_the_least_length_counts_output_and_not_what_was_admitted_again() -> None:
    """The end token is the likeliest everywhere, and min_tokens = 6 holds it back six times, preempted or not."""

    def eager(token: int, position: int) -> Tensor:
        row = noise_row(token, position)
        row[EOS] = 100
        return row

    params = SamplingParams(temperature=0, min_tokens=6)
    host = Host(ScriptedModel(eager))
    slot = host.admit([3, 4], params)
    said = host.run(Chunk(slot, 0, 2)) + host.generate(slot, 2, 2)
    host.manager.close(slot)
    slot = host.admit([3, 4], params, output=said)
    said += host.run(Chunk(slot, 0, 5)) + host.generate(slot, 5, 3)
    assert EOS not in said[:6] and said[6] == EOS


@pytest.mark.parametrize("params", [SamplingParams(), PENALISED, SamplingParams(top_p=0.9, min_tokens=3)])
@pytest.mark.parametrize("size", [5, 130])
def test_forks_say_what_lone_sequences_with_their_seeds_say(params: SamplingParams, size: int) -> None:
    prompt = np.random.default_rng(size).integers(2, VOCAB, size).tolist()
    host = Host()
    slot = host.admit(prompt, params, 11)
    host.run(Chunk(slot, 0, size - 2, 0))
    children = [host.manager.fork(slot, size) for _ in range(2)]
    forks = [Fork(slot, child, 12 + i, edits) for i, (child, edits) in enumerate(children)]
    family = [slot, *(fork.child for fork in forks)]
    said = [host.run(Chunk(slot, size - 2, 2), forks=forks)]
    for child in family[1:]:
        host.manager.reserve(child, 400)
        assert host.runner.tokens[child, :size].tolist() == prompt
    for i in range(15):
        said.append(host.run(*(Chunk(member, size + i) for member in family)))
    for i, tokens in enumerate(zip(*said, strict=True)):
        assert list(tokens) == alone(prompt, params, 11 + i, 16)


def test_a_token_drawn_from_a_row_inside_a_chunk_takes_the_place_after_that_row() -> None:
    prompt = [5, 9, 30, 31]
    host = Host()
    other, slot = host.admit([4]), host.admit(prompt)
    plan = host.plan(Chunk(other, 0), Chunk(slot, 0, 4, 3))
    plan.draw_rows = np.array([0, 2])  # rows 1, 2 and 3 are those of positions 1, 2 and 3
    result = host.runner.run(plan)
    assert result.token_ids.tolist() == [noise_row(4, 0).argmax(), noise_row(30, 2).argmax()]
    assert host.runner.tokens[slot, :4].tolist() == [5, 9, 30, result.token_ids[1]]


def test_prompt_tokens_are_scored_by_the_rows_before_them() -> None:
    prompt = [5, 9, 30, 31, 32, 8]
    host = Host()
    other, slot = host.admit([4]), host.admit(prompt)
    score = PromptScore(None, 1, np.array(prompt[1:4], np.int64), 2)  # type: ignore[arg-type]  # whose: host only
    plan = host.plan(Chunk(other, 0), Chunk(slot, 0, 4, 3), scores=[score])
    (entries,) = host.runner.run(plan).scores
    for i, entry in enumerate(entries):
        truth = torch.log_softmax(noise_row(prompt[i + 1], i + 1), -1)
        assert list(entry)[:2] == truth.topk(2).indices.tolist()
        assert entry[prompt[i + 1]] == pytest.approx(truth[prompt[i + 1]].item(), abs=1e-5)


def test_the_most_likely_tokens_are_listed_for_those_who_asked() -> None:
    host = Host()
    plain, curious = host.admit([4]), host.admit([5], SamplingParams(temperature=0, logprobs=3))
    result = host.runner.run(host.plan(Chunk(plain, 0), Chunk(curious, 0)))
    truth = torch.log_softmax(torch.stack([noise_row(4, 0), noise_row(5, 0)]), -1)
    assert result.logprobs == pytest.approx(truth.max(-1).values.numpy(), abs=1e-5)
    assert result.top is not None and result.top[0] is None
    assert list(result.top[1] or {}) == truth[1].topk(3).indices.tolist()
    assert host.runner.run(host.plan(Chunk(plain, 1))).top is None


# -- what goes wrong --------------------------------------------------------------------------------------------------


class Damaged(ScriptedModel):
    """NaN for one token id, and an exception for another."""

    def forward(self, batch: Batch, storage: CacheStorage) -> Tensor:
        if 63 in batch.token_ids.tolist():
            raise FloatingPointError("the device is gone")
        logits = super().forward(batch, storage)
        logits[batch.token_ids[batch.logit_rows] == 62, 5] = torch.nan
        return logits


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_k=9), SamplingParams(), PENALISED])
def test_a_row_of_nan_is_flagged_and_touches_no_other(params: SamplingParams) -> None:
    bad, good = Host(Damaged()), Host()
    a, broken, b = (bad.admit([first], params) for first in (10, 62, 11))
    result = bad.runner.run(bad.plan(Chunk(a, 0), Chunk(broken, 0), Chunk(b, 0)))
    assert result.valid.tolist() == [True, False, True]
    expected = good.run(Chunk(good.admit([10], params), 0), Chunk(good.admit([11], params), 0))
    assert result.token_ids[result.valid].tolist() == expected
    # The step after it may be planned before anybody knows, and has to find a token of the vocabulary.
    following = bad.runner.run(bad.plan(Chunk(a, 1), Chunk(broken, 1), Chunk(b, 1)))
    assert following.token_ids[[0, 2]].tolist() == good.run(Chunk(0, 1), Chunk(1, 1))


def test_an_error_of_a_step_comes_back_and_the_next_sequences_run_as_ever() -> None:
    host = Host(Damaged())
    device = DeviceThread(host.runner)
    bystander, broken = host.admit([10, 11]), host.admit([63])
    device.submit(host.plan(Chunk(bystander, 0, 2), Chunk(broken, 0)))
    device.submit(host.plan(Chunk(bystander, 2)))
    first, second = device.result(), device.result()
    assert isinstance(first.error, FloatingPointError) and first.device_seconds > 0
    assert isinstance(second.error, StepNotRunError)
    for slot in (bystander, broken):
        host.manager.close(slot)
    device.reset()
    slot = host.admit([10, 11])
    device.submit(host.plan(Chunk(slot, 0, 2)))
    device.submit(host.plan(Chunk(slot, 2)))
    said = [int(device.result().token_ids[0]) for _ in range(2)]
    assert said == greedy_tokens([10, 11], 2)
    device.close()


def test_a_guarded_run_hands_an_exception_over() -> None:
    host = Host(Damaged())
    result = host.runner.run_guarded(host.plan(Chunk(host.admit([63]), 0)))
    assert isinstance(result.error, FloatingPointError)
    with pytest.raises(FloatingPointError):
        host.runner.run(host.plan(Chunk(host.admit([63]), 0)))


def test_a_plan_beyond_the_table_is_refused_before_it_writes_into_a_neighbour() -> None:
    host = Host()
    slot = host.admit([4, 5])
    host.run(Chunk(slot, 0, 2))
    before = host.runner.tokens.clone()
    for chunk in (Chunk(slot, MAX_LEN - 1), Chunk(slot, 2, MAX_LEN - 1, 0)):  # its draw; its last token
        with pytest.raises(ValueError, match="max_model_len = 600"):
            host.runner.run(host.plan(chunk))
    for beyond in (-1, SLOTS):
        with pytest.raises(ValueError, match="slot outside"):
            host.runner.run(host.plan(Chunk(beyond, 0)))
    host.admissions.append(Admission(slot, np.zeros(MAX_LEN + 1, np.int32), 1, GREEDY, 1))
    with pytest.raises(ValueError, match="max_model_len = 600"):
        host.runner.run(host.plan(Chunk(slot, 2)))
    assert torch.equal(host.runner.tokens, before)
    assert host.run(Chunk(slot, 2)) == greedy_tokens([4, 5], 2)[1:]


def test_a_plan_without_chunks_carries_out_its_edits() -> None:
    host = Host()
    slot = host.admit([4, 5])
    result = host.runner.run(host.plan())
    assert result.error is None and result.token_ids.size == 0
    assert host.run(Chunk(slot, 0, 2)) == greedy_tokens([4, 5], 1)
