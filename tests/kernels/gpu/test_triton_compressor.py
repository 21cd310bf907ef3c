"""Compressor kernels: pooled pairs against the reference, closing pairs against one long list of tokens."""

from __future__ import annotations

import pytest
import torch
from twins import DEVICE

from deepinfer.kernels.reference import compressor as reference
from deepinfer.kernels.triton.compressor import close_pairs_rows, compress_pairs

ON_GPU = DEVICE.type == "cuda"
WIDTH = 512 if ON_GPU else 48
EPS = 1e-20


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within two bfloat16 units: the pooled row is rounded, then the latent; the interpreter truncates."""
    assert got.dtype == expected.dtype
    unit = 2.0**-7 if got.dtype == torch.bfloat16 else 1e-6
    assert ((got.float() - expected.float()).abs() <= 2 * unit * expected.float().abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pairs", [0, 1, 5])
def test_pooled_pairs_equal_the_reference(pairs: int, dtype: torch.dtype) -> None:
    first, second, norm = draw(1, pairs, 2, WIDTH) * 5, draw(2, pairs, 2, WIDTH), 1 + 0.1 * draw(3, WIDTH)
    first[:, 1] *= 20  # gates that leave one of the two nothing
    close(compress_pairs(first, second, norm, EPS, dtype), reference.compress_pairs(first, second, norm, EPS, dtype))


class Sequences:
    """What every token's (value, gate) is, and chunks of it as a step's rows."""

    def __init__(self, slots: int, longest: int, pairs: int) -> None:
        self.tokens = draw(5, slots, longest, 2, WIDTH)
        self.lengths = [0] * slots
        self.store = torch.full((slots + 1, pairs, 2, WIDTH), float("nan"), device=DEVICE)
        self.store[slots] = 0.0  # the null slot: finite
        self.null = slots
        self.tables = torch.arange((slots + 1) * 9, device=DEVICE).flip(0).view(slots + 1, 9)
        self.norm = 1 + 0.1 * draw(6, WIDTH)

    def step(self, chunks: list[tuple[int, int]], padding: int, index: torch.dtype, write_from: int) -> None:
        """chunks: (slot, tokens). Runs it and holds every row to the reference."""
        rows, positions, slots, starts = [], [], [], []
        for slot, count in chunks:
            start = self.lengths[slot]
            rows.append(self.tokens[slot, start : start + count])
            positions += range(start, start + count)
            slots += [slot] * count
            starts += [start] * count
            self.lengths[slot] += count
        rows.append(draw(8, padding, 2, WIDTH))
        positions, starts = positions + [0] * padding, starts + [0] * padding
        slots += [self.null] * padding
        numbers = [torch.tensor(n, dtype=index, device=DEVICE) for n in (positions, slots, starts)]
        floors = torch.full_like(numbers[0], write_from)
        closed = close_pairs_rows(
            torch.cat(rows),
            *numbers,
            self.store,
            self.tables,
            self.norm,
            EPS,
            per_block=4,
            write_from=floors if write_from else None,
        )
        for i, (position, slot) in enumerate(zip(positions, slots, strict=True)):
            new = position % 2 == 1 and position >= write_from
            assert closed.positions[i] == (position - 1 if new else -1)
            entry = position // 2
            assert closed.targets[i] == (int(self.tables[slot, entry // 4]) * 4 + entry % 4 if new else -1)
            if position % 2 == 0:
                assert closed.latents[i].eq(0).all()
                continue
            pair = self.tokens[slot, position - 1 : position + 1].unsqueeze(1)
            expected = reference.compress_pairs(pair[0], pair[1], self.norm, EPS, torch.bfloat16)
            close(closed.latents[i : i + 1], expected)


@pytest.mark.parametrize("pairs", [1, 3, 4])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_every_pair_closes_at_any_cut_and_after_tokens_are_taken_back(pairs: int, index: torch.dtype) -> None:
    """Chunks of every parity and of lengths around the store's (2 pairs), with a first row whose partner lies in the
    store at a place that the same chunk overwrites; rejected tokens of up to 2 (pairs - 1)."""
    g = torch.Generator().manual_seed(pairs)
    sequences = Sequences(3, 64, pairs)
    for _ in range(5):
        chunks = []
        for slot in torch.randperm(3, generator=g).tolist():
            count = int(torch.randint(0, 2 * pairs + 3, (1,), generator=g))
            if count and sequences.lengths[slot] + count < 64:
                chunks.append((slot, count))
        write_from = int(torch.randint(0, 2, (1,), generator=g)) * 5
        sequences.step(chunks, int(torch.randint(0, 3, (1,), generator=g)), index, write_from)
        for slot, count in chunks:
            back = min(int(torch.randint(0, 2 * pairs - 1, (1,), generator=g)), count)
            sequences.lengths[slot] -= back


def test_a_long_chunk_from_an_odd_position_reads_its_partner_before_the_place_is_written() -> None:
    """2000 rows where there is a GPU: whoever writes the place runs while the first row runs."""
    tokens = 2001 if ON_GPU else 21
    for pairs in (1, 2, 4):
        sequences = Sequences(1, tokens + 8, pairs)
        sequences.tables = torch.arange(2 * 300, device=DEVICE).view(2, 300)
        sequences.step([(0, 3)], 0, torch.int64, 0)
        sequences.step([(0, tokens)], 0, torch.int64, 0)
        sequences.step([(0, 2)], 1, torch.int64, 0)
