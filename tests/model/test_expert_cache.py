"""Shuffled experts kept on disk: a second load has the first one's banks bit for bit, and what is wrong is told of."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deepinfer.kernels import select
from deepinfer.kernels.gpu_weights import ShuffledExperts
from deepinfer.kernels.triton.experts_layout import ShuffledBank, shuffle
from deepinfer.model import expert_cache, load_model
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.expert_cache import ExpertCache, bank_bytes
from deepinfer.model.presets import preset
from deepinfer.model.random_checkpoint import write_random_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers and three draft stages of a few experts."""
    directory = tmp_path_factory.mktemp("cached") / "checkpoint"
    write_random_checkpoint(directory, preset("tiny", layers=2, experts=3, drafts=True))
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "not made yet" / "experts"


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger="deepinfer.model.expert_cache"):
        yield


def loaded(path: Path, cache: Path | None = None, **options: object) -> DeepseekV41:
    with select.interpreted_gpu():
        return load_model(path, dtype="bfloat16", expert_cache=cache, **options)  # type: ignore[arg-type]


def banks(model: DeepseekV41) -> list[Tensor]:
    found = []
    for block in [*model.blocks, *(model.draft.stages if model.draft is not None else [])]:
        experts = block.experts.weights.experts
        assert isinstance(experts, ShuffledExperts)
        for half in (experts.routed.up, experts.routed.down):
            found += [half.codes, half.scales, half.factors]
    return found


def same(one: DeepseekV41, other: DeepseekV41) -> bool:
    pairs = list(zip(banks(one), banks(other), strict=True))
    return all(torch.equal(a, b) for a, b in pairs)


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*.experts"))


def test_the_second_load_reads_what_the_first_one_laid_out(checkpoint: Path, cache: Path, caplog, monkeypatch) -> None:
    plain = loaded(checkpoint, drafts=True)
    assert same(loaded(checkpoint, cache, drafts=True), plain)
    assert "0 layers read" in caplog.text and "5 written" in caplog.text
    assert [file.name for file in files(cache)] == [
        *(f"layers.{n}.ffn.experts" for n in range(2)),
        *(f"mtp.{n}.ffn.experts" for n in range(3)),
    ]
    assert not list(cache.glob("*/.*"))  # nothing temporary is left

    def refuse(*args: object) -> None:
        raise AssertionError("an expert was laid out again")

    monkeypatch.setattr(ShuffledBank, "write", refuse)
    caplog.clear()
    again = loaded(checkpoint, cache, drafts=True)
    assert same(again, plain)
    assert "5 layers read" in caplog.text and "0 written" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with pytest.raises(AssertionError, match="laid out again"):
        loaded(checkpoint)  # without the cache it would have been


def test_rounded_groups_are_told_of_from_the_cache_too(checkpoint: Path, cache: Path, monkeypatch, caplog) -> None:
    write = ShuffledBank.write
    monkeypatch.setattr(ShuffledBank, "write", lambda self, *args: write(self, *args) + 2)  # as if two were, each time
    for _ in range(2):
        caplog.clear()
        loaded(checkpoint, cache)
        assert "12 of " in caplog.text and "FP4 groups of 32" in caplog.text
        monkeypatch.undo()
        monkeypatch.setattr(ShuffledBank, "write", write)


def damage_end(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def damage_middle(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def damage_head(file: Path) -> None:
    file.write_bytes(b"DIEXPERT" + (1 << 60).to_bytes(8, "little") + file.read_bytes()[16:])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (damage_end, "bytes instead of"),
        (damage_middle, "its bytes are not those that were written"),
        (damage_head, "its head cannot be read"),
        (empty, "empty"),
    ],
)
def test_a_file_that_was_damaged_is_told_of_and_made_anew(checkpoint: Path, cache: Path, caplog, harm, why) -> None:
    plain = loaded(checkpoint, cache)
    before = files(cache)[0].read_bytes()
    harm(files(cache)[0])
    caplog.clear()
    assert same(loaded(checkpoint, cache), plain)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert why in warning.getMessage() and str(files(cache)[0]) in warning.getMessage()
    assert "1 layers read" in caplog.text and "1 written" in caplog.text
    assert files(cache)[0].read_bytes() == before


