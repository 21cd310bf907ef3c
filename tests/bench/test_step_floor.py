"""The floor of a step: its weights are the inventory's, its other sums are what a count row by row gives."""

from __future__ import annotations

import math

import pytest

from deepinfer.bench.step_floor import Load, Part, expected_experts, floor_by_part, host_bytes, step_parts
from deepinfer.kernels.timing import Rates
from deepinfer.model.config import ModelConfig
from deepinfer.model.presets import preset
from deepinfer.model.tensors import tensor_specs

RATES = Rates(copy=4e12, bf16=8e14, fp8=1.2e15)


def config(name: str) -> ModelConfig:
    return preset(name, drafts=True)


def inventory_bytes(c: ModelConfig, drafts: bool) -> float:
    """Matrices and FP4 scales: what is looked up row by row, vectors and the FP8 tiles' scales are not in the floor."""
    total = 0
    for spec in tensor_specs(c).values():
        if len(spec.shape) < 2 or spec.kind in ("engram_table", "vision") or spec.name.endswith("embed.weight"):
            continue
        if (spec.group == "draft" and not drafts) or spec.name.endswith(("q_weight", "k_weight")):
            continue
        if spec.dtype != "F8_E8M0" or spec.kind == "expert":
            total += spec.nbytes
    return total


@pytest.mark.parametrize("name", ["tiny", "flash"])
@pytest.mark.parametrize("drafts", [0, 1])
def test_weights_are_the_inventorys(name: str, drafts: int) -> None:
    """With one token of context and so many sequences that every expert is hit, what is not a weight is subtracted."""
    c = config(name)
    load = Load(sequences=100_000, rows=1, context=0, logits=1, kept=1, drafts=drafts)
    got = sum(part.bytes for part in step_parts(c, load) if part.name not in ("attention", "drafts", "mHC"))
    layers = c.num_hidden_layers
    hyper = 2 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * c.hidden_size * 4
    got += hyper * layers - 2 * load.sequences * c.vocab_size * 4
    if drafts:
        records = c.num_drafts * load.sequences * (1 + c.dspark_block_size) * (c.head_dim + c.head_dim // 32)
        streams = c.num_drafts * 4 * load.sequences * c.dspark_block_size * c.hc_mult * c.hidden_size * 2
        again = c.vocab_size * c.hidden_size * 2 + 2 * load.sequences * c.vocab_size * 4  # the head, and its logits
        got += sum(part.bytes for part in step_parts(c, load) if part.name == "drafts") - records - streams - again
    assert got == pytest.approx(inventory_bytes(c, drafts > 0), rel=1e-9)


def test_products_of_a_decode_step_of_the_released_model() -> None:
    """16B activated parameters per decoded token (spec/engine.md 0) are 32 GFLOP of weights; attention adds its own."""
    parts = step_parts(preset("flash"), Load(1, 1, 32_768, 1, 1))
    weights = sum(p.flops for p in parts if p.name not in ("attention", "index scores", "head and logits", "mHC"))
    assert 0.8 * 32e9 < weights < 1.1 * 32e9


def test_context_is_what_a_count_row_by_row_gives() -> None:
    c = config("tiny")
    load = Load(sequences=3, rows=20, context=5, logits=1, kept=20)
    flops = 0
    for layer in range(c.num_hidden_layers):
        for position in range(5, 25):
            ratio = c.ratio(layer)
            keys = min(position + 1, c.sliding_window)
            keys += min(c.index_topk, (position + 1) // ratio) if ratio else 0
            flops += 3 * 4 * c.num_attention_heads * c.head_dim * keys
    got = sum(part.flops for part in step_parts(c, load) if part.name == "attention")
    assert got == pytest.approx(flops, rel=0.06)  # the selected entries' mean is taken before the minimum


def test_narrowing_halves_a_prefill() -> None:
    c = preset("flash")
    whole = step_parts(c, Load(1, 32_768, 0, 1, 32_768))
    narrowed = step_parts(c, Load(1, 32_768, 0, 1, 140))
    ratio = sum(p.flops for p in narrowed) / sum(p.flops for p in whole)
    assert 0.45 < ratio < 0.6
    # 8B activated parameters per prefilled token (spec/engine.md 0)
    weights = sum(p.flops for p in narrowed if p.name not in ("attention", "index scores", "mHC"))
    assert 0.8 * 16e9 < weights / 32_768 < 1.15 * 16e9


def test_experts_hit() -> None:
    assert expected_experts(1, 48, 6) == pytest.approx(6)
    assert expected_experts(384, 48, 6) == pytest.approx(48, rel=1e-6)
    assert 0 < expected_experts(8, 48, 6) < 48


def test_floor_adds_up_by_name() -> None:
    parts = [Part("a", 4e9), Part("b", 8e9, 2.4e12, "fp8"), Part("a", 0.0, 1.6e12, "bf16")]
    found = floor_by_part(parts, RATES)
    assert list(found) == ["a", "b"]
    assert found["a"]["ms"] == pytest.approx(1 + 2) and found["b"]["ms"] == pytest.approx(2)
    assert math.isclose(found["a"]["gb"], 4) and math.isclose(found["b"]["tflop"], 2.4)


def test_engram_rows_of_a_step() -> None:
    assert host_bytes(preset("flash"), 384) == 2 * 384 * 24 * 264
