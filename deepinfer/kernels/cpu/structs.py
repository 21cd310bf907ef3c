"""Weights of a fused kernel as the C structures that it reads, built once per layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

POINTER, INTEGER, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class QueryStruct(ctypes.Structure):
    """projections.cpp QueryWeights."""

    _fields_ = (
        [(name, POINTER) for name in ("wq_a", "wq_b", "wkv", "q_norm", "kv_norm")]
        + [(name, INTEGER) for name in ("width", "rank", "heads", "head_dim", "half")]
        + [("eps", FLOAT)]
    )


class OutputStruct(ctypes.Structure):
    """projections.cpp OutputWeights."""

    _fields_ = [(name, POINTER) for name in ("wo_a", "wo_b")] + [
        (name, INTEGER) for name in ("width", "rank", "groups", "heads", "head_dim", "half")
    ]


class MoeStruct(ctypes.Structure):
    """experts.cpp MoeWeights."""

    _fields_ = (
        [(name, POINTER) for name in ("gate", "up", "down", "bias")]
        + [(name, INTEGER) for name in ("width", "experts", "inner", "topk", "normalize")]
        + [(name, FLOAT) for name in ("scale", "temperature", "limit")]
    )


class HyperStruct(ctypes.Structure):
    """hyper.cpp HyperWeights."""

    _fields_ = (
        [(name, POINTER) for name in ("fn", "scale", "base", "norm")]
        + [(name, INTEGER) for name in ("width", "iterations")]
        + [(name, FLOAT) for name in ("eps", "norm_eps")]
    )


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a contiguous tensor's data; the tensor must outlive the structure."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """A C array of addresses; it must outlive the structure that names it."""
    return (POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
