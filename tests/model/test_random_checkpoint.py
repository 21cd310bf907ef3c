"""Random checkpoints: official layout, reproducible, sane, and refused before they fill the disk."""

from __future__ import annotations

import dataclasses
import json
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from deepinfer.kernels.reference.quant import dequantize_fp4_groups, dequantize_fp8_tiles
from deepinfer.model import random_checkpoint
from deepinfer.model.config import ConfigError
from deepinfer.model.presets import flash, preset
from deepinfer.model.random_checkpoint import OutputError, write_random_checkpoint
from deepinfer.model.tensors import tensor_specs
from deepinfer.model.tokenizer_writer import build_tokenizer, control_tokens, count_distinct
from deepinfer.model.weights import CheckpointReader

SMALL = preset("tiny", layers=2, experts=3)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_random_checkpoint(tmp_path / name, SMALL, seed=seed)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a["model.safetensors"] != c["model.safetensors"]


def test_tensor_does_not_depend_on_what_else_is_in_the_checkpoint(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "short", SMALL)
    write_random_checkpoint(tmp_path / "long", preset("tiny", layers=4, experts=3, vision=True), shard_bytes=1 << 20)
    with CheckpointReader(tmp_path / "short") as short, CheckpointReader(tmp_path / "long") as long:
        for name in short.names():
            assert torch.equal(short.read(name).view(torch.uint8), long.read(name).view(torch.uint8)), name


def test_shards_hold_every_tensor_once_and_respect_their_size(tmp_path: Path) -> None:
    config = preset("tiny", layers=3, drafts=True, vision=True)
    size = write_random_checkpoint(tmp_path / "out", config, shard_bytes=1 << 20)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    assert set(index["weight_map"]) == set(tensor_specs(config))
    largest = max(spec.nbytes for spec in tensor_specs(config).values())
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert file.stat().st_size < max(1 << 20, largest) + (1 << 17)  # header on top
    with CheckpointReader(tmp_path / "out") as reader:
        assert reader.total_bytes == size
        for name in reader.names():
            reader.read(name)  # raises on NaN


def test_head_rows_of_control_tokens_are_zero_so_greedy_text_has_none(tiny_checkpoint: Path) -> None:
    with CheckpointReader(tiny_checkpoint) as reader:
        head = reader.read("head.weight").float()
    control = sorted({0, 1, 2, *control_tokens(512)})
    assert not head[control].any()
    assert head[3 : control[3]].any(dim=1).all()


def test_random_model_gives_finite_logits_of_size_one(tiny_checkpoint: Path) -> None:
    from deepinfer import LLM

    logits = LLM(tiny_checkpoint, max_model_len=256, verbose=False).logits([3 + i % 400 for i in range(70)])
    assert torch.isfinite(logits).all()
    assert 0.5 < float(logits.std()) < 2.0


def test_matrices_have_unit_gain(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "out", SMALL)
    with CheckpointReader(tmp_path / "out") as reader:
        dense = dequantize_fp8_tiles(*reader.read_pair("layers.0.attn.wo_b"))
        expert = dequantize_fp4_groups(*reader.read_pair("layers.0.ffn.experts.2.w1"))
    for matrix in (dense, expert):
        gain = matrix.square().mean().sqrt() * matrix.shape[1] ** 0.5
        assert 0.5 < gain < 1.5  # scales are powers of two: off by up to sqrt(2), and some tiles are halved


@pytest.mark.parametrize("name", ["tiny", "flash"])
def test_tokenizer_has_exactly_the_ids_that_the_config_claims(name: str) -> None:
    config = preset(name)
    content = build_tokenizer(config)
    tokenizer = Tokenizer.from_str(json.dumps(content))
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert count_distinct(content) == config.engram_compressed_vocab_size
    assert tokenizer.id_to_token(config.image_token_id) == "<｜deepseek_image｜>"
    text = "Straße, naïve\n\n  x = '世界' 🙂<｜User｜>hi</think>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_flash_tokenizer_has_the_released_special_ids() -> None:
    tokenizer = Tokenizer.from_str(json.dumps(build_tokenizer(flash())))
    released = {"<｜User｜>": 128803, "<｜Assistant｜>": 128804, "<think>": 128821, "</think>": 128822}
    released |= {"｜DSML｜": 128825, "<｜System｜>": 129279, "<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1}
    assert {text: tokenizer.token_to_id(text) for text in released} == released


def test_tokenizer_that_cannot_be_built_is_refused() -> None:
    with pytest.raises(ConfigError, match="engram_compressed_vocab_size"):
        build_tokenizer(dataclasses.replace(SMALL, engram_compressed_vocab_size=260))


def test_non_empty_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(OutputError, match="not empty"):
        write_random_checkpoint(tmp_path, SMALL)
    with pytest.raises(OutputError, match="is a file"):
        write_random_checkpoint(tmp_path / "mine.txt", SMALL)
    assert contents(tmp_path) == {"mine.txt": b"keep"}


def test_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(random_checkpoint.shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 30 << 30))
    with pytest.raises(OutputError) as caught:
        write_random_checkpoint(tmp_path / "out", preset("flash", layers=2))
    message = str(caught.value)
    assert "110.9 GiB" in message
    assert "30.0 GiB free" in message
    assert "layer 1: 94.4 GiB" in message
    assert not (tmp_path / "out").exists()
