"""Every chunk size and every place where a cached prefix may end: the tokens are those of a cold run in one piece."""

from __future__ import annotations

from pathlib import Path

import pytest
from integrity import assert_all_free
from real_engine import cold, complete, finish, make_real_engine, text

from deepinfer.config import BLOCK_SIZE, VERIFY_ROWS
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model import load_model

WINDOW, LAYERS = 16, 8  # of the tiny preset
MARGIN = WINDOW + VERIFY_ROWS  # a hit ends so many tokens below the prompt's end at least
CONE = LAYERS * (WINDOW - 1)  # tokens that an exact replay computes again
OUT = 6
GREEDY = SamplingParams(temperature=0, max_tokens=OUT)
SOME_SIZES = (1, 2, 3, 7, 15, 16, 17, 31, 64, 127, 128, 129, 255, 256, 257, 300)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path):
    model = load_model(tiny_checkpoint)
    assert (model.config.sliding_window, model.config.num_hidden_layers) == (WINDOW, LAYERS)
    return model


def check_chunk_size(model, size: int) -> None:
    prompt = text(0, 310)
    engine = make_real_engine(model, max_num_batched_tokens=size, max_num_seqs=1)
    expected = cold(model, prompt, GREEDY)
    assert complete(engine, [prompt], GREEDY)[0] == expected, f"chunks of {size}"
    assert complete(engine, [prompt], GREEDY)[0] == expected, f"chunks of {size}, hot"


@pytest.mark.parametrize("size", SOME_SIZES)
def test_chunk_size_does_not_change_tokens(model, size: int) -> None:
    check_chunk_size(model, size)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 301, 20))
def test_no_chunk_size_changes_tokens(model, first: int) -> None:
    for size in range(first, first + 20):
        check_chunk_size(model, size)


EDGES = sorted({
    1, 127, 128, 129, 133, 134, 255, 256, 257, 261, 262, 383, 384, 385,
    *(k * BLOCK_SIZE + MARGIN + d for k in (1, 2, 3) for d in (-1, 0, 1)),
})  # fmt: skip


@pytest.mark.parametrize("windows", [0, 8], ids=["replayed", "windows kept"])
@pytest.mark.parametrize("length", EDGES)
def test_a_hot_prompt_gives_the_tokens_of_a_cold_one_and_hits_what_it_may(model, length: int, windows: int) -> None:
    prompt = text(1)[:length]
    engine = make_real_engine(model, window_entries=windows)
    expected = cold(model, prompt, GREEDY)
    for _ in range(2):
        engine.add_request("p", list(prompt), GREEDY)
        finish(engine)
        output = engine.pop_output("p")
        assert output.outputs[0].token_id == expected[0]
    hit = max(0, length - MARGIN) // BLOCK_SIZE * BLOCK_SIZE
    kept = (length + OUT - 1) // BLOCK_SIZE * BLOCK_SIZE  # where the first run left its window
    full = hit if windows and kept == hit else max(0, hit - CONE)
    assert output.cached_tokens == full
    assert output.metrics.replay_tokens == (hit - full if full else 0)
    assert_all_free(engine.cache)


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_the_window_of_a_prefix_is_computed_again_once(model, mode: str) -> None:
    """The first prompt that hits a boundary without a window leaves one there for the next."""
    engine = make_real_engine(model, prefix_caching=mode)
    replays = []
    for seed in range(3):
        engine.add_request("p", [*text(2)[:260], *text(20 + seed)[:200]], GREEDY)
        finish(engine)
        replays.append(engine.pop_output("p").metrics.replay_tokens)
    replay = CONE if mode == "exact" else WINDOW
    assert replays == [0, replay, 0]


@pytest.mark.parametrize("common, expected", [(260, 256), (128, 128), (100, 0)])
def test_a_short_system_prompt_is_computed_twice_and_then_hit(model, common: int, expected: int) -> None:
    """Shorter than an exact replay, or hardly longer, so that a hit without a window would spare next to nothing."""
    engine = make_real_engine(model)
    cached = []
    for seed in range(4):
        prompt = [*text(7)[:common], *text(60 + seed)[:150]]
        engine.add_request("p", prompt, GREEDY)
        finish(engine)
        output = engine.pop_output("p")
        assert output.outputs[0].token_id == cold(model, prompt, GREEDY)[0]
        cached.append(output.cached_tokens)
    assert cached[2:] == [expected, expected]
    assert_all_free(engine.cache)


