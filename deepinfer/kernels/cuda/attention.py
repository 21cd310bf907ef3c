"""`attention.cu` from Python: the released model's attention over packed records, on Hopper.

Same meaning, layouts and errors as `triton.attention`, which serves all other shapes and every machine on which this
kernel cannot be built. A list is cut among the blocks of a cluster where rows alone do not fill the device; they put
their parts together without a second launch.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.env import read_environment
from deepinfer.kernels.cuda.build import CudaBuildError, built
from deepinfer.kernels.cuda.driver import CudaError, Kernel
from deepinfer.kernels.reference.records import compressed_bytes, window_bytes

HEADS, DIM = 64, 512
SERVED = f"{HEADS} heads of {DIM} dims"  # for people
KEYS = 64  # a tile
THREADS = 512  # of a block, of which a multiprocessor holds one
SHARED_BYTES = 232_448  # all that a block of Hopper can have
MOST_PARTS = 8  # blocks of a portable cluster
PART_TILES = 2  # of a part, at least: to put parts together costs more than the second tile
FEW_ROWS, SHORT_TILES = 13, 3  # see `is_faster`
# Params of layout.cuh: 7 pointers, 2 strides, rows, window, selected, their steps, parts, scale, the structure's end.
PARAMS = "7Q2q6if4x"
LOG2E = 1.4426950408889634
KEY_SCALE = 128.0  # the kernel's keys carry 2^-7
CAPABILITY = (9, 0)  # sm_90a runs on nothing else
ALIGNMENT = 16  # bytes that are copied at once
WORDS = {torch.int32: 1, torch.int64: 2}  # 32-bit words of an index
WINDOW_BYTES, ENTRY_BYTES = window_bytes(DIM), compressed_bytes(DIM)

logger = logging.getLogger(__name__)


class _Device(NamedTuple):
    kernel: Kernel
    sms: int  # multiprocessors
    clusters: tuple[int, ...]  # of 1, 2, ... blocks that run at once


_lock = threading.Lock()
_devices: dict[int, _Device | str] = {}  # by torch's number: loaded there, or why not


def serves(q: Tensor, window_pool: Tensor, kv_pool: Tensor | None) -> bool:
    """Whether `sparse_attention` takes these: bf16 queries of 64 heads of 512 dims, contiguous pools of packed records,
    a device of compute capability 9.0 where the kernel could be built. The first question builds and loads it;
    RuntimeError if that is while a graph is captured."""
    if not q.is_cuda or q.dtype != torch.bfloat16 or q.shape[1:] != (HEADS, DIM) or q.data_ptr() % ALIGNMENT:
        return False
    if not _is_pool(window_pool, WINDOW_BYTES) or not (kv_pool is None or _is_pool(kv_pool, ENTRY_BYTES)):
        return False
    return isinstance(_device(q.get_device()), _Device)


def _is_pool(pool: Tensor, width: int) -> bool:
    return (
        pool.dtype == torch.uint8
        and pool.shape[1] == width
        and pool.is_contiguous()
        and pool.data_ptr() % ALIGNMENT == 0
    )


def problem(device: torch.device) -> str | None:
    """Why the kernel does not run on a device of any kind, None if it does. Builds and loads it."""
    if device.type != "cuda":
        return f"it is made for CUDA devices, not for {device.type}"
    found = _device(torch.cuda.current_device() if device.index is None else device.index)
    return found if isinstance(found, str) else None


def _device(index: int) -> _Device | str:
    found = _devices.get(index)
    if found is None:
        with _lock:
            if index not in _devices:
                _devices[index] = _prepared(index)
            found = _devices[index]
    return found


def _prepared(index: int) -> _Device | str:
    properties = torch.cuda.get_device_properties(index)
    capability = properties.major, properties.minor
    if capability != CAPABILITY:
        return f"it is made for compute capability 9.0, not for {capability[0]}.{capability[1]}"
    if not read_environment().cuda_kernels:
        off = "DEEPINFER_CUDA_KERNELS=0 switches the kernels in CUDA C++ off"
        logger.info("attention runs in Triton on cuda:%d: %s", index, off)
        return off
    try:
        kernel, _ = _kernel()
        kernel.load(index)
        clusters = tuple(kernel.clusters(index, blocks) for blocks in range(1, MOST_PARTS + 1))
    except (CudaBuildError, CudaError) as error:
        logger.warning("attention runs in Triton on cuda:%d, slower than in CUDA C++: %s", index, error)
        return str(error)
    return _Device(kernel, properties.multi_processor_count, clusters)


@functools.cache
def _kernel() -> tuple[Kernel, str]:
    """The kernel, and which compiler built it. CudaBuildError."""
    image, compiler = built("attention.cu")
    kernel = Kernel(image, "attention", params=PARAMS, threads=THREADS, shared_bytes=SHARED_BYTES, early=True)
    return kernel, compiler


def compiler() -> str:
    """Which compiler built the kernel, with its version. CudaBuildError."""
    return _kernel()[1]


def sparse_attention(
    q: Tensor,
    window_pool: Tensor,
    window_indices: Tensor,
    kv_pool: Tensor | None,
    kv_indices: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    invariant: bool = False,
) -> Tensor:
    """q bf16 [N, 64, 512] in split order over window_pool uint8 [R, 528] at window_indices [N, W], then kv_pool uint8
    [R2, 288] at kv_indices [N, K]; both or neither of the last two. -> bf16 [N, 64, 512] in split order.

    Indices int32 or int64, -1 = empty wherever it stands. sink float32 [64] joins the denominator unscaled and has no
    value. A row with no key gives exactly 0. Records that no index names are not read. Operands are FP16: queries
    beyond +-65,504 and window records of block scales above 2^14 (keys of seven million) give NaN, window records of
    block scales below 2^-8 an absolute error of 2^-18 an element.

    ValueError: shapes that `serves` refuses; lists, a sink or a scale that do not fit; tensors of two devices.

    How many parts a row's list is cut into depends on N. `invariant`: never more than one, so that a row's bits do not
    depend on the rows beside it.
    """
    if not serves(q, window_pool, kv_pool):
        raise ValueError(f"queries {q.dtype} {tuple(q.shape)} over these pools are not served (see `serves`)")
    device = q.get_device()
    ready = _devices[device]
    assert isinstance(ready, _Device)
    rows = len(q)
    if kv_pool is None or kv_indices is None:
        kv_pool = kv_indices = None
    _check(q, window_pool, window_indices, kv_pool, kv_indices, sink, scale)
    q, sink = q.contiguous(), sink.float().contiguous()
    window_indices, window_step = _words(window_indices)
    window, selected, entry_step, entry_stride = window_indices.shape[1], 0, 1, 0
    pool_at = list_at = 0
    if kv_pool is not None and kv_indices is not None:
        kv_indices, entry_step = _words(kv_indices)
        selected, entry_stride = kv_indices.shape[1], kv_indices.stride(0) * entry_step
        pool_at, list_at = kv_pool.data_ptr(), kv_indices.data_ptr()
    tiles = tiles_of(window_indices, kv_indices)
    if rows == 0 or tiles == 0:
        return torch.zeros_like(q)
    out = torch.empty_like(q)
    parts = 1 if invariant else parts_of(rows, tiles, ready.sms, ready.clusters)
    ready.kernel.launch(
        device,
        min(rows, ready.sms) if parts == 1 else rows * parts,  # a cluster takes one row, a lone block many
        parts,
        *(q.data_ptr(), window_pool.data_ptr(), window_indices.data_ptr(), pool_at, list_at),
        *(sink.data_ptr(), out.data_ptr(), window_indices.stride(0) * window_step, entry_stride),
        *(rows, window, selected, window_step, entry_step, parts, scale * LOG2E * KEY_SCALE),
    )
    return out


def _check(
    q: Tensor, window_pool: Tensor, window_indices: Tensor, kv_pool: Tensor | None, kv_indices: Tensor | None,
    sink: Tensor, scale: float,
) -> None:  # fmt: skip
    """ValueError for what the kernel would read past, or would take for something else."""
    for name, x in (("window_indices", window_indices), ("kv_indices", kv_indices)):
        if x is not None and (x.dim() != 2 or len(x) != len(q)):
            raise ValueError(f"{name}: must be [{len(q)}, any], a list a row of q, not {tuple(x.shape)}")
    if sink.shape != (HEADS,):
        raise ValueError(f"sink: must be [{HEADS}], not {tuple(sink.shape)}")
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"scale: must be a positive number, not {scale}")
    others = (window_pool, window_indices, kv_pool, kv_indices, sink)
    if any(x is not None and x.get_device() != q.get_device() for x in others):
        raise ValueError("q, pools, lists and sink must be on one device")


def tiles_of(window_indices: Tensor, kv_indices: Tensor | None) -> int:
    """Tiles of 64 keys that both lists of a row take."""
    return -(-window_indices.shape[1] // KEYS) - (0 if kv_indices is None else -kv_indices.shape[1] // KEYS)


def is_faster(rows: int, tiles: int) -> bool:
    """Than Triton's kernel, where a tile of a few rows has a program of its own and a second launch joins them: up to
    13 rows of 10 tiles run at once on an H200. There, lists of 10 tiles: 1 row 17 and 12 us, 8 rows 17 and 14, 16 rows
    18 and 19; of 2 tiles: 1 row 11 and 11, 64 rows 12 and 17. 9 to 15 rows and 3 to 9 tiles were not measured."""
    return rows > FEW_ROWS or tiles <= SHORT_TILES


def _words(indices: Tensor) -> tuple[Tensor, int]:
    """The list with neighbours side by side, and how many 32-bit words an index takes. ValueError: other integers."""
    step = WORDS.get(indices.dtype)
    if step is None:
        raise ValueError(f"indices must be int32 or int64, not {indices.dtype}")
    return (indices if indices.shape[1] < 2 or indices.stride(1) == 1 else indices.contiguous()), step


@functools.lru_cache(1024)
def parts_of(rows: int, tiles: int, sms: int, clusters: tuple[int, ...] = ()) -> int:
    """Blocks that share a row: the fewest whose longest part is as short as it can be while all rows run at once. Parts
    are of equal length but for the last.

    clusters: of 1, 2, ... blocks, as many as run at once. The multiprocessors of a cluster are neighbours, so an H200
    holds 39 of 3 and 22 of 5, not 44 and 26. Without them: as many as there are multiprocessors for.
    """
    held = clusters or tuple(sms // blocks for blocks in range(1, MOST_PARTS + 1))
    best = 1
    for parts in range(2, min(MOST_PARTS, tiles // PART_TILES) + 1):
        if rows <= held[parts - 1] and -(-tiles // parts) < -(-tiles // best):
            best = parts
    return best
