"""Where attention takes the kernel in CUDA C++, and what is said where it cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from deepinfer.kernels import gpu_report, select
from deepinfer.kernels.cuda import attention
from deepinfer.kernels.cuda.build import CudaBuildError
from deepinfer.kernels.reference.records import window_bytes
from deepinfer.kernels.select import attention as select_attention
from deepinfer.kernels.select import backends
from deepinfer.model import load_model


def not_built(name: str) -> None:
    raise CudaBuildError("no compiler\nat all")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A Hopper GPU as far as `problem` asks for one."""
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(attention, "_devices", {})
    monkeypatch.delenv("DEEPINFER_CUDA_KERNELS", raising=False)
    monkeypatch.setattr(attention, "built", not_built)
    attention._kernel.cache_clear()
    yield torch.device("cuda", 0)
    attention._kernel.cache_clear()


def test_the_switch_turns_them_off_before_anything_is_compiled(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_CUDA_KERNELS", "0")
    assert attention.problem(hopper) == "DEEPINFER_CUDA_KERNELS=0 switches the kernels in CUDA C++ off"
    monkeypatch.setattr(attention, "_devices", {})
    monkeypatch.setenv("DEEPINFER_CUDA_KERNELS", "perhaps")
    assert "DEEPINFER_CUDA_KERNELS='perhaps': use 1 or 0" in gpu_report.cuda_fact(hopper)[2]
    monkeypatch.setenv("DEEPINFER_CUDA_KERNELS", "1")
    assert attention.problem(hopper) == "no compiler\nat all"


def test_a_reason_is_logged_once_and_told_by_doctor(hopper: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    assert attention.problem(hopper) == attention.problem(hopper) == "no compiler\nat all"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "runs in Triton on cuda:0" in record.getMessage()
    what, state, detail = gpu_report.cuda_fact(hopper)
    assert (what, state) == ("cuda c++", "note") and detail.endswith("in Triton, slower: no compiler at all")


def test_other_devices_are_told_why_and_log_nothing(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blackwell = SimpleNamespace(major=10, minor=0, multi_processor_count=148)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: blackwell)
    assert attention.problem(hopper) == "it is made for compute capability 9.0, not for 10.0"
    assert attention.problem(torch.device("cpu")) == "it is made for CUDA devices, not for cpu"
    assert caplog.records == []


def test_the_line_at_start_says_which_attention_runs_and_builds_for_no_other_dtype(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "gpu_problem", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a Hopper")
    assert select.explain(hopper, torch.float32).startswith("reference operations")
    assert select.explain(torch.device("cpu"), torch.bfloat16).startswith("reference operations")
    assert attention._devices == {}
    fallback = "GPU kernels in Triton on a Hopper; not in CUDA C++: "
    assert select.explain(hopper, torch.bfloat16) == f"{fallback}no compiler at all"
    attention._devices[0] = "error: " * 1000
    assert len(select.explain(hopper, torch.bfloat16)) < 300
    attention._devices[0] = attention._Device(SimpleNamespace(), 132, (132,))  # type: ignore[arg-type]
    served = "GPU kernels in Triton, attention of 64 heads of 512 dims in CUDA C++, on a Hopper"
    assert select.explain(hopper, torch.bfloat16) == served


def test_weights_for_cpu_kernels_are_refused_on_a_gpu_before_anything_is_built(hopper: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^weights='packed' needs the CPU kernels: they do not run on cuda:0$"):
        load_model("nowhere", device=str(hopper), dtype="bfloat16", weights="packed")
    assert attention._devices == {}


def test_queries_on_a_cpu_are_not_served() -> None:
    q = torch.zeros(1, attention.HEADS, attention.DIM, dtype=torch.bfloat16)
    pool = torch.zeros(4, attention.WINDOW_BYTES, dtype=torch.uint8)
    assert not attention.serves(q, pool, None)
    with pytest.raises(ValueError, match="not served"):
        attention.sparse_attention(q, pool, torch.zeros(1, 4, dtype=torch.int32), None, None, torch.zeros(64), 1.0)


def attend(q: torch.Tensor, pool: torch.Tensor, rows: int, keys: int, invariant: bool) -> torch.Tensor:
    lists, sink = torch.zeros(rows, keys, dtype=torch.int32), torch.zeros(q.shape[1])
    q = q.expand(rows, -1, -1)
    return select.sparse_attention(q, pool, lists, None, None, sink, 1.0, split=True, invariant=invariant)


@pytest.mark.parametrize("served", [False, True])
def test_where_it_serves_it_runs_but_for_a_few_rows_and_nothing_is_unpacked(
    monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    twin = SimpleNamespace(**vars(attention))
    twin.serves, twin.sparse_attention = lambda *_: served, lambda *_, invariant: "CUDA C++"
    with select.interpreted_gpu():
        monkeypatch.setattr(backends.gpu(), "cuda_attention", twin)
        monkeypatch.setattr(backends.gpu().attention, "sparse_attention", lambda *_, invariant: "Triton")
        q = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
        pool = torch.zeros(4, window_bytes(128), dtype=torch.uint8)
        many = q.expand(select_attention.UNPACKED_ROWS, -1, -1)
        assert select.unpacks_keys(many, pool) is not served
        assert not select.unpacks_keys(many[1:], pool)
        plan = [select.will_unpack(rows, 8, 128, q.device, q.dtype) for rows in (len(many), len(many) - 1)]
        assert plan == [not served, False]
        ran = [attend(q, pool, *case) for case in ((1, 640, True), (13, 640, False), (14, 640, False), (1, 192, False))]
    assert ran == ["CUDA C++", "Triton", "CUDA C++", "CUDA C++"] if served else ["Triton"] * 4


@pytest.mark.parametrize("clusters", [(), (132, 66, 39, 30, 22, 17, 15, 15)])  # the second are an H200's
def test_rows_are_shared_by_as_few_blocks_as_make_parts_short(clusters: tuple[int, ...]) -> None:
    held = clusters or [132 // n for n in range(1, 9)]
    for rows in range(1, 140):
        for tiles in range(1, 14):
            parts = attention.parts_of(rows, tiles, 132, clusters)
            allowed = [n for n in range(1, 9) if n == 1 or (2 * n <= tiles and rows <= held[n - 1])]
            longest = min(-(-tiles // n) for n in allowed)
            assert parts == min(n for n in allowed if -(-tiles // n) == longest)
            assert (parts - 1) * longest < tiles  # the last part is not empty
    found = [attention.parts_of(rows, 10, 132, clusters) for rows in (1, 22, 23, 26, 30, 33, 39, 40, 44, 66, 67)]
    assert found == ([5, 5, 4, 4, 4, 3, 3, 2, 2, 2, 1] if clusters else [5, 5, 5, 5, 4, 4, 3, 3, 3, 2, 1])
