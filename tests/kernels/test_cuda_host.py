"""What attention in CUDA C++ hands to its kernel, and what it refuses, seen on a CPU: launches are recorded."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.cuda import attention
from deepinfer.kernels.cuda.attention import Kernel, sparse_attention

CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15)  # an H200's


class Recorder:
    """In place of a loaded kernel: keeps what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, dict[str, Any]]] = []

    def launch(self, device: int, blocks: int, cluster: int, *values: float) -> None:
        names = (
            *("q", "window_pool", "window_list", "entry_pool", "entry_list", "sink", "out"),
            *("window_stride", "entry_stride", "rows", "window", "selected", "window_step", "entry_step"),
            *("parts", "scale"),
        )
        struct.pack(attention.PARAMS, *values)  # of types that fit
        self.launches.append((blocks, cluster, dict(zip(names, values, strict=True))))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(attention, "serves", lambda *asked: True)
    monkeypatch.setattr(attention, "_devices", {-1: attention._Device(found, 132, CLUSTERS)})  # type: ignore[arg-type]
    return found


def call(rows: int = 16, window: Tensor | None = None, entries: Tensor | None = None, **changes: Any) -> Tensor:
    arguments = {
        "q": torch.zeros(rows, 64, 512, dtype=torch.bfloat16),
        "window_pool": torch.zeros(4, 528, dtype=torch.uint8),
        "window_indices": torch.zeros(rows, 128, dtype=torch.int32) if window is None else window,
        "kv_pool": torch.zeros(4, 288, dtype=torch.uint8),
        "kv_indices": torch.zeros(rows, 512, dtype=torch.int64) if entries is None else entries,
        "sink": torch.zeros(64),
        "scale": 0.5,
    }
    return sparse_attention(**{**arguments, **changes})


def test_indices_of_64_bits_and_slices_of_lists_are_told_in_words(recorder: Recorder) -> None:
    window = torch.zeros(16, 200, dtype=torch.int32)[:, :128]
    entries = torch.zeros(16, 700, dtype=torch.int64)[:, 100:612]
    call(window=window, entries=entries)
    _, _, told = recorder.launches[0]
    assert (told["window_stride"], told["window_step"], told["window"]) == (200, 1, 128)
    assert (told["entry_stride"], told["entry_step"], told["selected"]) == (1400, 2, 512)
    assert (told["window_list"], told["entry_list"]) == (window.data_ptr(), entries.data_ptr())
    assert told["scale"] == pytest.approx(0.5 * 1.4426950408889634 * 128)


def test_a_cluster_takes_a_row_and_a_lone_block_many(recorder: Recorder) -> None:
    call(rows=16)
    call(rows=300)
    call(rows=16, invariant=True)
    assert [(blocks, cluster, told["parts"]) for blocks, cluster, told in recorder.launches] == [
        (16 * 5, 5, 5),
        (132, 1, 1),
        (16, 1, 1),
    ]


def test_lists_without_compressed_keys_name_no_pool(recorder: Recorder) -> None:
    call(kv_pool=None, kv_indices=None)
    _, _, told = recorder.launches[0]
    assert (told["entry_pool"], told["entry_list"], told["selected"]) == (0, 0, 0)


def test_no_rows_and_no_places_launch_nothing(recorder: Recorder) -> None:
    assert call(rows=0).shape == (0, 64, 512)
    nothing = torch.zeros(2, 0, dtype=torch.int32)
    assert (call(rows=2, window=nothing, kv_pool=None, kv_indices=None) == 0).all()
    assert not recorder.launches


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"window_indices": torch.zeros(15, 128, dtype=torch.int32)}, r"window_indices: must be \[16, any\]"),
        ({"kv_indices": torch.zeros(1, 512, dtype=torch.int64)}, r"kv_indices: must be \[16, any\]"),
        ({"window_indices": torch.zeros(16, 128, 1, dtype=torch.int32)}, "window_indices: must be"),
        ({"window_indices": torch.zeros(16, dtype=torch.int32)}, "window_indices: must be"),
        ({"window_indices": torch.zeros(16, 128)}, "indices must be int32 or int64, not torch.float32"),
        ({"sink": torch.zeros(1)}, r"sink: must be \[64\], not \(1,\)"),
        ({"scale": 0.0}, "scale: must be a positive number"),
        ({"scale": float("nan")}, "scale: must be a positive number"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_launched(
    recorder: Recorder, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        call(**changes)
    assert not recorder.launches


def test_the_kernel_starts_while_the_one_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "built", lambda name: (b"image", "a compiler"))
    attention._kernel.cache_clear()
    kernel, compiler = attention._kernel()
    attention._kernel.cache_clear()
    assert isinstance(kernel, Kernel) and kernel._early
    assert compiler == "a compiler"


def test_few_rows_of_long_lists_are_left_to_triton() -> None:
    assert [attention.is_faster(rows, 10) for rows in (1, 13, 14, 400)] == [False, False, True, True]
    assert attention.is_faster(1, 3) and not attention.is_faster(1, 4)


def test_pools_that_lie_askew_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.zeros(5 * 528 + 1, dtype=torch.uint8)
    assert attention._is_pool(pool[: 4 * 528].view(4, 528), 528)
    assert not attention._is_pool(pool[1 : 1 + 4 * 528].view(4, 528), 528)  # 16 bytes are copied at once
