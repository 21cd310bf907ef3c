"""config.json is obeyed or refused, field by field."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from golden import CASES, golden_dir

from deepinfer.model.config import ConfigError, ModelConfig, QuantizationConfig
from deepinfer.model.presets import flash, preset, tiny


@pytest.fixture
def released() -> dict[str, Any]:
    return flash().to_dict()


def problems(mapping: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(mapping)
    return caught.value.problems


def put(mapping: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `mapping` with one field changed; `path` has dots."""
    changed = copy.deepcopy(mapping)
    *parents, name = path.split(".")
    target = changed
    for parent in parents:
        target = target[parent]
    target[name] = value
    return changed


@pytest.mark.parametrize("config", [flash(), tiny(), preset("tiny"), preset("flash", layers=2)])
def test_config_survives_a_round_trip_through_json(config: ModelConfig) -> None:
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("case", CASES)
def test_golden_configs_are_read_and_written_back_with_the_same_fields(case: str) -> None:
    directory = golden_dir() / case
    written = ModelConfig.from_dir(directory).to_dict()
    original = json.loads((directory / "config.json").read_text())
    original["text_config"].pop("use_cache")  # changes nothing at inference, so it is not kept
    if original["text_config"].get("gate_temp") == 1.0:
        original["text_config"].pop("gate_temp")
    assert written == original


@pytest.mark.parametrize(
    "path",
    [
        "surprise",
        "text_config.surprise",
        "text_config.rope_scaling.surprise",
        "vision_config.surprise",
        "quantization_config.surprise",
        "text_config.first_k_dense_replace",
    ],
)
def test_unknown_config_field_is_named(released: dict[str, Any], path: str) -> None:
    (problem,) = problems(put(released, path, 7))
    assert path in problem
    assert "unknown" in problem


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_type", "deepseek_v4"),
        ("text_config.tie_word_embeddings", True),
        ("text_config.attention_bias", True),
        ("text_config.attention_dropout", 0.1),
        ("text_config.scoring_func", "softmax"),
        ("text_config.topk_method", "greedy"),
        ("text_config.hidden_act", "gelu"),
        ("text_config.n_shared_experts", 2),
        ("text_config.num_key_value_heads", 8),
        ("text_config.rope_scaling.rope_type", "linear"),
        ("quantization_config.expert_dtype", "fp8"),
        ("quantization_config.weight_block_size", [128, 128]),
        ("quantization_config.scale_fmt", "float"),
    ],
)
def test_unsupported_value_is_refused_with_what_is_supported(released: dict[str, Any], path: str, value: Any) -> None:
    (problem,) = problems(put(released, path, value))
    assert path in problem
    assert repr(value) in problem
    assert "only" in problem


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("text_config.head_dim", 511.5, "head_dim"),
        ("text_config.norm_topk_prob", 1, "norm_topk_prob"),
        ("text_config.compress_ratios", "0,2,1", "compress_ratios"),
        ("text_config.rope_theta", float("nan"), "rope_theta"),
        ("text_config.hidden_size", True, "hidden_size"),
        ("text_config", None, "text_config"),
    ],
)
def test_mistyped_field_is_named(released: dict[str, Any], path: str, value: Any, named: str) -> None:
    assert any(named in problem for problem in problems(put(released, path, value)))


def test_missing_field_is_named(released: dict[str, Any]) -> None:
    del released["text_config"]["q_lora_rank"]
    assert problems(released) == ["text_config.q_lora_rank is missing"]


