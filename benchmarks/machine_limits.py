"""What this machine can do at best: matrix products by torch, and reads of memory. Also run as a script."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from step_cost import Product

PAIRS = 64  # gathered products are timed on at most so many rows at once, as the attention kernels work


def best_seconds(run: Callable[[], object], budget_s: float, least: int = 5) -> float:
    """The fastest of at least `least` runs, after one that is not counted, in about `budget_s` seconds. The fastest and
    not the median: a limit that a busy neighbour has slowed down would flatter the figure beside it."""
    run()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < least or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def product_seconds(product: Product, budget_s: float = 0.1) -> float:
    """Seconds that torch takes at best for one of a product's `times`, in float32: as one batched product, or one by
    one where that is faster."""
    batch = min(product.batch, PAIRS)
    left = torch.randn(batch, product.m, product.k)
    right = torch.randn(batch, product.k, product.n)
    out = torch.empty(batch, product.m, product.n)
    single = best_seconds(lambda: torch.mm(left[0], right[0], out=out[0]), budget_s)
    if batch == 1:
        return single
    batched = best_seconds(lambda: torch.bmm(left, right, out=out), budget_s) / batch
    return min(single, batched) * product.batch


def read_bandwidth(nbytes: int, budget_s: float = 0.5) -> float:
    """Bytes per second: the best of a sum and of a copy (whose bytes count twice) over a buffer of this size. A buffer
    that fits into a cache is read at the cache's speed, as a step of the same size would be."""
    source = torch.ones(max(nbytes // 4, 1 << 16))
    target = torch.empty_like(source)
    summed = source.nbytes / best_seconds(lambda: source.sum(), budget_s)
    half = source[: source.numel() // 2], target[: source.numel() // 2]  # both buffers together have the size
    copied = 2 * half[0].nbytes / best_seconds(lambda: half[1].copy_(half[0]), budget_s)
    return max(summed, copied)


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Prints the machine, its read bandwidth at three sizes and its matrix rate at three."""
    print(f"{cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for size in (1 << 20, 1 << 24, 1 << 28):
        print(f"read {size >> 20:4d} MiB: {read_bandwidth(size) / 1e9:6.1f} GB/s")
    for m in (1, 32, 2048):
        product = Product("square", 1, m, 1024, 1024)
        print(f"[{m}, 1024] x [1024, 1024]: {product.flops / product_seconds(product, 0.3) / 1e9:6.1f} GFLOP/s")


if __name__ == "__main__":
    main()
