"""Times and rates: the sums on any machine, the clock's truth on a GPU."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels import timing

CPU = torch.device("cpu")


def test_occupation_counts_overlapping_kernels_once() -> None:
    intervals = [("b", 105.0, 110.0), ("a", 100.0, 104.0), ("a", 108.0, 120.0), ("c", 109.0, 111.0)]
    found = timing.occupied(intervals)
    assert found.span_s == pytest.approx(20e-6)
    assert found.busy_s == pytest.approx(19e-6)  # idle from 104 to 105 alone
    assert found.idle_share == pytest.approx(0.05)
    assert list(found.kernels) == ["a", "b", "c"]
    assert found.kernels["a"] == (2, pytest.approx(16e-6))
    assert timing.occupied([]).idle_share == 0.0


def test_limit_is_the_longer_of_bytes_and_operations() -> None:
    rates = timing.Rates(copy=4e12, bf16=800e12, fp8=1200e12)
    assert rates.seconds(8e6) == pytest.approx(2e-6)
    assert rates.seconds(8e6, 4.8e9, "fp8") == pytest.approx(4e-6)
    assert rates.seconds(8e6, 4.8e9, "bf16") == pytest.approx(6e-6)
    assert rates.seconds(8e6, 4.8e9, "copy") == pytest.approx(2e-6)


def test_a_cpu_has_rates_and_times_but_nothing_to_trace() -> None:
    rates = timing.measured_rates(CPU)
    assert rates.copy > 1e7 and rates.bf16 == rates.fp8 > 1e7
    seen: list[int] = []
    time = timing.time_launches(seen.append, 3, CPU, replays=5)
    assert seen == [0, 0, 1, 2, 0, 1]
    assert time.least_us <= time.us <= time.most_us
    assert timing.occupation(lambda: None, CPU) is None
    assert timing.allocated_bytes(CPU) == (0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_time_of_a_copy_is_near_the_copy_rate_and_its_kernel_is_seen() -> None:
    device = torch.device("cuda")
    rate = timing.measured_rates(device).copy
    source = torch.ones(1 << 27, device=device)
    time = timing.time_launches(lambda copy: source + 1.0, 1, device)
    assert 0.8 < time.us / (1e6 * 2 * source.nbytes / rate) < 1.3
    seen = timing.occupation(lambda: source + 1.0, device)
    assert seen is not None
    assert sum(count for count, _ in seen.kernels.values()) == 1
    assert seen.idle_share == pytest.approx(0.0)
