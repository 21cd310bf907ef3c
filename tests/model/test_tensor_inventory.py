"""The inventory is the release's."""

from __future__ import annotations

import pytest

from deepinfer.cache.formats import slot_bytes
from deepinfer.model.config import ModelConfig
from deepinfer.model.footprint import fits, kv_lines, module_sizes, sequence_lines, total
from deepinfer.model.presets import flash, preset
from deepinfer.model.tensors import tensor_specs

GIB = 1 << 30


def test_real_config_gives_the_released_inventory() -> None:
    specs = tensor_specs(flash())
    assert len(specs) == 96_085
    assert sum(spec.nbytes for spec in specs.values()) == 510_286_023_000


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("layers.0.attn.wo_a.scale", (256, 128), "F8_E8M0"),
        ("layers.20.attn.compressor.wkv.weight", (512, 5120), "BF16"),
        ("layers.36.attn.indexer.weights_proj.weight", (32, 5120), "BF16"),
        ("layers.39.ffn.experts.383.w2.weight", (5120, 1152), "I8"),
        ("layers.14.engram.embed.weight", (384016682, 256), "F8_E4M3"),
        ("layers.1.engram.wkv.scale", (800, 192), "F8_E8M0"),
        ("mtp.0.main_proj.weight", (5120, 15360), "F8_E4M3"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
        ("aligner.w1.weight", (5120, 9216), "BF16"),
        ("mtp.1.ffn.gate.bias_vl", (128,), "F32"),
        ("layers.3.hc_ffn_fn", (24, 20480), "F32"),
    ],
)
def test_released_tensor_has_its_shape_and_type(name: str, shape: tuple[int, ...], dtype: str) -> None:
    spec = tensor_specs(flash())[name]
    assert (spec.shape, spec.dtype) == (shape, dtype)


def test_only_the_layers_that_own_a_part_have_its_tensors() -> None:
    names = tensor_specs(flash())
    assert "layers.20.attn.compressor.wgate.weight" not in names  # ratio 1 has no gate
    assert "layers.24.attn.indexer.wk.weight" not in names  # reuses layer 20's keys
    assert "layers.3.attn.indexer.wq_b.weight" not in names
    assert not any("bias_vl" in name for name in tensor_specs(preset("flash", layers=2)))


def test_890_bytes_per_token() -> None:
    lines = kv_lines(flash())
    assert [int(line.nbytes) for line in lines] == [432, 288, 102, 68]
    assert total(lines) == 890


def test_state_of_a_sequence_is_a_ring_of_134_rows_in_every_layer() -> None:
    window, drafts, open_rows = (int(line.nbytes) for line in sequence_lines(flash()))
    assert (window, drafts, open_rows) == (40 * 134 * 528, 3 * 134 * 528, 3 * 4 * 4096)


@pytest.mark.parametrize("config", [flash(), preset("flash"), preset("tiny", drafts=True)])
def test_state_of_a_sequence_is_what_the_cache_keeps_per_slot(config: ModelConfig) -> None:
    drafts = config.dspark_block_size
    tokens = (max(config.engram_max_ngram_size - 1, 0) + drafts) * 8  # ids for the n-grams of the next step
    assert total(sequence_lines(config)) + tokens == slot_bytes(config, "packed", drafts, replicas=False)


def test_module_sizes_add_up() -> None:
    specs = tensor_specs(flash()).values()
    sizes = module_sizes(specs)
    assert sum(size.nbytes for size in sizes) == 510_286_023_000
    assert {(size.group, size.kind): size.nbytes for size in sizes}["text", "expert"] == 40 * 384 * 18_800_640


def test_more_devices_hold_more_context_and_short_ones_say_so() -> None:
    host = [fit for fit in fits(flash(), 120 * GIB, [1, 2, 4, 8]) if fit.tables == "host"]
    assert [fit.kv_bytes >= 0 for fit in host] == [False, False, True, True]
    assert host[0].tokens == 0
    assert host[3].tokens is not None
    assert host[3].tokens == host[3].kv_bytes // 890 * 8
    device = [fit for fit in fits(flash(), 120 * GIB, [8]) if fit.tables == "device"]
    assert device[0].kv_bytes == host[3].kv_bytes - -(-202_758_032_400 // 8)


def test_experts_that_do_not_divide_are_rounded_up() -> None:
    (fit,) = fits(preset("tiny", layers=1), GIB, [3])  # 16 experts on 3 devices: 6 on the fullest
    experts = sum(s.nbytes for s in tensor_specs(preset("tiny", layers=1)).values() if s.kind == "expert")
    assert fit.expert_bytes == experts // 16 * 6
    assert fit.tokens is None  # window only: context costs nothing