def test_another_checkpoint_has_files_of_its_own_and_a_foreign_one_is_not_believed(
    checkpoint: Path, cache: Path, tmp_path: Path, caplog
) -> None:
    other = tmp_path / "other"
    write_random_checkpoint(other, preset("tiny", layers=2, experts=3, drafts=True), seed=7)
    loaded(checkpoint, cache)
    expected = loaded(other)
    assert not same(loaded(checkpoint), expected)
    assert same(loaded(other, cache), expected)
    assert len({file.parent for file in files(cache)}) == 2
    mine, theirs = sorted(
        {file.parent for file in files(cache)}, key=lambda f: f != ExpertCache(cache, other).directory
    )
    shutil.copy(theirs / "layers.0.ffn.experts", mine / "layers.0.ffn.experts")
    caplog.clear()
    assert same(loaded(other, cache), expected)
    assert "it is of something else: model" in caplog.text
    shutil.copy(mine / "layers.1.ffn.experts", mine / "layers.0.ffn.experts")
    caplog.clear()
    assert same(loaded(other, cache), expected)
    assert "it is of something else: name 'layers.1.ffn', not 'layers.0.ffn'" in caplog.text


def test_a_directory_that_cannot_be_used_is_refused_before_anything_is_read(
    checkpoint: Path, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("deepinfer.model.load.CheckpointSource", None)  # whoever reads a tensor would call it
    with pytest.raises(ValueError, match=r"^expert_cache: .*file cannot be written to: "):
        loaded(checkpoint, tmp_path / "file")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(expert_cache.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"^expert_cache: .* has 0\.00 GiB free, the experts .* take 0\.00 GiB; make"):
        loaded(checkpoint, tmp_path / "full")


def test_a_disk_that_fills_up_meanwhile_costs_the_cache_and_not_the_model(
    checkpoint: Path, cache: Path, monkeypatch, caplog
) -> None:
    plain = loaded(checkpoint)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert same(loaded(checkpoint, cache), plain)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "nor will more be" in warning.getMessage() and "No space left" in warning.getMessage()
    assert not files(cache) and not list(cache.glob("*/.*"))


def test_what_a_killed_load_left_does_not_fill_the_disk_for_good(checkpoint: Path, cache: Path, caplog) -> None:
    plain = loaded(checkpoint, cache)
    one, other = files(cache)
    abandoned = one.with_name(f".{one.name}.abcdefgh")
    one.rename(abandoned)
    caplog.clear()
    assert same(loaded(checkpoint, cache), plain)
    assert "GiB of a killed process's files removed" in caplog.text and "1 layers read" in caplog.text
    assert files(cache) == [one, other] and not abandoned.exists()


def test_the_size_of_a_bank_is_known_before_it_is_made() -> None:
    bank = ShuffledBank.empty(3, 192, 256, "cpu")
    assert bank_bytes(3, 192, 256) == bank.up.nbytes + bank.down.nbytes


def test_checks_cover_every_byte_whatever_the_pieces(monkeypatch) -> None:
    parts = [torch.arange(n, dtype=torch.uint8).numpy() for n in (7, 100, 0, 33)]
    monkeypatch.setattr(expert_cache, "PIECE", 16)
    checks = expert_cache._checks(parts)
    assert len(checks) == -(-140 // 16)
    for place in (0, 6, 7, 106, 139):
        whole = torch.cat([torch.from_numpy(part) for part in parts]).clone()
        whole[place] ^= 1
        assert expert_cache._checks([whole.numpy()]) != checks
    assert expert_cache._checks([torch.cat([torch.from_numpy(part) for part in parts]).numpy()]) == checks


def test_the_layout_that_files_are_named_by_is_that_of_the_kernels() -> None:
    """The bytes of a known matrix. Whoever changes the order in which experts are laid out raises LAYOUT with it."""
    packed = (torch.arange(64 * 128) * 7919 % 251).to(torch.uint8).view(64, 128)
    scales = (115 + torch.arange(64 * 8) * 31 % 10).to(torch.uint8).view(64, 8)
    codes, steps, factors, _ = shuffle(packed, scales)
    checks = expert_cache._checks([codes.view(-1).numpy(), steps.view(-1).numpy(), factors.view(torch.uint8).numpy()])
    assert (expert_cache.LAYOUT, checks) == (1, ["2d8bb487"])


def test_a_directory_that_cannot_even_be_looked_at_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.model.expert_cache.model_digest", lambda *_: bytes(32))
    with pytest.raises(ValueError, match=r"^expert_cache: .* cannot be written to"):
        ExpertCache(tmp_path / ("x" * 300), tmp_path).check([("layer", 1)])
