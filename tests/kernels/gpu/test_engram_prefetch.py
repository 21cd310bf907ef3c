"""Engram rows on their way to the device: both placements give Q8 of what the table's own reader gives."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from twins import DEVICE

from deepinfer.kernels.triton.quantize import quantize_rows
from deepinfer.model.engram_prefetch import EngramPrefetch, choose_placement
from deepinfer.model.engram_table import EngramTable
from deepinfer.model.page_locked import PageLocked, available_bytes
from deepinfer.model.safetensors_header import CheckpointError, StoredTensor

COLUMNS, HEAD, ROWS = 6, 64, 300
LAYERS = (1, 14)
PLACEMENTS = ["pinned", "mapped"]


def stored_table(folder: Path, seed: int, *, nan_row: int | None = None) -> EngramTable:
    """A mapped table in a file, its bytes at an odd place, as behind a safetensors header."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, (ROWS, HEAD), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 3
    if nan_row is not None:
        codes[nan_row, 5] = 0x7F
    scales = random.integers(110, 125, (ROWS, HEAD // 32), dtype=np.uint8)
    parts = []
    for name, dtype, part in (("codes", "F8_E4M3", codes), ("scales", "F8_E8M0", scales)):
        file = folder / f"{name}{seed}"
        file.write_bytes(b"head of 13 by" + part.tobytes())
        parts.append(StoredTensor(file, dtype, part.shape, 13, part.nbytes))
    return EngramTable(f"layers.{seed}.engram.embed", *parts)


@pytest.fixture
def tables(tmp_path: Path) -> dict[int, EngramTable]:
    return {layer: stored_table(tmp_path, layer) for layer in LAYERS}


def some_rows(tokens: int, seed: int) -> dict[int, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {layer: torch.randint(0, ROWS, (tokens, COLUMNS), generator=g) for layer in LAYERS}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("on_host", [True, False])
def test_rows_are_the_tables_in_the_order_of_the_steps(
    tables: dict[int, EngramTable], placement: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer.model.engram_prefetch.GATHER_ROWS", 5)  # several threads a step, a short end
    prefetch = EngramPrefetch(tables, columns=COLUMNS, device=DEVICE, placement=placement)
    steps = [some_rows(tokens, seed) for seed, tokens in enumerate((3, 1, 7))]
    for ids in steps[:2]:  # two ahead
        prefetch.start({layer: rows if on_host else rows.to(DEVICE) for layer, rows in ids.items()})
    for number, ids in enumerate(steps):
        for layer in LAYERS:
            got = prefetch.take(layer)
            values = tables[layer].rows(ids[layer]).flatten(1).to(DEVICE)
            for mine, its in zip(got, quantize_rows(values), strict=True):
                assert torch.equal(mine.float(), its.float())
        if number == 0:
            prefetch.start(steps[2])
    prefetch.check()
    assert prefetch.token_bytes(1) == COLUMNS * (HEAD + HEAD // 32)
    assert prefetch.bytes_read == dict.fromkeys(LAYERS, 11 * prefetch.token_bytes(1))
    assert prefetch.capturable == (placement == "pinned")
    prefetch.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_nan_in_a_row_that_was_read_is_an_error_at_the_end_of_the_step(tmp_path: Path, placement: str) -> None:
    tables = {layer: stored_table(tmp_path, layer, nan_row=7 if layer == 14 else None) for layer in LAYERS}
    prefetch = EngramPrefetch(tables, columns=COLUMNS, device=DEVICE, placement=placement)
    for reads in (False, True):
        ids = some_rows(4, 3)
        for rows in ids.values():
            rows[rows == 7] = 8
        if reads:
            ids[14][2, 1] = 7
        prefetch.start(ids)
        for layer in LAYERS:
            assert prefetch.take(layer).scale.isfinite().all()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        if reads:
            with pytest.raises(CheckpointError, match=r"layers\.14.*NaN"):
                prefetch.check()
        prefetch.check()  # said once
    prefetch.close()


def test_rows_outside_the_table(tables: dict[int, EngramTable]) -> None:
    ids = some_rows(2, 1)
    ids[1][0, 0] = ROWS
    mapped = EngramPrefetch(tables, columns=COLUMNS, device=DEVICE, placement="mapped")
    with pytest.raises(IndexError, match=r"layers\.1\..*300"):
        mapped.start(ids)
    mapped.close()
    pinned = EngramPrefetch(tables, columns=COLUMNS, device=DEVICE, placement="pinned")
    pinned.start(ids)
    for layer in LAYERS:
        pinned.take(layer)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(CheckpointError, match="hash and the config disagree"):
        pinned.check()
    with pytest.raises(RuntimeError, match="before `start`"):
        pinned.take(1)
    pinned.close()


def test_threads_gather_before_anybody_takes(tables: dict[int, EngramTable]) -> None:
    prefetch = EngramPrefetch(tables, columns=COLUMNS, device=DEVICE, placement="mapped", threads=2)
    prefetch.start(some_rows(200, 9))
    deadline = time.monotonic() + 20
    while not all(pending[0].copied.done() for pending in prefetch._pending.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    prefetch.close()


def test_tables_larger_than_memory_stay_mapped(tables: dict[int, EngramTable], monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_bytes() > 1 << 20
    assert choose_placement(tables) == "pinned"
    size = sum(part.nbytes for table in tables.values() for part in (table._codes, table._scales))
    monkeypatch.setattr("deepinfer.model.engram_prefetch.available_bytes", lambda: int(size / 0.81))
    assert choose_placement(tables) == "mapped"
    for table in tables.values():  # in memory already: nothing is to be copied
        table._codes, table._scales = table._codes.copy(), table._scales.copy()
    assert choose_placement(tables) == "pinned"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_a_graph_reads_pinned_rows_anew_at_every_replay(tables: dict[int, EngramTable]) -> None:
    prefetch = EngramPrefetch(tables, columns=COLUMNS, device=DEVICE, placement="pinned")
    ids = {layer: rows.to(DEVICE) for layer, rows in some_rows(5, 1).items()}

    def step() -> list[torch.Tensor]:
        prefetch.start(ids)
        return [part for layer in LAYERS for part in prefetch.take(layer)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (2, 3):
        for layer, rows in some_rows(5, seed).items():
            ids[layer].copy_(rows)
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert torch.equal(got.float(), expected.float())
    torch.cuda.synchronize()
    prefetch.close()


def test_where_the_system_locks_no_memory_auto_keeps_tables_mapped_and_says_so(
    tables: dict[int, EngramTable], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused at the second table: what was locked before is given back."""
    locked: list[int] = []
    pin, unpin = EngramPrefetch._pin, EngramPrefetch._unpin

    def refuse(prefetch: EngramPrefetch, on_gpu: bool) -> None:
        pin(prefetch, on_gpu)
        locked.append(len(prefetch._pinned))
        raise RuntimeError("94.5 GiB of host memory could not be page-locked")

    monkeypatch.setattr(EngramPrefetch, "_pin", refuse)
    monkeypatch.setattr(
        EngramPrefetch, "_unpin", lambda prefetch: (unpin(prefetch), locked.append(len(prefetch._pinned)))
    )
    with pytest.raises(RuntimeError, match="could not be page-locked"):
        EngramPrefetch(tables, columns=COLUMNS, device=DEVICE, placement="pinned")
    assert locked == [2, 0]
    prefetch = EngramPrefetch(tables, columns=COLUMNS, device=DEVICE)
    assert prefetch.placement == "mapped" and not prefetch.capturable and locked == [2, 0, 2, 0]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "could not be page-locked" in warning and "decode step waits for the host" in warning
    rows = some_rows(3, 4)
    prefetch.start(rows)
    for layer in LAYERS:
        assert len(prefetch.take(layer).codes) == 3
    prefetch.close()


def test_memory_that_is_not_there_for_a_copy_is_told_of_as_such(
    tables: dict[int, EngramTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("deepinfer.model.page_locked.mmap.mmap", none)
    with pytest.raises(RuntimeError, match=r"no 0\.0 GiB of host memory for a copy: .*Cannot allocate memory"):
        PageLocked(tables[1]._codes)
