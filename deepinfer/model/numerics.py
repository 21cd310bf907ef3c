"""The two numerics of the engine, as the handful of rounding points that tell them apart (section 2.0).

`float32`: weights dequantised, nothing rounded: the judge of structure. `bfloat16`: the release's own numerics, bf16
between parts, FP8 activations, FP8 window records, FP4 compressed records and FP4 index queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.reference import quant


@dataclass(frozen=True)
class Numerics:
    """dtype: what activations and cache entries are held in between operations. invariant: every sum has one order,
    whatever else is computed beside it; the CPU kernels know no other way, those of a GPU are told."""

    dtype: torch.dtype
    invariant: bool = False

    @classmethod
    def named(cls, name: str, *, invariant: bool = False) -> Numerics:
        """ "float32" or "bfloat16"; anything else is a ValueError."""
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        if name not in dtypes:
            raise ValueError(f"dtype {name!r} is not one of {', '.join(dtypes)}")
        return cls(dtypes[name], invariant)

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float32

    def window_record(self, kv: Tensor) -> Tensor:
        """The values that a window record of kv [N, D] gives back: FP8, groups of 32."""
        return kv if self.exact else quant.fake_quantize_fp8(kv)

    def compressed_record(self, kv: Tensor) -> Tensor:
        """The values that a compressed record of kv [N, D] gives back: FP4, E4M3 scales per 16."""
        return kv if self.exact else quant.fake_quantize_fp4_e4m3(kv)

    def index_record(self, x: Tensor) -> Tensor:
        """The values that an FP4 index query or key [..., D] gives back: E8M0 scales per 32."""
        return x if self.exact else quant.fake_quantize_fp4_e8m0(x)
