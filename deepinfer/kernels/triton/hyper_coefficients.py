"""Coefficients of mHC from the sums of a sub-layer (model specification 2.2, steps 2 and 3)."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer.kernels.triton.hyper_values import reciprocal


@triton.jit
def _halves(x):
    """[R, n] -> [R, n / 2] twice: the first half of the columns, the second."""
    half: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, half)), (0, 2, 1)))


@triton.jit
def _columns(x):
    """[R, 8] -> a tuple of eight [R]."""
    a, b = _halves(x)
    a0, a1 = _halves(a)
    b0, b1 = _halves(b)
    c0, c1 = tl.split(a0)
    c2, c3 = tl.split(a1)
    c4, c5 = tl.split(b0)
    c6, c7 = tl.split(b1)
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def _softmax(a, b, c, d, eps):
    most = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - most), tl.exp(b - most), tl.exp(c - most), tl.exp(d - most)
    r = reciprocal((a + b) + (c + d))
    return a * r + eps, b * r + eps, c * r + eps, d * r + eps


@triton.jit
def _scaled(a, b, c, d, x0, x1, x2, x3, divisor, eps):
    """What a row or column with scales x has to be divided by, from what it was divided by before."""
    return tl.fma(tl.zeros_like(a) + eps, divisor, tl.fma(b, x1, a * x0) + tl.fma(d, x3, c * x2))


@triton.jit
def _sinkhorn(m, eps, ITERATIONS: tl.constexpr):
    """m: a 4 x 4 matrix, row by row, after its softmax. Rows and columns are only scaled, so their scales are kept, not
    the matrix: (s r) / (s r d + eps) = 1 / (d + eps / (s r)), and 1 / (s r) is what the row was divided by before.
    40 halves of 24 operations and four reciprocals, where sixteen numbers took 36 and four."""
    one = tl.zeros_like(m[0]) + 1.0
    r0, r1, r2, r3 = one, one, one, one
    p0, p1, p2, p3 = one, one, one, one
    q0, q1, q2, q3 = one, one, one, one
    c0, c1, c2, c3 = one, one, one, one
    for step in range(ITERATIONS):
        if step > 0:
            p0 = _scaled(m[0], m[1], m[2], m[3], c0, c1, c2, c3, p0, eps)
            p1 = _scaled(m[4], m[5], m[6], m[7], c0, c1, c2, c3, p1, eps)
            p2 = _scaled(m[8], m[9], m[10], m[11], c0, c1, c2, c3, p2, eps)
            p3 = _scaled(m[12], m[13], m[14], m[15], c0, c1, c2, c3, p3, eps)
            r0, r1, r2, r3 = reciprocal(p0), reciprocal(p1), reciprocal(p2), reciprocal(p3)
        q0 = _scaled(m[0], m[4], m[8], m[12], r0, r1, r2, r3, q0, eps)
        q1 = _scaled(m[1], m[5], m[9], m[13], r0, r1, r2, r3, q1, eps)
        q2 = _scaled(m[2], m[6], m[10], m[14], r0, r1, r2, r3, q2, eps)
        q3 = _scaled(m[3], m[7], m[11], m[15], r0, r1, r2, r3, q3, eps)
        c0, c1, c2, c3 = reciprocal(q0), reciprocal(q1), reciprocal(q2), reciprocal(q3)
    return (
        m[0] * (r0 * c0), m[1] * (r0 * c1), m[2] * (r0 * c2), m[3] * (r0 * c3),
        m[4] * (r1 * c0), m[5] * (r1 * c1), m[6] * (r1 * c2), m[7] * (r1 * c3),
        m[8] * (r2 * c0), m[9] * (r2 * c1), m[10] * (r2 * c2), m[11] * (r2 * c3),
        m[12] * (r3 * c0), m[13] * (r3 * c1), m[14] * (r3 * c2), m[15] * (r3 * c3),
    )  # fmt: skip


@triton.jit
def put_coefficients(mixes, row, live, pre, post, comb, eps, ITERATIONS: tl.constexpr):
    """mixes [R, 32], scaled and moved -> pre, post [R, 4], comb [R, 4, 4] in memory."""
    lower, upper = _halves(mixes)
    first, second = _halves(lower)
    third, _ = _halves(upper)
    gates, a, b = _columns(first), _columns(second), _columns(third)
    for k in tl.static_range(4):
        tl.store(pre + row * 4 + k, tl.sigmoid(gates[k]) + eps, mask=live)
        tl.store(post + row * 4 + k, 2.0 * tl.sigmoid(gates[4 + k]), mask=live)
    a0, a1, a2, a3 = _softmax(a[0], a[1], a[2], a[3], eps)
    b0, b1, b2, b3 = _softmax(a[4], a[5], a[6], a[7], eps)
    c0, c1, c2, c3 = _softmax(b[0], b[1], b[2], b[3], eps)
    d0, d1, d2, d3 = _softmax(b[4], b[5], b[6], b[7], eps)
    m = _sinkhorn((a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3), eps, ITERATIONS)
    for k in tl.static_range(16):
        tl.store(comb + row * 16 + k, m[k], mask=live)
