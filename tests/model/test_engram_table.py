"""Engram rows come from the map one by one; the table itself is never loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from checkpoint_tools import poke

from deepinfer.kernels.reference.quant import e8m0_to_float
from deepinfer.model.engram_table import EngramTable
from deepinfer.model.presets import preset
from deepinfer.model.random_checkpoint import write_random_checkpoint
from deepinfer.model.safetensors_header import StoredTensor
from deepinfer.model.weights import CheckpointError, CheckpointReader

PREFIX = "layers.1.engram.embed"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engram") / "checkpoint"
    write_random_checkpoint(directory, preset("tiny", layers=2, experts=3))
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_codes_times_scales_exactly(checkpoint: Path, dtype: torch.dtype) -> None:
    with CheckpointReader(checkpoint) as reader:
        codes, scales = reader.read_pair(PREFIX)
        table = reader.table(PREFIX)
        ids = torch.tensor([[0, 5, 5], [table.num_rows - 1, 3, 0]])
        rows = table.rows(ids, dtype)
    expected = codes.float() * e8m0_to_float(scales).repeat_interleave(32, dim=1)
    assert (rows.shape, rows.dtype) == ((2, 3, 64), dtype)
    assert torch.equal(rows.float(), expected[ids])
    assert table.num_rows == len(codes) == 660


def test_rows_of_no_ids_are_empty(checkpoint: Path) -> None:
    with CheckpointReader(checkpoint) as reader:
        assert reader.table(PREFIX).rows(torch.empty(0, 6, dtype=torch.int64)).shape == (0, 6, 64)


def test_rows_outlive_the_reader(checkpoint: Path) -> None:
    with CheckpointReader(checkpoint) as reader:
        table = reader.table(PREFIX)
    assert torch.isfinite(table.rows(torch.arange(660))).all()


@pytest.mark.parametrize("wrong", [-1, 660])
def test_row_outside_the_table_is_refused(checkpoint: Path, wrong: int) -> None:
    with CheckpointReader(checkpoint) as reader, pytest.raises(IndexError, match="660 rows"):
        reader.table(PREFIX).rows(torch.tensor([0, wrong]))


@pytest.mark.parametrize(("part", "bad"), [("weight", b"\x7f"), ("scale", b"\xff")])
def test_nan_is_found_when_its_row_is_read(tmp_path: Path, part: str, bad: bytes) -> None:
    directory = tmp_path / "checkpoint"
    write_random_checkpoint(directory, preset("tiny", layers=2, experts=3))
    width = 64 if part == "weight" else 2
    poke(directory / "model.safetensors", f"{PREFIX}.{part}", bad, at=7 * width + 1)
    with CheckpointReader(directory) as reader:
        table = reader.table(PREFIX)
        table.rows(torch.tensor([6, 8]))
        with pytest.raises(CheckpointError, match=PREFIX):
            table.rows(torch.tensor([6, 7, 8]))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc/self/smaps")
def test_engram_table_is_never_loaded_whole(tmp_path: Path) -> None:
    rows, dim = 16_000_057, 256  # one hash column of the release: 4.1 GB, as a file of holes
    file = tmp_path / "table.bin"
    file.touch()
    os.truncate(file, rows * (dim + dim // 32))
    table = EngramTable(
        "table",
        StoredTensor(file, "F8_E4M3", (rows, dim), 0, rows * dim),
        StoredTensor(file, "F8_E8M0", (rows, dim // 32), rows * dim, rows * dim // 32),
    )
    ids = torch.randint(0, rows, (1000, 3), generator=torch.Generator().manual_seed(0))
    assert not table.rows(ids).any()
    # 3000 rows touch at most 2 pages of codes and 1 of scales each: 37 MB, under 1% of the table
    maps = Path("/proc/self/smaps").read_text().split("\n")
    resident = 0
    for number, line in enumerate(maps):
        if line.endswith(str(file)):
            resident += next(int(re.findall(r"\d+", later)[0]) for later in maps[number:] if later.startswith("Rss:"))
    assert 0 < resident * 1024 <= 3000 * 3 * 4096
