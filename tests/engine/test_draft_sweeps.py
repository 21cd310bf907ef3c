"""Drafts never change tokens: in every mode of the engine, what comes out is what a lone cold run without them gives.

The drafts come from earlier runs, right four times in five, so rounds end everywhere: in the middle of compressor
pairs, at block boundaries, where windows wrap.
"""

from __future__ import annotations

import pytest
from engines import MakeDrafter
from integrity import assert_all_free
from real_engine import cold, finish, guess_from_cold_runs, make_real_engine, text

from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model import load_model
from deepinfer.model.presets import preset
from deepinfer.model.random_checkpoint import write_random_checkpoint
from deepinfer.speculation.propose import DraftModelDrafter

GREEDY = SamplingParams(temperature=0, max_tokens=40)
WORK = [
    (text(0)[:310], GREEDY),
    (text(1)[:130], SamplingParams(seq_seed=1, max_tokens=60)),
    (text(0)[:290] + text(5)[:20], GREEDY),  # hits what the first one left
    (text(2)[:5], SamplingParams(seq_seed=3, n=2, temperature=0.8, max_tokens=70)),
    (
        text(3)[:250],
        SamplingParams(
            seq_seed=4,
            max_tokens=30,
            top_p=0.9,
            min_tokens=12,
            stop_token_ids=[7],
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            logit_bias={9: 3.0, 8: -5.0},
            logprobs=1,
        ),
    ),
    (text(4)[:40], SamplingParams(temperature=0, max_tokens=45, presence_penalty=0.7)),
    (text(6)[:127], SamplingParams(seq_seed=5, top_k=5, temperature=0.5, max_tokens=25)),
]
MODES = {
    "plenty": {},
    "small chunks": {"max_num_batched_tokens": 17},
    "large chunks": {"max_num_batched_tokens": 1024, "max_num_seqs": 8, "num_blocks": 40},
    "no prefix cache": {"prefix_caching": "off"},
    "windows replayed": {"window_entries": 0},
    "truncated": {"truncation": True, "keep_tokens": 28},
    "computed again": {"num_blocks": 7, "max_num_seqs": 3},
    "offloaded": {"num_blocks": 7, "max_num_seqs": 3, "offload_bytes": 12_000, "offload_tokens": 20},
    "fair, prefills apart": {"queue_policy": "fair", "long_prefill_tokens": 64, "prefill_interval": 3},
}
LOOPS = {
    "plain, fixed": {},
    "overlapped, varlen": {"overlap": True, "varlen": True},
    "plain, varlen": {"varlen": True},
    "overlapped, fixed": {"overlap": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("drafting") / "checkpoint"
    write_random_checkpoint(directory, preset("tiny", drafts=True))
    return load_model(directory, drafts=True)


def check(model, options: dict, drafter: MakeDrafter | None = None, turns: int = 2) -> list[RequestOutput]:
    """Runs everything, again with a warm cache -> the last outputs."""
    approximate = {name: options[name] for name in ("truncation", "keep_tokens") if name in options}
    expected = [cold(model, prompt, params, **approximate) for prompt, params in WORK]
    engine = make_real_engine(model, drafter=drafter, **options)
    outputs = []
    for turn in range(turns):
        for i, (prompt, params) in enumerate(WORK):
            engine.add_request(f"{turn}-{i}", list(prompt), params)
            engine.step()
        finish(engine)
        outputs = [engine.pop_output(f"{turn}-{i}") for i in range(len(WORK))]
        for output, tokens in zip(outputs, expected, strict=True):
            assert [completion.token_id for completion in output.outputs] == tokens
    assert_all_free(engine.cache)
    engine.core.shutdown()
    return outputs


def pairs() -> list:
    """Every mode with every loop in the slow test, with two of them, and another number of drafts, in every run."""
    cases = []
    for i, (mode, options) in enumerate(MODES.items()):
        for j, (loop, more) in enumerate(LOOPS.items()):
            marks = [] if j == i % 2 else [pytest.mark.slow]
            drafts = (5, 3, 1, 2)[(i + j) % 4]
            cases.append(pytest.param(options | more | {"drafts": drafts}, id=f"{mode}, {loop}", marks=marks))
    return cases


@pytest.mark.parametrize("options", pairs())
def test_tokens_with_drafts_are_those_without(model, options: dict) -> None:
    for output in check(model, options):
        for completion in output.outputs:
            assert 0 < sum(completion.accept_tok) <= sum(completion.draft_tok)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_drafts_that_are_always_right_are_all_accepted(model, overlap: bool) -> None:
    for prompt, params in ((text(7)[:120], GREEDY), (text(8)[:125], SamplingParams(seq_seed=9, max_tokens=40))):
        cold(model, prompt, params)
        engine = make_real_engine(model, drafts=5, overlap=overlap, drafter=guess_from_cold_runs(1.0))
        engine.add_request("p", list(prompt), params)
        finish(engine)
        output = engine.pop_output("p").outputs[0]
        assert output.token_id == cold(model, prompt, params)[0]
        assert output.accept_tok == output.draft_tok
        # One token of the prompt's last row, six a step, and what is left.
        assert output.draft_tok == [5] * 6 + [2]
        engine.core.shutdown()


@pytest.mark.parametrize("options", [{"drafts": 5}, {"drafts": 2, "overlap": True, "varlen": True}], ids=["5", "2"])
def test_the_real_draft_layers_change_no_token(model, options: dict) -> None:
    """Random weights: their drafts are nearly always wrong, but their windows go through everything."""
    tight = {"num_blocks": 9, "max_num_seqs": 3, "offload_bytes": 12_000, "offload_tokens": 60}
    outputs = check(
        model,
        tight | options,
        drafter=lambda storage, k: DraftModelDrafter(model.draft, storage, k),
        turns=1,
    )
    assert any(output.cached_tokens for output in outputs)
