"""Routed experts' FP4 weights in the order in which the kernels of `experts.py` read them. Plain PyTorch, once at load.

Three things are rearranged, all exactly:

- **Scales go into the row.** A weight is m * 2^(s - 127) with m of {0, .5, 1, 1.5, 2, 3, 4, 6} and one s per row and 32
  values. With c = s - (largest s of the row) + 11 the kernel looks m up in a table of e4m3 codes of m * 2^(c - 5), and
  the row's factor is 2^(largest s - 127 - 6). c = 0..11 is what e4m3 holds without rounding (0.5 * 2^-5 is its smallest
  normal number, 6 * 2^6 = 384 < 448). Groups further below are rounded to c = 0; they are counted.
- **K order.** A lane of the tensor core's A operand owns 4 neighbouring positions of each 16. So that its 32 values of
  128 are one scale group and 16 neighbouring bytes, position 32 w + 16 o + 4 t + b of a block of 128 holds element
  32 t + 8 w + 4 o + b. Activations are stored in the same order (`experts_rows.py`).
- **Nibbles.** Values i = 4 o + b = 0..7 of the 32-bit word (t, w): magnitude in bits 4 i .. 4 i + 2 (a byte-permute
  selector as it stands), signs of 0..3 in bits 7, 15, 23, 31 and of 4..7 in bits 3, 11, 19, 27.

Rows of the up projection alternate by 8: 16 q + g is gate channel 8 q + g, 16 q + 8 + g the same channel of up, so that
both lie in one thread's accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.reference.quant import FP4_TABLE, fp4_codes, unpack_fp4

BLOCK_K = 128  # values of a row that lie together
TILE_ROWS = 64  # rows that lie together, 4,096 bytes of codes per block of K
ROW_MULTIPLE = 128
GROUP = 32
OCTAVES = 11  # that a row's scales may spread without rounding


@dataclass(frozen=True)
class ShuffledMatrix:
    """The same matrix [rows, columns] of E experts. rows and columns as stored (padded to multiples of 128 by zeros).

    codes uint8 [E, rows / 64, columns / 128, 64, 64], scales uint8 [E, rows / 64, columns / 128, 64, 4] (c = 0..11),
    factors float32 [E, rows].
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor

    @property
    def experts(self) -> int:
        return self.codes.shape[0]

    @property
    def rows(self) -> int:
        return self.codes.shape[1] * TILE_ROWS

    @property
    def columns(self) -> int:
        return self.codes.shape[2] * BLOCK_K

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.codes, self.scales, self.factors))

    @classmethod
    def empty(cls, experts: int, rows: int, columns: int, device: torch.device | str) -> ShuffledMatrix:
        """Room for `experts` matrices, to be filled one by one (`write`)."""
        if rows % ROW_MULTIPLE or columns % BLOCK_K:
            raise ValueError(f"rows {rows} and columns {columns} must be multiples of {ROW_MULTIPLE} and {BLOCK_K}")
        tiles = (experts, rows // TILE_ROWS, columns // BLOCK_K, TILE_ROWS)
        codes = torch.zeros((*tiles, BLOCK_K // 2), dtype=torch.uint8, device=device)
        scales = torch.zeros((*tiles, BLOCK_K // GROUP), dtype=torch.uint8, device=device)
        return cls(codes, scales, torch.zeros((experts, rows), dtype=torch.float32, device=device))

    def write(self, expert: int, packed: Tensor, scales: Tensor) -> Tensor:
        """Stores packed e2m1 [rows, columns / 2] and E8M0 scales [rows, columns / 32] as one expert's. Returns how many
        groups had to be rounded, int64 [] on the device."""
        codes, steps, factors, rounded = shuffle(packed, scales)
        self.codes[expert], self.scales[expert], self.factors[expert] = codes, steps, factors
        return rounded

    def dense(self, expert: int) -> Tensor:
        """float32 [rows, columns], natural K order, rows as stored."""
        return unshuffle(self.codes[expert], self.scales[expert], self.factors[expert])


@dataclass(frozen=True)
class ShuffledBank:
    """Routed experts `first` .. `first` + E - 1 of a layer: up holds w1 and w3 row by row (`pair_rows`), down w2."""

    up: ShuffledMatrix
    down: ShuffledMatrix
    inner: int  # moe_intermediate_size, before padding
    width: int  # hidden_size
    first: int = 0

    @property
    def experts(self) -> int:
        return self.up.experts

    @classmethod
    def empty(cls, experts: int, inner: int, width: int, device: torch.device | str, first: int = 0) -> ShuffledBank:
        """Room for `experts` experts of w1/w3 [inner, width] and w2 [width, inner]."""
        padded = -(-inner // BLOCK_K) * BLOCK_K
        up = ShuffledMatrix.empty(experts, 2 * padded, width, device)
        return cls(up, ShuffledMatrix.empty(experts, width, padded, device), inner, width, first)

    def write(
        self, expert: int, w1: tuple[Tensor, Tensor], w3: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
    ) -> Tensor:
        """One expert (counted from `first`) of (packed e2m1 [N, K / 2], E8M0 scales [N, K / 32]) each, as in the
        checkpoint. Returns the number of groups that had to be rounded, int64 []."""
        padded = self.down.columns
        pairs = [pair_rows(_padded(a, padded, 0), _padded(b, padded, 0)) for a, b in zip(w1, w3, strict=True)]
        rounded = self.up.write(expert, pairs[0], pairs[1])
        return rounded + self.down.write(expert, _padded(w2[0], padded // 2, 1), _padded(w2[1], padded // GROUP, 1))

    def dense(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """w1, w3 [inner, width] and w2 [width, inner] as float32 (expert counted from `first`)."""
        w1, w3 = unpair_rows(self.up.dense(expert))
        return w1[: self.inner], w3[: self.inner], self.down.dense(expert)[:, : self.inner]


def shuffle(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed e2m1 [N, K / 2] (int8 or uint8) and E8M0 scales [N, K / 32] -> codes, scales, factors of one expert as in
    `ShuffledMatrix`, and the number of groups that had to be rounded, int64 []. N of 64s, K of 128s."""
    values = unpack_fp4(packed)  # [N, K]
    exponents = scales.view(torch.uint8).int()  # [N, K / 32]
    groups = values.unflatten(1, (-1, GROUP))  # [N, K / 32, 32]
    empty = (groups & 7).eq(0).all(-1)
    exponents = exponents.masked_fill(empty, 0)  # the scale of nothing but zeros says nothing
    largest = exponents.amax(1, keepdim=True)
    steps = exponents - largest + OCTAVES
    low = steps.lt(0) & ~empty
    # 2^steps, not larger than 1/2: what such a group's values are in units of the scale that the row can hold.
    shrink = torch.exp2(steps.clamp(-8, 0).float()).unsqueeze(-1)
    smaller = fp4_codes(FP4_TABLE.to(values.device)[groups.long()] * shrink)
    groups = torch.where(low.unsqueeze(-1), smaller, groups)
    steps = steps.clamp_min(0).masked_fill(empty, 0)
    factors = torch.exp2((largest.squeeze(1) - 127 - 6).float())

    rows, blocks = values.shape[0], values.shape[1] // BLOCK_K
    words = groups.reshape(rows, blocks, 4, 4, 8)  # t, w, value of the word
    magnitude, sign = words & 7, words >> 3
    low_nibble = magnitude[..., 0::2] | sign[..., 4:] << 3
    high_nibble = magnitude[..., 1::2] | sign[..., :4] << 3
    codes = (low_nibble | high_nibble << 4).reshape(-1, TILE_ROWS, blocks, BLOCK_K // 2)
    tiles = steps.to(torch.uint8).reshape(-1, TILE_ROWS, blocks, BLOCK_K // GROUP)
    return codes.transpose(1, 2).contiguous(), tiles.transpose(1, 2).contiguous(), factors, low.sum()


def unshuffle(codes: Tensor, scales: Tensor, factors: Tensor) -> Tensor:
    """What `shuffle` made -> float32 [N, K] in natural order: exactly the weights, where none had to be rounded."""
    blocks = codes.shape[1]
    words = codes.transpose(1, 2).reshape(-1, blocks, 4, 4, 4)  # [N, blocks, t, w, byte]
    magnitude = torch.stack((words & 7, words >> 4 & 7), -1).flatten(-2)  # [N, blocks, t, w, 8]
    sign = torch.cat((words >> 7, words >> 3 & 1), -1)
    values = FP4_TABLE.to(codes.device)[(magnitude | sign << 3).long()].flatten(3)  # [N, blocks, t, 32]
    steps = scales.transpose(1, 2).reshape(-1, blocks, 4, 1).int() - 5
    return (torch.ldexp(values, steps) * factors.view(-1, 1, 1, 1)).flatten(1)


def pair_rows(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up [I, ...] -> [2 I, ...], alternating by 8 rows. I of 8s."""
    return torch.stack((gate.unflatten(0, (-1, 8)), up.unflatten(0, (-1, 8))), 1).flatten(0, 2)


def unpair_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The two of `pair_rows` again."""
    pairs = rows.unflatten(0, (-1, 2, 8))
    return pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1)


def _padded(x: Tensor, size: int, dim: int) -> Tensor:
    missing = size - x.shape[dim]
    if missing == 0:
        return x.view(torch.uint8)
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x.view(torch.uint8), torch.zeros(shape, dtype=torch.uint8, device=x.device)), dim)