def test_all_violations_are_listed_in_one_error(released: dict[str, Any]) -> None:
    text = released["text_config"]
    text |= {"surprise": 1, "scoring_func": "softmax", "head_dim": 500, "index_topk": 20000, "q_lora_rank": 1281}
    found = problems(released)
    for name in ("surprise", "scoring_func", "head_dim", "index_topk", "q_lora_rank"):
        assert any(name in problem for problem in found), name


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"compress_ratios": [0, 0, 2, 1]}, "compress_ratios has 4 entries"),
        ({"compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0, 0, 1]}, "drafts do not compress"),
        ({"compress_ratios": [0] * 2 + [2] * 17 + [1] * 21 + [0] * 3}, "layer 19"),
        ({"compress_ratios": [0] * 2 + [4] * 18 + [1] * 20 + [0] * 3}, "only 0, 1 and 2"),
        ({"compress_ratios": [0] + [2] * 19 + [1] * 20 + [0] * 3}, "layer 1"),
        ({"index_source_layer_ids": [2, 8, 20, 24, 28, 32, 36]}, "index_source_layer_ids"),
        ({"kv_source_layer_ids": [8, 2, 14, 20]}, "strictly ascending"),
        ({"kv_source_layer_ids": [2, 8, 14, 20, 99]}, "outside the layers"),
        ({"candidate_source_layer_id": 24}, "candidate_source_layer_id"),
        ({"candidate_source_layer_id": 8}, "read another KV source"),
        ({"candidate_topk_blocks": 64}, "masked positions"),
        ({"o_groups": 7}, "divisible by o_groups"),
        ({"moe_intermediate_size": 2300}, "moe_intermediate_size"),
        ({"qk_rope_head_dim": 65}, "even"),
        ({"qk_rope_head_dim": 256}, "index_head_dim"),
        ({"engram_num_embeddings": [384006168, 384016683]}, "384016682"),
        ({"engram_vocab_size": 17000000}, "engram_num_embeddings"),
        ({"engram_head_dim": 100}, "engram_head_dim"),
        ({"num_experts_per_tok": 400}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob"),
        ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id"),
        ({"dspark_block_size": 0}, "dspark_block_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"gate_temp": 0}, "gate_temp"),
    ],
)
def test_broken_constraint_is_explained(released: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    released["text_config"] |= changes
    assert any(named in problem for problem in problems(released))


def test_other_quantisation_is_refused_also_when_built_by_hand() -> None:
    with pytest.raises(ConfigError, match="expert_dtype"):
        dataclasses.replace(tiny(), quantization=QuantizationConfig(expert_dtype="fp8"))


def test_layer_roles_are_those_of_the_release() -> None:
    c = flash()
    assert [c.kv_source(layer) for layer in (0, 1, 2, 7, 8, 13, 19, 20, 39)] == [None, None, 2, 2, 8, 8, 14, 20, 20]
    assert [c.index_source(layer) for layer in (1, 5, 21, 24, 27, 39)] == [None, 2, 20, 24, 24, 36]
    assert [layer for layer in range(40) if c.is_candidate_user(layer)] == [24, 28, 32, 36]
    assert [layer for layer in range(40) if c.owns_kv(layer)] == [2, 8, 14, 20]
    assert (c.engram_index(1), c.engram_index(14), c.engram_index(2)) == (0, 1, None)
    assert c.ratio(40) == 0
    assert c.num_drafts == 3
    assert c.narrowing_obstacle() is None


def test_primes_of_the_release_give_its_table_rows() -> None:
    primes = flash().engram_primes()
    assert primes[0][0][0] == 16000057
    assert primes[1][2][-1] == 16000889
    assert [sum(map(sum, orders)) for orders in primes] == [384006168, 384016682]


@pytest.mark.parametrize("name", ["tiny", "flash"])
def test_every_cut_of_a_preset_is_a_valid_model(name: str) -> None:
    full = preset(name, drafts=True, vision=True)
    for layers in range(1, full.num_hidden_layers + 1):
        cut = preset(name, layers=layers, drafts=layers % 2 == 0)
        assert ModelConfig.from_dict(cut.to_dict()) == cut
        for layer in range(layers):  # no layer changes its role
            assert cut.kv_source(layer) == full.kv_source(layer)
            assert cut.index_source(layer) == full.index_source(layer)
            assert cut.engram_index(layer) == full.engram_index(layer)


def test_preset_refuses_a_cut_that_leaves_no_model() -> None:
    for wrong in ({"layers": 0}, {"layers": 41}, {"experts": 5}, {"experts": 385}):
        with pytest.raises(ConfigError):
            preset("flash", **wrong)
    with pytest.raises(ConfigError, match="tiny, flash"):
        preset("huge")


@pytest.mark.parametrize("section", ["text_config", "vision_config", "quantization_config", None])
def test_no_value_of_any_field_escapes_as_another_error(section: str | None) -> None:
    base = tiny().to_dict()
    odd = [None, -1, 0, 1.5, "x", [], {}, True, [1, "a"], 10**30, float("inf"), float("nan"), [[1]], [-1], [10**20]]
    for name in base[section] if section else base:
        for value in odd:
            changed = put(base, f"{section}.{name}" if section else name, value)
            try:
                ModelConfig.from_dict(changed)
            except ConfigError as error:
                assert name in str(error) or section is None
            # anything else fails the test


def test_broken_file_is_reported_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
    for text in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"config\.json"):
            ModelConfig.from_dir(tmp_path)
