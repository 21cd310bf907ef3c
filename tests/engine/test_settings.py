"""What is asked for, what is in force, and what is said about the difference."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from deepinfer import LLM
from deepinfer.cache.formats import block_bytes
from deepinfer.config import EngineConfig
from deepinfer.engine.arguments import Arguments, EngineArguments
from deepinfer.engine.build import build_core, engine_config, load
from deepinfer.engine.drafting import describe_drafting, draft_length
from deepinfer.engine.invariance import operators_problem
from deepinfer.engine.model_core import ModelCore
from deepinfer.engine.settings import Settings, resolve_settings
from deepinfer.env import EnvironmentVariableError
from deepinfer.kernels import select
from deepinfer.model import load_model
from deepinfer.model.config import ModelConfig
from deepinfer.model.presets import preset
from deepinfer.model.random_checkpoint import write_random_checkpoint

CPU = {"DEEPINFER_ACCELERATOR": "cpu"}
DRAFTING = preset("tiny", drafts=True)  # blocks of 5
PLAIN = preset("tiny")
NANO = ModelConfig.from_dir(Path(__file__).parents[2] / "models" / "nano")
TWIN_KERNELS = select.cpu_twins(torch.device("cpu"), torch.float32)
needs_kernels = pytest.mark.skipif(not TWIN_KERNELS, reason="without a C++ compiler nothing is batch invariant")


def resolved(environ=None, **arguments) -> Settings:
    return resolve_settings(EngineArguments(**arguments), environ=CPU | (environ or {}))


# -- one list of arguments -------------------------------------------------------------------------------------------


def test_llm_and_the_engine_process_take_the_same_arguments_with_the_same_defaults() -> None:
    assert get_type_hints(Arguments) == get_type_hints(EngineArguments)
    expected = {f.name: f.default for f in fields(EngineArguments)}
    for function, own in ((LLM.__init__, ["self", "model"]), (ModelCore.of, ["model"])):
        shown = inspect.signature(function).parameters
        assert list(shown)[: len(own)] == own
        assert {n: p.default for n, p in shown.items() if n not in (*own, "verbose")} == expected
    with pytest.raises(TypeError, match="max_seqs"):
        LLM(max_seqs=3)  # type: ignore[call-arg]


def test_every_argument_says_what_it_is() -> None:
    source = inspect.getsource(EngineArguments)
    for field in fields(EngineArguments):
        after = source.split(f"    {field.name}: ")[1].splitlines()[1]
        assert after.strip().startswith('"""'), field.name


# -- drafting --------------------------------------------------------------------------------------------------------


def test_the_number_of_drafts_is_the_callers_then_the_environments_then_five() -> None:
    variable = "DEEPINFER_USE_NEXTN_DECODE"
    assert draft_length(resolved(), DRAFTING) == 5
    assert draft_length(resolved({variable: "2"}), DRAFTING) == 2
    assert draft_length(resolved({variable: "2"}, nextn=3), DRAFTING) == 3
    assert draft_length(resolved({variable: "2"}, nextn=0), DRAFTING) == 0
    for wrong in ("6", "-1", "x"):
        with pytest.raises(EnvironmentVariableError, match="use an integer from 0 to 5"):
            resolved({variable: wrong})


def test_drafts_that_were_asked_for_and_cannot_be_had_are_refused_with_what_can() -> None:
    with pytest.raises(ValueError, match=r"^nextn: 3 .* no draft stages .*; use nextn=0, or a checkpoint with mtp"):
        draft_length(resolved(nextn=3), PLAIN)
    short = replace(DRAFTING, dspark_block_size=2)
    with pytest.raises(ValueError, match=r"^nextn: 3 is more .*; use a number from 0 to 2 \(dspark_block_size = 2"):
        draft_length(resolved(nextn=3), short)
    for wrong in (-1, 6, True, 2.0, "5"):
        with pytest.raises(ValueError, match=r"^nextn: must be a whole number from 0 to 5, or None, got"):
            resolved(nextn=wrong)


def test_drafts_that_nobody_asked_for_are_cut_to_what_the_checkpoint_gives_and_that_is_said() -> None:
    assert draft_length(resolved(), PLAIN) == 0
    assert "nextn 0 instead of 5, the checkpoint has no draft stages" in said(resolved(), PLAIN)
    short = replace(DRAFTING, dspark_block_size=2)
    assert draft_length(resolved(), short) == 2
    assert "up to 2 tokens per step (not 5: as far as the checkpoint drafts)" in said(resolved(), short)
    assert said(resolved(nextn=0), DRAFTING) == "no drafting: nextn is 0"
    longer = replace(DRAFTING, dspark_block_size=7)  # a verify step has 6 rows
    assert draft_length(resolved(), longer) == 5


