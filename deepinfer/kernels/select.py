"""Picks the implementation of an operation by device and dtype. The reference is always there; a twin must match it."""

from __future__ import annotations

from deepinfer.kernels.reference.attention import sparse_attention
from deepinfer.kernels.reference.experts import routed_experts
from deepinfer.kernels.reference.hyper import hyper_coefficients, hyper_collapse, hyper_expand, hyper_mixes

__all__ = [
    "hyper_coefficients",
    "hyper_collapse",
    "hyper_expand",
    "hyper_mixes",
    "routed_experts",
    "sparse_attention",
]
