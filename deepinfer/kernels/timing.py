"""Times of operations on a device, and what the device does at best: the rates that figures are held against.

On a GPU: CUDA graphs and events. On a CPU: the clock, so that everything that measures can be tried there.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

REPLAYS = 21  # the figure is the median of so many
GRAPH_US = 400.0  # a graph lasts at least about so long: shorter ones are timed by their start
MOST_LAUNCHES = 96

Run = Callable[[int], object]


@dataclass(frozen=True)
class Rates:
    """What a device did at best: bytes/s (read + write of an elementwise sum) and FLOP/s of a large product."""

    copy: float
    bf16: float
    fp8: float

    def seconds(self, nbytes: float, flops: float = 0, rate: str = "copy") -> float:
        """The least time that bytes and operations allow, whichever is longer. rate: "bf16" or "fp8", or "copy" where
        only bytes count."""
        return max(nbytes / self.copy, flops / (math.inf if rate == "copy" else getattr(self, rate)))


@dataclass(frozen=True)
class Time:
    """Microseconds of one launch."""

    us: float  # median
    least_us: float
    most_us: float
    launches: int  # of a replay


def time_launches(run: Run, copies: int, device: torch.device, replays: int = REPLAYS) -> Time:
    """run(copy) launches an operation on one of `copies` copies of its inputs; on a GPU it is captured."""
    if device.type != "cuda":
        run(0)
        times = [1e6 * wall_seconds(partial(run, number % copies), device) for number in range(max(replays, 1))]
        return Time(statistics.median(times), min(times), max(times), 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for copy in range(min(2, copies)):  # compiles, and fills the allocator's pool
            run(copy)
    torch.cuda.current_stream().wait_stream(stream)
    launches = max(2, copies)
    graph = _captured(run, launches, copies)
    _replay_us(graph, launches, 2)
    rough = min(_replay_us(graph, launches, 3))
    wanted = min(MOST_LAUNCHES, int(GRAPH_US / rough) + 1)
    if wanted > launches:
        launches = -(-wanted // copies) * copies
        graph = _captured(run, launches, copies)
        _replay_us(graph, launches, 3)
    times = _replay_us(graph, launches, replays)
    return Time(statistics.median(times), min(times), max(times), launches)


def _captured(run: Run, launches: int, copies: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(launches):
            run(number % copies)
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph, launches: int, replays: int) -> list[float]:
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / launches)
    return times


def synchronize(device: torch.device) -> None:
    """Until the device has done everything that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds by the clock, from an idle device to an idle device."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begin


def allocated_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes that torch's tensors take on a GPU, and the most that they ever took; 0, 0 on a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


@dataclass(frozen=True)
class Occupation:
    """What a device did from its first to its last kernel of a trace."""

    span_s: float
    busy_s: float  # at least one kernel or copy ran
    kernels: dict[str, tuple[int, float]]  # name -> how often, seconds in all; the longest first

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy_s / self.span_s if self.span_s else 0.0


def occupation(run: Callable[[], object], device: torch.device, skip: float = 0.0) -> Occupation | None:
    """Traces `run` with torch's profiler. None where there is no device to trace. skip: share of the launches, the
    first ones, that is left out: a device that comes from idleness waits longer than one that is at it."""
    if device.type != "cuda":
        return None
    synchronize(device)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        run()
        synchronize(device)
    intervals = sorted((_interval(event) for event in trace.events() if _is_kernel(event)), key=lambda one: one[1])
    return occupied(intervals[round(skip * len(intervals)) :])


def _is_kernel(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.elapsed_us() > 0


def _interval(event: Any) -> tuple[str, float, float]:
    return event.name, event.time_range.start, event.time_range.end


def occupied(intervals: list[tuple[str, float, float]]) -> Occupation:
    """Of kernels (name, begin and end in microseconds) in any order."""
    busy = 0.0
    reached = -math.inf
    kernels: dict[str, tuple[int, float]] = {}
    for name, begin, end in sorted(intervals, key=lambda interval: interval[1]):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
        count, seconds = kernels.get(name, (0, 0.0))
        kernels[name] = count + 1, seconds + 1e-6 * (end - begin)
    span = reached - min((begin for _, begin, _ in intervals), default=reached)
    ordered = dict(sorted(kernels.items(), key=lambda item: -item[1][1]))
    return Occupation(1e-6 * span if intervals else 0.0, 1e-6 * busy, ordered)


def measured_rates(device: torch.device) -> Rates:
    """bytes/s of an elementwise sum of 1 GiB (read and written), FLOP/s of torch's products 8192^3 in bfloat16 and in
    FP8: the better of its two ways of accumulating. On a CPU of smaller ones in float32, which serve for all."""
    if device.type != "cuda":
        copy, product = _copy_rate(device, 1 << 22), _product_rate(device, 256, torch.float32)
        return Rates(copy, product, product)
    return Rates(_copy_rate(device, 1 << 28), _product_rate(device, 8192, torch.bfloat16), _fp8_rate(device, 8192))


def _copy_rate(device: torch.device, numbers: int) -> float:
    source = torch.ones(numbers, device=device)  # on a GPU, with the target, 36 times the second-level cache
    target = torch.empty_like(source)
    return 1e6 * 2 * source.nbytes / time_launches(lambda copy: torch.add(source, 1.0, out=target), 1, device).us


def _product_rate(device: torch.device, size: int, dtype: torch.dtype) -> float:
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 1e6 * 2 * size**3 / time_launches(lambda copy: torch.mm(left, right.t()), 1, device).us


def _fp8_rate(device: torch.device, size: int) -> float:
    left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    row, column = torch.ones(size, 1, device=device), torch.ones(1, size, device=device)

    def product(fast: bool) -> Run:
        return lambda copy: torch._scaled_mm(
            left, right.t(), scale_a=row, scale_b=column, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return 1e6 * 2 * size**3 / min(time_launches(product(fast), 1, device).us for fast in (False, True))
