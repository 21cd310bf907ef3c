"""Drafting behind the public interface: faster where drafts are right, and never other tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from integrity import assert_all_free

from deepinfer import LLM, SamplingParams
from deepinfer.engine import build
from deepinfer.engine.arguments import EngineArguments
from deepinfer.engine.model_core import ModelCore
from deepinfer.engine.settings import resolve_settings
from deepinfer.kernels import select
from deepinfer.model import load_model
from deepinfer.speculation.budget import CostCurve, StepCosts

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[0, *range(3, 60)], [0, 40, 41], [0, *range(200, 219)], [0, *([77, 78] * 70)]]
PARAMS = [
    GREEDY,
    SamplingParams(seq_seed=1, max_tokens=12, top_p=0.9),
    SamplingParams(seq_seed=2, max_tokens=12, n=2, frequency_penalty=0.5),
    SamplingParams(seq_seed=3, max_tokens=12, top_k=20, min_p=0.01),
]
SIZES = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128}
KERNELS = select.cpu_twins(torch.device("cpu"), torch.float32)
LONG = [0, *(3 + i * 7 % 400 for i in range(420))]  # three full blocks and a rest


@pytest.fixture(scope="module")
def plain(draft_checkpoint: Path) -> LLM:
    return LLM(draft_checkpoint, nextn=0, verbose=False, **SIZES)


@pytest.fixture(scope="module")
def drafting(draft_checkpoint: Path) -> LLM:
    return LLM(draft_checkpoint, mtp_varlen=False, verbose=False, **SIZES)


def ask(llm: LLM, prompts, params):
    return llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)


def said(outputs) -> list:
    """Tokens and their probabilities, to the bit."""
    return [(c.token_id, c.token_logprobs) for output in outputs for c in output.outputs]


def drafted(outputs) -> int:
    return sum(sum(c.draft_tok) for output in outputs for c in output.outputs)


# -- speed never changes tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"nextn": 1, "mtp_varlen": False},
        {"nextn": 5, "mtp_varlen": False, "overlap": True},
        {"mtp_varlen": True},
        {"mtp_varlen": True, "overlap": True, "max_num_batched_tokens": 16},
        {"nextn": 3, "mtp_varlen": False, "max_num_seqs": 3, "num_blocks": 4},
        {"batch_invariant": True, "seed": None} if KERNELS else {},
    ],
    ids=lambda options: ", ".join(map(str, options.items())),
)
def test_drafts_change_no_token_and_no_probability_of_a_request_with_a_seed(
    draft_checkpoint: Path, plain: LLM, options
) -> None:
    llm = LLM(draft_checkpoint, verbose=False, **{**SIZES, **options})
    outputs = ask(llm, PROMPTS, PARAMS)
    assert said(outputs) == said(ask(plain, PROMPTS, PARAMS))
    assert drafted(outputs) > 0 or llm.engine_config.varlen  # which may find that they do not pay
    assert_all_free(llm.engine.cache)


def test_a_request_gives_the_same_bits_alone_and_in_any_company(plain: LLM, drafting: LLM) -> None:
    together = ask(drafting, PROMPTS, PARAMS)
    backwards = ask(drafting, PROMPTS[::-1], PARAMS[::-1])
    assert said(backwards[::-1]) == said(together)
    for prompt, params, output in zip(PROMPTS, PARAMS, together, strict=True):
        assert said(ask(drafting, [prompt], params)) == said([output])


@pytest.mark.skipif(not KERNELS, reason="without a C++ compiler nothing is batch invariant")
def test_a_batch_invariant_request_gives_the_same_bits_alone_and_among_31_others_however_they_are_run(
    draft_checkpoint: Path,
) -> None:
    """In another place of the batch, with other chunks, the other loop, drafts of other numbers, and none at all."""
    rest = [[0, *(3 + (i * 11 + j * 5) % 380 for j in range(2 + i * 7 % 90))] for i in range(31)]
    others = [SamplingParams(seq_seed=100 + i, max_tokens=4 + i % 9, temperature=i % 3 / 2) for i in range(31)]
    needles = [SamplingParams(seq_seed=9, max_tokens=12, top_p=0.95, logprobs=3, prompt_logprobs=1), GREEDY]
    answers: list[list] = [[] for _ in needles]
    for place, options in (
        (None, {"mtp_varlen": False, "max_num_batched_tokens": 128}),
        (0, {"mtp_varlen": True, "max_num_batched_tokens": 48, "overlap": True}),
        (17, {"mtp_varlen": False, "nextn": 2, "max_num_batched_tokens": 256}),
        (31, {"nextn": 0, "max_num_batched_tokens": 64, "num_blocks": 10}),  # and ten at a time
    ):
        llm = LLM(
            draft_checkpoint, max_model_len=256, max_num_seqs=32, batch_invariant=True, seed=None, verbose=False,
            **options,  # type: ignore[arg-type]
        )  # fmt: skip
        for needle, found in zip(needles, answers, strict=True):
            prompts, params, at = [PROMPTS[0]], [needle], place or 0
            if place is not None:
                prompts, params = [*rest[:at], *prompts, *rest[at:]], [*others[:at], *params, *others[at:]]
            output = ask(llm, prompts, params)[at]
            found.append((said([output]), output.outputs[0].logprobs, output.prompt_logprobs))
    for found in answers:
        assert found == found[:1] * 4


def test_a_cached_prefix_is_hit_and_drafts_are_verified_behind_it(plain: LLM, drafting: LLM) -> None:
    expected = said(ask(plain, [LONG], GREEDY))
    (cold,), (hot,) = ask(drafting, [LONG], GREEDY), ask(drafting, [LONG], GREEDY)
    assert said([cold]) == said([hot]) == expected
    assert (cold.cached_tokens, hot.cached_tokens) == (0, 384)
    assert drafted([hot]) == drafted([cold]) > 0
    assert torch.equal(drafting.logits(LONG), plain.logits(LONG))


@pytest.mark.skipif(not KERNELS, reason="without a C++ compiler nothing is batch invariant")
def test_a_truncated_prompt_keeps_the_same_rows_hot_and_cold(draft_checkpoint: Path) -> None:
    """Around the length where the cached blocks begin to reach into the 28 rows that are kept; windows of 16."""
    llm = LLM(
        draft_checkpoint, max_model_len=512, max_num_seqs=2, max_num_batched_tokens=128, batch_invariant=True,
        yoco_truncation="compact", yoco_keep_tokens=28, mtp_varlen=False, verbose=False,
    )  # fmt: skip
    for length in (256 + 22, 256 + 27, 256 + 28, 256 + 29, 421):
        runs = [
            llm.generate(prompt_token_ids=[LONG[:length]], sampling_params=GREEDY, use_tqdm=False, salt=salt)
            for salt in (f"only this {length}", "shared", "shared")
        ]
        assert said(runs[0]) == said(runs[1]) == said(runs[2])
        cached = [run[0].cached_tokens + run[0].metrics.replay_tokens for run in runs]
        assert cached[0] == 0 and cached[2] == (length - 28) // 128 * 128


def test_without_a_seed_drafts_are_accepted_by_rejection_sampling(draft_checkpoint: Path, plain: LLM) -> None:
    llm = LLM(draft_checkpoint, seed=None, mtp_varlen=False, verbose=False, **SIZES)
    assert said(ask(llm, PROMPTS, PARAMS)) == said(ask(plain, PROMPTS, PARAMS))  # their seeds were given
    outputs = ask(llm, PROMPTS[:2], SamplingParams(max_tokens=20, ignore_eos=True))
    assert drafted(outputs) > 0 and all(len(o.outputs[0].token_id) == 20 for o in outputs)


# -- what is in force, and what is said of it --------------------------------------------------------------------------


def test_an_engine_process_drafts_as_it_is_told(draft_checkpoint: Path, capsys) -> None:
    startup = SimpleNamespace(progress=lambda *_: None, on_event=None, log_every=0)
    core = ModelCore.of(draft_checkpoint, nextn=2, verbose=True, **SIZES)(startup)  # type: ignore[arg-type]
    assert (core.config.drafts, core.config.varlen) == (2, True)
    assert core.scheduler.planner is not None
    shown = capsys.readouterr().err
    assert "drafting: up to 2 tokens per step, by 3 draft stages in blocks of 5" in shown
    assert "verified: 0 to 2 drafts a sequence, by confidence and the measured cost" in shown
    assert "measured: 1 row " in shown and "24 rows " in shown and "8 sequences" in shown
    assert "confidence: as the head gives it, there is no dspark_calibration.json" in shown
    assert "acceptance: for every request, drafts change no token" in shown


def test_steps_that_cost_the_same_at_every_size_leave_nothing_to_choose_and_that_is_printed(
    draft_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    flat = StepCosts(verify=CostCurve({1: 0.01, 48: 0.01}), draft=CostCurve({1: 0.001}))
    monkeypatch.setattr(build, "measure_costs", lambda *_, **__: flat)
    LLM(draft_checkpoint, **SIZES)
    assert (
        "verified: always 5 drafts a sequence: the cost of a step is the same at every size" in capsys.readouterr().err
    )


def test_fixed_length_is_said_and_nothing_is_measured_for_it(draft_checkpoint: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(build, "measure_costs", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "0")
    LLM(draft_checkpoint, **SIZES)
    shown = capsys.readouterr().err
    assert "(mtp_varlen off)" in shown and "verified: always 5 drafts a sequence" in shown and "measured" not in shown


def test_a_calibration_beside_the_weights_is_used_and_a_broken_one_is_named(
    draft_checkpoint: Path, tmp_path: Path, capsys
) -> None:
    for file in draft_checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    calibration = tmp_path / "dspark_calibration.json"
    lines = {rule: {"temperatures": [2.0] * 5, "biases": [0.1] * 5} for rule in ("greedy", "coupled", "residual")}
    calibration.write_text(json.dumps(lines))
    LLM(tmp_path, mtp_varlen=False, **SIZES)
    assert "confidence: calibrated by dspark_calibration.json" in capsys.readouterr().err
    calibration.write_text(json.dumps({**lines, "greedy": {"temperatures": [2.0] * 4, "biases": [0.0] * 5}}))
    with pytest.raises(ValueError, match=r"dspark_calibration.json: greedy: temperatures must be a list of 5"):
        LLM(tmp_path, verbose=False, **SIZES)


def test_drafts_that_are_refused_are_refused_before_any_weight_is_read(tiny_checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setattr(build, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=r"^nextn: 2 tokens cannot be drafted"):
        LLM(tiny_checkpoint, nextn=2, verbose=False)


def test_draft_stages_are_not_loaded_where_nothing_is_drafted(draft_checkpoint: Path, plain: LLM) -> None:
    assert plain.model.draft is None
    config = build.engine_config(resolve_settings(EngineArguments(device="cpu", **SIZES)), plain.config)
    with pytest.raises(ValueError, match="drafts: 5 need the model's draft stages; load it with drafts=True"):
        build.build_core(draft_checkpoint, load_model(draft_checkpoint), config)