def said(settings: Settings, model) -> str:
    return "\n".join(describe_drafting(settings, model, config_of(settings, model)))


def config_of(settings: Settings, model):
    return engine_config(replace(settings, max_model_len=256, max_num_seqs=4), model)


@pytest.mark.parametrize(("asked", "environ", "varlen"), [(None, "1", True), (None, "0", False), (True, "0", True)])
def test_verification_of_variable_length_is_the_callers_choice_then_the_environments(asked, environ, varlen) -> None:
    settings = resolved({"DEEPINFER_ENABLE_MTP_VARLEN": environ}, mtp_varlen=asked)
    assert config_of(settings, DRAFTING).varlen is varlen
    assert not config_of(settings, PLAIN).varlen  # nothing to verify
    assert ("up to 5 tokens per step (mtp_varlen off)" in said(settings, DRAFTING)) is not varlen


def test_the_printed_settings_name_the_rule_of_acceptance_in_force() -> None:
    for arguments in ({}, {"seed": 7}):
        assert "for every request, drafts change no token" in said(resolved(**arguments), DRAFTING)
    lines = said(resolved(seed=None), DRAFTING)
    assert "with seq_seed or temperature 0, drafts change no token" in lines
    assert "other requests by rejection sampling" in lines


def test_memory_for_drafts_is_taken_from_the_blocks_and_for_draft_logits_only_where_requests_are_unseeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deepinfer.engine.build.free_memory", lambda _: (1 << 28, 1 << 28))

    def blocks(model=DRAFTING, **arguments) -> int:
        return engine_config(resolved(max_num_seqs=128, max_model_len=8192, **arguments), model).num_blocks

    most = blocks(nextn=0)
    seeded, unseeded = blocks(), blocks(seed=None)
    assert most > seeded > unseeded
    logits = 128 * 5 * DRAFTING.vocab_size * 4
    assert abs((seeded - unseeded) * block_bytes(DRAFTING, "float32") - logits) < block_bytes(DRAFTING, "float32")


# -- batch invariance ------------------------------------------------------------------------------------------------


@needs_kernels
def test_batch_invariance_is_had_in_float32_on_a_cpu_with_its_kernels_and_with_any_length_of_verification() -> None:
    for mtp_varlen in (True, False):
        settings = resolved(batch_invariant=True, seed=None, mtp_varlen=mtp_varlen)
        config = config_of(settings, DRAFTING)
        assert config.batch_invariant and config.varlen is mtp_varlen
        assert "for every request, drafts change no token" in said(settings, DRAFTING)
    assert resolved({"DEEPINFER_BATCH_INVARIANT": "1"}).batch_invariant
    assert not resolved({"DEEPINFER_BATCH_INVARIANT": "1"}, batch_invariant=False).batch_invariant


def test_batch_invariance_without_invariant_operators_is_refused_with_the_nearest_setting(monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"^batch_invariant: .* bfloat16 on cpu .*device='cpu' with dtype='float32'"):
        resolved(batch_invariant=True, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"^DEEPINFER_BATCH_INVARIANT: .* \(or set the variable to 0\)"):
        resolved({"DEEPINFER_BATCH_INVARIANT": "1"}, dtype="bfloat16")
    with (
        select.reference_only(),
        pytest.raises(ValueError, match=r"kernels are missing .*; use batch_invariant=False"),
    ):
        resolved(batch_invariant=True)
    with select.interpreted_gpu():  # on a GPU with kernels, float32 is plain PyTorch all the same
        problem = operators_problem(torch.device("cpu"), "bfloat16")
        assert problem is None
        monkeypatch.setattr(select, "cpu_twins", lambda device, dtype: False)
        monkeypatch.setattr("deepinfer.kernels.select.backends.gpu_problem", lambda device: None)
        problem = operators_problem(torch.device("cuda"), "float32")
    assert problem is not None and "in float32 on cuda run in plain PyTorch" in problem
    assert "use dtype='bfloat16'" in problem


def test_batch_invariance_on_a_gpu_is_had_in_bfloat16_with_packed_records() -> None:
    """Tried with the GPU kernels' interpreter in the place of a GPU."""
    with select.interpreted_gpu():
        settings = resolved(batch_invariant=True, dtype="bfloat16", max_model_len=256, max_num_seqs=4)
        assert settings.kv_format == "hopper"
        config = engine_config(settings, NANO)
        assert config.batch_invariant
        assert "batch invariant: a request gives the same bits alone" in settings.describe(Path("nano"), NANO, config)
        plain = replace(settings, batch_invariant=False)
        told = plain.describe(Path("nano"), NANO, engine_config(plain, NANO))
        assert "not batch invariant: bits of a request may depend on its company" in told
        with pytest.raises(
            ValueError, match=r"^batch_invariant: the GPU kernels do not read bfloat16 records; use kv_"
        ):
            resolved(batch_invariant=True, dtype="bfloat16", kv_format="bfloat16")


