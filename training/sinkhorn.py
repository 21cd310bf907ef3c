"""Sinkhorn normalisation of the 4x4 copy-mixing matrices: plain autograd on the CPU, a Triton kernel each way on a GPU.

The gradient walks the iterations backwards and needs their divisors only. (The gradient of the converged result would
need nothing, but is wrong where 20 iterations have not converged: training with it blew the mixing logits up.)
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only installs
    triton = None


def sinkhorn_reference(logits: Tensor, iters: int, eps: float) -> Tensor:
    """[N, H, H] float32 logits -> doubly normalised matrices, as the architecture defines them."""
    c = torch.softmax(logits, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """[N, H, H] float32 logits -> [N, H, H]."""
    if logits.is_cuda and triton is not None and logits.shape[-1] == 4:
        return _Sinkhorn.apply(logits.contiguous(), iters, eps)
    return sinkhorn_reference(logits, iters, eps)


if triton is not None:

    @triton.jit
    def _forward_kernel(logits, out, sums, n, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        lane = tl.arange(0, 4)
        offset = token[:, None, None] * 16 + (lane[:, None] * 4 + lane[None, :])[None, :, :]
        mask, mask4 = (token < n)[:, None, None], (token < n)[:, None]
        at = sums + token[:, None].to(tl.int64) * (ITERS * 8) + lane[None, :]
        x = tl.load(logits + offset, mask=mask, other=0.0)
        x = tl.exp(x - tl.max(x, axis=2)[:, :, None])
        c = x / tl.sum(x, axis=2)[:, :, None] + eps
        column = tl.sum(c, axis=1) + eps
        tl.store(at + 4, column, mask=mask4)
        c = c / column[:, None, :]
        for i in range(1, ITERS):
            row = tl.sum(c, axis=2) + eps
            tl.store(at + i * 8, row, mask=mask4)
            c = c / row[:, :, None]
            column = tl.sum(c, axis=1) + eps
            tl.store(at + i * 8 + 4, column, mask=mask4)
            c = c / column[:, None, :]
        tl.store(out + offset, c, mask=mask)

    @triton.jit
    def _backward_kernel(out, sums, grad, grad_logits, n, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        lane = tl.arange(0, 4)
        offset = token[:, None, None] * 16 + (lane[:, None] * 4 + lane[None, :])[None, :, :]
        mask, mask4 = (token < n)[:, None, None], (token < n)[:, None]
        at = sums + token[:, None].to(tl.int64) * (ITERS * 8) + lane[None, :]
        c = tl.load(out + offset, mask=mask, other=0.25)
        g = tl.load(grad + offset, mask=mask, other=0.0)
        # new = old / s with s the sum of old: d_old = (d_new - sum(d_new * new)) / s, and old = new * s.
        for k in range(1, ITERS):
            i = ITERS - k
            column = tl.load(at + i * 8 + 4, mask=mask4, other=1.0)
            g = (g - tl.sum(g * c, axis=1)[:, None, :]) / column[:, None, :]
            c = c * column[:, None, :]
            row = tl.load(at + i * 8, mask=mask4, other=1.0)
            g = (g - tl.sum(g * c, axis=2)[:, :, None]) / row[:, :, None]
            c = c * row[:, :, None]
        column = tl.load(at + 4, mask=mask4, other=1.0)
        g = (g - tl.sum(g * c, axis=1)[:, None, :]) / column[:, None, :]
        c = c * column[:, None, :]
        p = c - eps
        tl.store(grad_logits + offset, p * (g - tl.sum(g * p, axis=2)[:, :, None]), mask=mask)

    class _Sinkhorn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits: Tensor, iters: int, eps: float) -> Tensor:
            out, n = torch.empty_like(logits), logits.shape[0]
            sums = logits.new_empty(n, iters, 8)  # divisors of every iteration: 4 rows (unused in the first), 4 columns
            _forward_kernel[(triton.cdiv(n, 128),)](logits, out, sums, n, eps, ITERS=iters, BLOCK=128)
            ctx.save_for_backward(out, sums)
            ctx.eps = eps
            return out

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
            out, sums = ctx.saved_tensors
            result, (n, iters, _) = torch.empty_like(out), sums.shape
            grid = (triton.cdiv(n, 128),)
            _backward_kernel[grid](out, sums, grad.contiguous(), result, n, ctx.eps, ITERS=iters, BLOCK=128)
            return result, None, None
