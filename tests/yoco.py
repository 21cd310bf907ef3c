"""For tests of truncation and replay: what examples/yoco has for them, and how their logits are compared."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.kernels import select
from deepinfer.model.backbone import DeepseekV41

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "yoco"))
from masked_full import Masks, masked_full
from sequences import Bounds, cold_slot, feed, hit_slot

__all__ = ["Bounds", "Masks", "cold_slot", "draw_tokens", "feed", "hit_slot", "masked_full", "same_logits"]


def draw_tokens(seed: int, count: int) -> list[int]:
    return torch.randint(3, 400, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def same_logits(model: DeepseekV41, got: Tensor, expected: Tensor) -> None:
    """Bit for bit where the CPU kernels run; 1e-5 of the largest logit on the reference path (other orders of sums)."""
    assert got.shape == expected.shape and got.shape[0] > 0
    assert not got.isnan().any()
    if select.cpu_twins(model.device, model.numerics.dtype):
        assert torch.equal(got, expected)
    else:
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