@pytest.mark.parametrize("length", [150, 300, 400])
def test_a_prompt_that_is_repeated_hits_as_far_as_it_may_from_the_third_time_on(model, length: int) -> None:
    engine = make_real_engine(model, max_num_batched_tokens=512)
    outputs = []
    for _ in range(4):
        engine.add_request("p", list(text(9)[:length]), GREEDY)
        finish(engine)
        outputs.append(engine.pop_output("p"))
    assert [output.outputs[0].token_id for output in outputs] == [outputs[0].outputs[0].token_id] * 4
    longest = (length - MARGIN) // BLOCK_SIZE * BLOCK_SIZE
    assert [output.cached_tokens for output in outputs[2:]] == [longest] * 2
    assert [output.metrics.replay_tokens for output in outputs[2:]] == [0, 0]


@pytest.mark.parametrize("drafts", [0, 5])
def test_a_conversation_hits_its_whole_past_with_the_answers(model, drafts: int) -> None:
    engine = make_real_engine(model, max_num_batched_tokens=512, drafts=drafts)
    turn = list(text(3)[:200])
    params = SamplingParams(temperature=0, max_tokens=150)
    expected = cold(model, turn, params)[0]
    engine.add_request("first", turn, params)
    finish(engine)
    first = engine.pop_output("first").outputs[0]
    answer = first.token_id
    assert answer == expected
    assert not drafts or sum(first.accept_tok) > 60  # drafts were kept on both sides of the boundaries that are hit
    follow = [*turn, *answer, *text(4)[:60]]
    engine.add_request("second", follow, GREEDY)
    finish(engine)
    second = engine.pop_output("second")
    assert second.outputs[0].token_id == cold(model, follow, GREEDY)[0]
    # 349 tokens have state: two full blocks, whose window was left at the end
    assert (second.cached_tokens, second.metrics.replay_tokens) == (256, 0)


def test_requests_that_arrive_together_compute_their_common_prefix_once(model) -> None:
    engine = make_real_engine(model, max_num_seqs=8, num_blocks=40, max_num_batched_tokens=128)
    prompts = [[*text(5)[:300], *text(30 + i)[:30]] for i in range(6)]
    outputs = complete(engine, prompts, GREEDY)
    assert outputs == [cold(model, prompt, GREEDY) for prompt in prompts]
    totals = engine.core.stats().totals
    assert totals.prefill_tokens == 330 + 5 * (330 - 256) and totals.replay_tokens == 0
    assert_all_free(engine.cache)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_short_prompts_that_fit_into_one_step_share_their_beginning_too(model, overlap: bool) -> None:
    engine = make_real_engine(model, max_num_seqs=8, num_blocks=40, max_num_batched_tokens=2048, overlap=overlap)
    prompts = [[*text(8)[:300], *text(40 + i)[:30]] for i in range(4)]
    assert complete(engine, prompts, GREEDY) == [cold(model, prompt, GREEDY) for prompt in prompts]
    totals = engine.core.stats().totals
    assert totals.prefill_tokens == 330 + 3 * (330 - 256) and totals.replay_tokens == 0
    assert_all_free(engine.cache)
    engine.core.shutdown()


def test_another_salt_hits_nothing(model) -> None:
    engine = make_real_engine(model)
    cached = []
    for salt in ("a", "a", "b"):
        engine.add_request("p", list(text(6)[:300]), GREEDY, salt=salt)
        finish(engine)
        cached.append(engine.pop_output("p").cached_tokens)
    assert cached[0] == cached[2] == 0 < cached[1]


def test_prompt_logprobs_are_those_of_a_full_run_although_the_prompt_is_cached(model) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    engine = make_real_engine(model, truncation=True, keep_tokens=28)
    scores = []
    for own in (params, GREEDY, params):
        engine.add_request("p", list(text(7)[:300]), own)
        finish(engine)
        scores.append(engine.pop_output("p"))
    assert scores[0].prompt_logprobs == scores[2].prompt_logprobs
    assert scores[2].cached_tokens == 0 and len(scores[2].prompt_logprobs) == 300


@pytest.mark.parametrize("drafts", [0, 5])
def test_memory_for_windows_does_not_grow_with_the_output(model, drafts: int) -> None:
    engine = make_real_engine(model, max_num_seqs=2, num_blocks=12, drafts=drafts)
    windows = engine.core.loop._runner.storage.windows

    def bytes_of_windows() -> int:
        return windows.pool.numel() * windows.pool.element_size()

    engine.add_request("p", [5], SamplingParams(temperature=0, max_tokens=400))
    for _ in range(3):
        engine.step()  # one with as many rows as any
    before = bytes_of_windows()
    used = []
    while engine.has_unfinished:
        engine.step()
        used.append(engine.cache.max_num_seqs - engine.cache.num_free_slots)
    assert bytes_of_windows() == before and max(used) == 1
