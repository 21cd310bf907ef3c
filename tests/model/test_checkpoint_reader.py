"""A checkpoint is checked as a whole before a tensor is read, and value by value while it is read."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from random import Random

import pytest
import torch
from checkpoint_tools import load, poke, rewrite, store
from golden import CASES, golden_dir
from safetensors.torch import load_file

from deepinfer.model.presets import preset
from deepinfer.model.random_checkpoint import write_random_checkpoint
from deepinfer.model.weights import CheckpointError, CheckpointReader

CONFIG = preset("tiny", layers=2, experts=4, drafts=True, vision=True)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reader") / "one"
    write_random_checkpoint(directory, CONFIG)
    return directory


@pytest.fixture(scope="module")
def pristine_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reader") / "shards"
    write_random_checkpoint(directory, CONFIG, shard_bytes=300_000)
    return directory


@pytest.fixture
def one(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "one"))


@pytest.fixture
def shards(pristine_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine_shards, tmp_path / "shards"))


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(directory)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_golden_checkpoint_reads_bit_for_bit(case: str) -> None:
    directory = golden_dir() / case
    expected: dict[str, torch.Tensor] = {}
    for file in directory.glob("model*.safetensors"):
        expected |= load_file(file)
    with CheckpointReader(directory) as reader:
        assert set(reader.names()) == set(expected)
        assert reader.total_bytes == sum(tensor.nbytes for tensor in expected.values())
        for name, tensor in expected.items():
            got = reader.read(name)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), name


def test_pair_may_stand_in_two_shards(shards: Path) -> None:
    weight_map = json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]
    prefixes = [name.removesuffix(".scale") for name in weight_map if name.endswith(".scale")]
    split = [p for p in prefixes if weight_map[f"{p}.weight"] != weight_map[f"{p}.scale"]]
    assert split, "the fixture no longer splits a pair; choose another shard size"
    with CheckpointReader(shards) as reader:
        codes, scales = reader.read_pair(split[0])
    assert scales.dtype == torch.float8_e8m0fnu
    assert codes.dim() == scales.dim() == 2


def test_tensor_outlives_the_reader(one: Path) -> None:
    with CheckpointReader(one) as reader:
        tensor = reader.read("norm.weight")
    (one / "model.safetensors").unlink()
    tensor += 1
    assert torch.isfinite(tensor).all()


def test_all_missing_and_unexpected_tensors_are_listed_in_one_error(one: Path) -> None:
    def damage(tensors: dict) -> None:
        del tensors["norm.weight"], tensors["layers.1.attn.wkv.scale"]
        tensors["layers.9.stray.weight"] = ("F32", [1], b"\0" * 4)
        dtype, shape, raw = tensors["layers.0.attn_norm.weight"]
        tensors["layers.0.attn_norm.weight"] = (dtype, [1, *shape], raw)
        dtype, shape, raw = tensors["layers.0.ffn_norm.weight"]
        tensors["layers.0.ffn_norm.weight"] = ("F16", shape, raw)

    rewrite(one / "model.safetensors", damage)
    message = refusal(one)
    for expected in (
        "2 missing tensors",
        "norm.weight BF16 [256]",
        "layers.1.attn.wkv.scale",
        "1 unexpected tensors",
        "layers.9.stray.weight (in model.safetensors)",
        "layers.0.attn_norm.weight is [1, 256], needs [256]",
        "layers.0.ffn_norm.weight is F16, needs BF16",
    ):
        assert expected in message


def test_long_lists_are_cut_but_counted(one: Path) -> None:
    rewrite(one / "model.safetensors", lambda t: [t.pop(n) for n in list(t) if ".experts." in n] and None)
    message = refusal(one)
    assert "120 missing tensors" in message  # (2 layers + 3 stages) x 4 experts x 3 matrices x 2 tensors
    assert message.count("\n") < 40


def test_truncated_shard_names_the_file(shards: Path) -> None:
    victim = min(shards.glob("model-00003*"))
    os.truncate(victim, victim.stat().st_size - 1)
    message = refusal(shards)
    assert victim.name in message
    assert "truncated" in message


@pytest.mark.parametrize("size", [0, 5, 100])
def test_file_that_ends_in_its_header_is_named(one: Path, size: int) -> None:
    os.truncate(one / "model.safetensors", size)
    message = refusal(one)
    assert "model.safetensors is truncated" in message


def test_missing_shard_names_the_file(shards: Path) -> None:
    victim = min(shards.glob("model-00002*"))
    victim.unlink()
    assert f"{victim.name} is missing" in refusal(shards)


def test_overlapping_tensors_are_refused(one: Path) -> None:
    header, payload = load(one / "model.safetensors")
    header["layers.0.hc_attn_base"]["data_offsets"] = header["layers.1.hc_attn_base"]["data_offsets"]
    store(one / "model.safetensors", header, payload)
    message = refusal(one)
    assert "model.safetensors" in message
    assert "overlaps" in message or "gap" in message


def test_bytes_after_the_last_tensor_are_refused(one: Path) -> None:
    with (one / "model.safetensors").open("ab") as stream:
        stream.write(b"x")
    assert "after its last tensor" in refusal(one)


def test_header_that_is_no_json_is_refused(one: Path) -> None:
    (one / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{]}!")
    assert "damaged header" in refusal(one)


def test_index_that_leaves_the_directory_is_refused(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    assert "outside the checkpoint directory" in refusal(shards)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": []}}', "\0"]
)
def test_damaged_index_is_refused(shards: Path, text: str) -> None:
    (shards / "model.safetensors.index.json").write_text(text)
    assert "index.json is damaged" in refusal(shards)


def test_damaged_header_never_escapes_as_another_error(one: Path) -> None:
    file = one / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    random = Random(0)
    for _ in range(60):
        damaged = bytearray(raw)
        for _ in range(random.choice([1, 2, 5])):
            damaged[random.randrange(8 + length)] = random.choice(b'0123456789-.e[]{}",:\xff\x00')
        file.write_bytes(damaged)
        try:
            CheckpointReader(one).close()
        except CheckpointError:
            continue


def test_index_that_disagrees_with_the_shards_is_refused(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    content["weight_map"]["embed.weight"] = files[-1]
    index.write_text(json.dumps(content))
    message = refusal(shards)
    assert "embed.weight" in message
    assert "another file" in message


def test_directory_without_weights_says_what_to_do(one: Path) -> None:
    (one / "model.safetensors").unlink()
    assert "make-checkpoint" in refusal(one)


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("layers.0.attn.wq_a.weight", b"\x7f"),
        ("layers.0.attn.wq_a.weight", b"\xff"),
        ("layers.0.attn.wq_a.scale", b"\xff"),
        ("layers.0.ffn.experts.0.w1.scale", b"\xff"),
        ("norm.weight", struct.pack("<H", 0x7FC0)),
        ("norm.weight", struct.pack("<H", 0xFF80)),
        ("layers.1.attn.attn_sink", struct.pack("<f", float("nan"))),
        ("layers.1.attn.attn_sink", struct.pack("<f", float("-inf"))),
    ],
)
def test_nan_tensor_is_refused_by_name(one: Path, name: str, element: bytes) -> None:
    poke(one / "model.safetensors", name, element, at=4)
    with CheckpointReader(one) as reader, pytest.raises(CheckpointError) as caught:
        reader.read(name)
    assert name in str(caught.value)
    assert "model.safetensors" in str(caught.value)


def test_every_fp4_code_is_a_number(one: Path) -> None:
    poke(one / "model.safetensors", "layers.0.ffn.experts.0.w1.weight", bytes(range(240, 256)))
    with CheckpointReader(one) as reader:
        assert reader.read("layers.0.ffn.experts.0.w1.weight").dtype == torch.int8


def test_text_engine_needs_neither_drafts_nor_vision(shards: Path) -> None:
    content = json.loads((shards / "model.safetensors.index.json").read_text())
    by_file: dict[str, list[str]] = {}
    for name, file in content["weight_map"].items():
        by_file.setdefault(file, []).append(name)
    other = [f for f, names in by_file.items() if all(n.startswith(("mtp.", "vision.", "aligner.")) for n in names)]
    assert other
    for file in other:
        (shards / file).unlink()
    with CheckpointReader(shards, groups=("text",)) as reader:
        reader.read("norm.weight")
        gone = next(name for name in by_file[other[0]])
        with pytest.raises(CheckpointError, match=r"mtp|vision|aligner"):
            reader.read(gone)
    assert other[0] in refusal(shards)


def test_unknown_names_are_refused(one: Path) -> None:
    with CheckpointReader(one) as reader:
        with pytest.raises(CheckpointError, match="nonsense"):
            reader.read("nonsense")
        with pytest.raises(CheckpointError, match="no Engram table"):
            reader.table("layers.0.attn.wq_a")
    with pytest.raises(ValueError, match="txet"):
        CheckpointReader(one, groups=("txet",))


def test_reader_survives_a_file_that_shrinks_after_the_check(one: Path) -> None:
    with CheckpointReader(one) as reader:
        os.truncate(one / "model.safetensors", 4096)
        with pytest.raises(CheckpointError, match="shorter"):
            reader.read("head.weight")
