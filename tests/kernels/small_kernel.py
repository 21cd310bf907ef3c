"""A small kernel in CUDA C++ with a header, a define, shared memory and clusters, for the tests of `kernels/cuda`."""

from __future__ import annotations

from pathlib import Path

KERNEL = """
#include <stdint.h>
#include "sum.cuh"
struct Params { int* out; int64_t count; int value; float more; };
extern "C" __global__ void fill(const Params p) {
  extern __shared__ int box[];
  asm volatile("griddepcontrol.wait;" ::: "memory");  // it may have been started early
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  box[threadIdx.x] = sum(p.value, 1000 * rank);
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < p.count) p.out[at] = box[threadIdx.x] + int(p.more);
}
"""
HEADER = "__device__ inline int sum(int a, int b) { return a + b + EXTRA; }\n"
PARAMS, THREADS, SHARED = "Qqif", 64, 200_000


def write(folder: Path) -> None:
    """Its two files."""
    (folder / "fill.cu").write_text(KERNEL)
    (folder / "sum.cuh").write_text(HEADER)
