"""Records written by the kernels hold the bytes of the reference, rounding edges included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from twins import DEVICE, poisoned

from deepinfer.kernels.reference import quant, records
from deepinfer.kernels.triton.records import insert_compressed, insert_window

GROUPS = torch.tensor([1.0, -1.0, 0.0]).repeat(6)[:16]


def latents(width: int, seed: int = 0) -> Tensor:
    """bf16 [12, width]: values of every size, ties, zeros of both signs, groups whose FP4 scale is a denormal."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(12, width, generator=rng) * torch.exp(
        2 * torch.randn(12, width // 16, generator=rng)
    ).repeat_interleave(16, 1)
    x[1] *= 1e4
    x[2] *= 1e-3
    x[3] = 0.0
    x[4] = -0.0
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(2)  # ties of every pair of neighbours
    x[5] = (steps * torch.tensor([1.0, -1.0]).repeat(8)).repeat(width // 16)
    x[6] = x[5] * 3.0 * 2.0**-9
    small = torch.arange(1, 17) * 2.0**-10  # amax / 6 is rounded by up to a third of an e4m3 denormal
    x[7] = (small * torch.arange(1, width // 16 + 1).unsqueeze(1) / 3).flatten()
    x[8] = (torch.arange(width) % 13 - 6) * 2.0**-9 * (1 + torch.arange(width) // 16 % 7)
    x[9] *= 2.0**-7
    x[10] = 480.0 * torch.sign(x[10])
    x[11] = 3e4
    return x.to(torch.bfloat16)


def window_reference(x: Tensor) -> Tensor:
    return records.pack_window(quant.fake_quantize_fp8(x))


def compressed_reference(x: Tensor) -> Tensor:
    return records.pack_compressed(quant.fake_quantize_fp4_e4m3(x))


KINDS = [
    (insert_window, window_reference, records.window_bytes),
    (insert_compressed, compressed_reference, records.compressed_bytes),
]


@pytest.mark.parametrize(("insert", "reference", "size"), KINDS, ids=["window", "compressed"])
@pytest.mark.parametrize("width", [128, 512])
def test_records_are_the_reference_s_bytes_and_nothing_else_is_touched(
    insert: Callable[..., None], reference: Callable[[Tensor], Tensor], size: Callable[[int], int], width: int
) -> None:
    x = latents(width)
    expected = reference(x)  # on the CPU: there a division by a number is one, on CUDA it is a multiplication
    rows = torch.tensor([7, 0, 19, -1, 3, 12, 5, 8, 2, 15, -1, 11])
    for dtype in (torch.int64, torch.int32):
        pool = poisoned(20, size(width), dtype=torch.uint8)
        before = pool.clone()
        insert(x.to(DEVICE), pool, rows.to(DEVICE, dtype))
        written = rows >= 0
        assert torch.equal(pool[rows[written].to(DEVICE)].cpu(), expected[written])
        rest = torch.ones(20, dtype=torch.bool)
        rest[rows[written]] = False
        assert torch.equal(pool.cpu()[rest], before.cpu()[rest])


@pytest.mark.parametrize(("insert", "reference", "size"), KINDS, ids=["window", "compressed"])
def test_many_random_latents(
    insert: Callable[..., None], reference: Callable[[Tensor], Tensor], size: Callable[[int], int]
) -> None:
    count = 20_000 if DEVICE.type == "cuda" else 24
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(count, 512, generator=rng) * torch.exp(3 * torch.randn(count, 1, generator=rng) - 3)
    x = x.to(torch.bfloat16)
    wide = torch.zeros(
        count, 640, dtype=torch.bfloat16, device=DEVICE
    )  # rows that lie further apart than they are long
    wide[:, :512] = x.to(DEVICE)
    pool = poisoned(count, size(512), dtype=torch.uint8)
    insert(wide[:, :512], pool, torch.arange(count, device=DEVICE))
    assert torch.equal(pool.cpu(), reference(x))


def test_every_bf16_maximum_of_a_compressed_group_from_the_smallest_scale_to_the_largest() -> None:
    top = torch.arange(0x3980, 0x4500, dtype=torch.int16).view(torch.bfloat16).float()  # 2^-12 .. 2^11
    shares = torch.tensor([1, -1, 0.9, 0.83, 0.75, 0.6, 0.5, 0.42, -0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0])
    x = (top[:, None] * shares).to(torch.bfloat16).view(-1, 512)  # [92, 512]
    pool = poisoned(len(x), 288, dtype=torch.uint8)
    insert_compressed(x.to(DEVICE), pool, torch.arange(len(x), device=DEVICE))
    assert torch.equal(pool.cpu(), compressed_reference(x))


def test_what_does_not_fit_is_refused() -> None:
    x, rows = torch.zeros(2, 512, dtype=torch.bfloat16, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="record of 528 bytes"):
        insert_window(x, torch.zeros(4, 288, dtype=torch.uint8, device=DEVICE), rows)
    with pytest.raises(ValueError, match="power of two"):
        insert_compressed(x[:, :96], torch.zeros(4, 54, dtype=torch.uint8, device=DEVICE), rows)
    with pytest.raises(ValueError, match="bf16"):
        insert_window(x.float(), torch.zeros(4, 528, dtype=torch.uint8, device=DEVICE), rows)
    with pytest.raises(ValueError, match="rows"):
        insert_compressed(x, torch.zeros(4, 288, dtype=torch.uint8, device=DEVICE), rows[:1])
