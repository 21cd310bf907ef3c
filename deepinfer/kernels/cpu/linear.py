"""Matrix product with a weight packed in panels of 16 outputs, in bfloat16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.cpu.call import call

PANEL = 16  # outputs side by side in memory, gemm.h's PANEL


def pack(weight: Tensor) -> Tensor:
    """float32 [N, K] -> bfloat16 [ceil(N / 16), K, 16]. ValueError when a value is not exact in bfloat16."""
    narrow = weight.to(torch.bfloat16)
    if not torch.equal(narrow.float(), weight.float()):
        raise ValueError("a weight is not exact in bfloat16 and cannot be packed")
    rows = -weight.shape[0] % PANEL
    return F.pad(narrow, (0, 0, 0, rows)).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def unpack(packed: Tensor, rows: int) -> Tensor:
    """The inverse of `pack`: -> float32 [rows, K]."""
    return packed.transpose(1, 2).flatten(0, 1)[:rows].float()


def linear_packed(x: Tensor, packed: Tensor, rows: int) -> Tensor:
    """x float32 [M, K], last dimension contiguous, any row stride -> float32 [M, rows]."""
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape[0], rows)
    sizes = (x.stride(0), x.shape[0], x.shape[1])
    call("linear_packed", x.data_ptr(), *sizes, packed, rows, out, rows)
    return out