@pytest.mark.parametrize(
    "odd",
    [
        {"hc_mult": 2},
        {"hidden_size": 192},
        {"head_dim": 192},
        {"num_attention_heads": 4},
        {"num_attention_heads": 128},
    ],
)
def test_batch_invariance_on_a_gpu_is_refused_where_a_models_sizes_leave_operators_to_plain_pytorch(odd) -> None:
    with select.interpreted_gpu():
        settings = resolved(batch_invariant=True, dtype="bfloat16", max_model_len=256, max_num_seqs=4)
        with pytest.raises(ValueError, match=rf"^batch_invariant: the model has .*{next(iter(odd))} = .*plain PyTorch"):
            engine_config(settings, replace(NANO, **odd))


def test_a_cache_of_experts_is_for_the_gpu_kernels_and_said_where_there_are_none(tmp_path) -> None:
    settings = resolved(expert_cache="somewhere")
    assert settings.expert_cache is None
    assert "expert_cache without effect: no GPU kernels read what it would hold" in settings.notes
    for wrong in ("", 3, tmp_path):
        with pytest.raises(ValueError, match=r"^expert_cache: must be the name of a directory"):
            resolved(expert_cache=wrong)
    write_random_checkpoint(tmp_path / "one", preset("tiny", layers=1, experts=3))
    with select.interpreted_gpu():
        sizes = {"max_model_len": 256, "max_num_seqs": 2, "nextn": 0}
        settings = resolved(expert_cache=str(tmp_path / "kept"), dtype="bfloat16", **sizes)
        model, config = load(tmp_path / "one", settings)
        assert [file.name for file in tmp_path.glob("kept/*/*")] == ["layers.0.ffn.experts"]
        assert f"order kept in {tmp_path / 'kept'}" in settings.describe(tmp_path / "one", model.config, config)


def test_a_model_that_was_loaded_without_batch_invariance_is_refused_with_it(tmp_path) -> None:
    write_random_checkpoint(tmp_path / "one", preset("tiny", layers=1, experts=3))
    with select.interpreted_gpu():
        model = load_model(tmp_path / "one", dtype="bfloat16")
        sizes = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 64, "num_blocks": 4}
        config = EngineConfig(**sizes, batch_invariant=True)
        with pytest.raises(ValueError, match=r"^batch_invariant: the model was loaded without it; .*invariant=True"):
            build_core(tmp_path / "one", model, config)


@needs_kernels
@pytest.mark.parametrize("odd", [{"hc_mult": 2}, {"num_attention_heads": 6, "o_groups": 2}])
def test_batch_invariance_is_refused_where_a_models_sizes_leave_operators_to_plain_pytorch(odd) -> None:
    model = replace(PLAIN, **odd)
    settings = resolved(batch_invariant=True, max_model_len=256, max_num_seqs=4)
    with pytest.raises(ValueError, match=rf"^batch_invariant: the model has {next(iter(odd))} = "):
        engine_config(settings, model)
    assert not engine_config(replace(settings, batch_invariant=False), model).batch_invariant


@needs_kernels
def test_batch_invariance_and_bounded_replay_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"^batch_invariant: .*prefix_mode='exact' or enable_prefix_caching=False"):
        resolved(batch_invariant=True, prefix_mode="bounded")
    assert resolved(batch_invariant=True, prefix_mode="bounded", enable_prefix_caching=False).batch_invariant


@needs_kernels
def test_batch_invariance_allows_truncation_where_nobody_is_preempted_for_want_of_blocks() -> None:
    options = {"batch_invariant": True, "yoco_truncation": "compact", "max_num_seqs": 2, "max_model_len": 512}
    assert engine_config(resolved(**options, num_blocks=8), PLAIN).batch_invariant
    advice = r"^yoco_truncation: .* use max_model_len <= 384, fewer max_num_seqs, or yoco_truncation \"off\""
    with pytest.raises(ValueError, match=advice):
        engine_config(resolved(**options, num_blocks=7), PLAIN)
    assert engine_config(resolved(**options | {"yoco_truncation": "off"}, num_blocks=7), PLAIN).num_blocks == 7


def test_the_printed_settings_say_whether_bits_depend_on_company(capsys, tiny_checkpoint) -> None:
    options = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 2}
    LLM(tiny_checkpoint, dtype="bfloat16", **options)
    assert "not batch invariant: bits of a request may depend on its company" in capsys.readouterr().err
    if TWIN_KERNELS:
        LLM(tiny_checkpoint, batch_invariant=True, **options)
        assert "batch invariant: a request gives the same bits alone and in any company" in capsys.readouterr().err
