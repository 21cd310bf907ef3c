"""Which shapes of a model the GPU kernels serve, as far as weights and records are laid out for them.

A weight that its kernel would not take keeps its stored form, and its operation runs the reference: decided once per
model, when it is loaded, and for all who have to agree on an order at once.
"""

from __future__ import annotations

from deepinfer.kernels.reference.quant import FP8_GROUP

HEAD_MULTIPLE = 128  # two runs of 64 columns that `triton/grouped_output.py` reorders
EXPERT_MULTIPLE = 128  # rows and K of a tile of `triton/experts_layout.py`


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def splits_heads(head_dim: int, rope_dim: int) -> bool:
    """Whether heads of this shape are held in split order, by wq_b and wo_a alike (`triton/rope.py`): the kernels that
    turn and norm them hold a whole head, and grouped products reorder its columns."""
    return head_dim % HEAD_MULTIPLE == 0 and _power_of_two(head_dim) and _power_of_two(rope_dim // 2)


def shuffles_experts(width: int) -> bool:
    """Whether FP4 experts over a hidden size of `width` are held as kernels read them; their own width is padded."""
    return width % EXPERT_MULTIPLE == 0


def attends(heads: int, head_dim: int) -> bool:
    """Whether the kernel of attention takes so many heads of this size (`triton/attention.py`)."""
    return heads in (8, 16, 32, 64) and head_dim in (128, 256, 512)


def mixes(copies: int, width: int) -> bool:
    """Whether the kernels of the hyper-connections take a stream of these (`triton/hyper.py`)."""
    return copies == 4 and width % 64 == 0


def rounds_records(head_dim: int) -> bool:
    """Whether kernels round and pack latents of `head_dim` values (`triton/records.py`)."""
    return head_dim >= FP8_GROUP and _power_of_two(head_dim)
