"""Weights that the form of the GPU kernels cannot hold exactly are counted and told when a model is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from checkpoint_tools import load, poke

pytest.importorskip("triton")

from deepinfer.kernels.gpu_weights import ShuffledExperts
from deepinfer.kernels.weights import Weight, loose
from deepinfer.model import load_model
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.presets import preset
from deepinfer.model.random_checkpoint import write_random_checkpoint

SAID = "weights rounded for the GPU kernels"


def set_scale(directory: Path, name: str, octaves: int) -> None:
    """Another exponent for the first scale of a tensor."""
    for file in directory.glob("*.safetensors"):
        header, payload = load(file)
        if name in header:
            before = payload[header[name]["data_offsets"][0]]
            poke(file, name, bytes([before + octaves]))
            return
    raise KeyError(name)


def loaded(directory: Path, form: str) -> DeepseekV41:
    return load_model(directory, dtype="bfloat16", weights=form)


def different(weights: Weight, others: Weight) -> int:
    return int((weights.dense() != others.dense()).sum())


def test_what_is_rounded_is_counted_and_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tile 24 octaves above its neighbours, and a group 20 above those of its row: e4m3 reaches 18, a row's table of
    FP4 scales 11. The rows' other values are rounded, every one of them to zero."""
    directory = tmp_path / "one"
    write_random_checkpoint(directory, preset("tiny", layers=1, experts=3))
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        loaded(directory, "gpu")
    before = [record.message for record in caplog.records if SAID in record.message]
    assert before == []
    set_scale(directory, "layers.0.attn.wq_a.scale", 24)
    set_scale(directory, "layers.0.ffn.experts.1.w3.scale", 20)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        gpu = loaded(directory, "gpu")
    (line,) = [record.message for record in caplog.records if SAID in record.message]
    caplog.clear()
    stored = loaded(directory, "stored")
    assert not caplog.records

    mine, theirs = gpu.blocks[0].attention.queries, stored.blocks[0].attention.queries
    values = different(mine.wq_a, theirs.wq_a)
    assert values > 32 * 100  # of 32 rows of 256 values, most of 224 that lie outside of the tile
    bank = gpu.blocks[0].experts.weights.experts
    assert isinstance(bank, ShuffledExperts)
    ours, others = bank.loose[0][1], loose(stored.blocks[0].experts.weights.experts).routed[1]
    assert [different(*pair) > 0 for pair in zip(ours, others, strict=True)] == [False, True, False]
    changed = ours[1].dense()[0] != others[1].dense()[0]
    assert changed[32:].any() and not changed[:32].any()
    groups = 256 // 32 - 1  # of the row but for the one that stands out

    numbers = [int(word.replace(",", "")) for word in line.split() if word.replace(",", "").isdigit()]
    assert numbers[0] == values
    assert numbers[2] == groups
    assert numbers[3] == 3 * 3 * 256 * 128 // 32  # three experts of three matrices of 256 x 128
    assert 0 < numbers[0] / numbers[1] < 1 and f"{numbers[0] / numbers[1]:.2g}" in line
    assert torch.equal(mine.wkv.dense(), theirs.wkv.dense())
