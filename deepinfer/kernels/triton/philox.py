"""The sampler's random streams on the device: words, uniform numbers and noise of `kernels/philox.py`.

Words and uniform numbers are equal bit for bit. Noise takes two float32 logarithms, and those of a GPU, of a CPU's
vector library and of the interpreter differ by one unit in the last place now and then.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from deepinfer.kernels.random_streams import Stream
from deepinfer.kernels.triton.runtime import INTERPRET

TARGET = tl.constexpr(int(Stream.TARGET))
M0, M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
W0, W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
LARGEST = tl.constexpr(1 - 2.0**-24)
# Below, log(1 - u) in float64 has lost digits that float32 shows; four terms of the series have not: u^4 / 5 < 2e-17.
SERIES = tl.constexpr(1e-4)


@triton.jit
def philox_words(pairs, slot, positions, stream, key_low, key_high):
    """The four uint32 words of counters (pair, slot, position, stream). All uint32, broadcastable against each other;
    pairs is a tensor, the others may be scalars."""
    c0 = pairs
    c1, c2, c3 = c0 * 0 + slot, c0 * 0 + positions, c0 * 0 + stream
    k0, k1 = key_low, key_high
    for _ in tl.static_range(10):
        # One 32 x 32 -> 64 multiplication gives both halves.
        p0, p1 = c0.to(tl.uint64) * M0, c2.to(tl.uint64) * M1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + W0).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + W1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def unit_interval(low, high):
    """Two words uint32 -> float32 in (0, 1): 52 of their bits and a half, rounded, at most 1 - 2^-24."""
    bits = (high.to(tl.uint64) << 20) | (low >> 12).to(tl.uint64)
    # 1 + bits * 2^-52 by its bit pattern; what is left when 1 - 2^-53 is taken away has 53 bits, so it is exact.
    above_one = (bits | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    return tl.minimum((above_one - (1 - 2.0**-53)).to(tl.float32), LARGEST)


@triton.jit
def gumbel_of(u):
    """-log(-log(1 - u)), float32."""
    if INTERPRET:  # which has no log1p
        wide = u.to(tl.float64)
        series = wide * (1 + wide * (0.5 + wide * (1 / 3 + wide * 0.25)))
        below = tl.where(wide < SERIES, series, -tl.log(1 - wide)).to(tl.float32)
    else:
        below = -libdevice.log1p(-u)
    return -tl.log(below)


@triton.jit
def pair_uniforms(pairs, positions, stream, slot, key_low, key_high):
    """Uniform numbers of the vocabulary ids 2 * pair and 2 * pair + 1: two float32 tensors. pairs int32."""
    w0, w1, w2, w3 = philox_words(pairs.to(tl.uint32), slot, positions, stream, key_low, key_high)
    return unit_interval(w0, w1), unit_interval(w2, w3)


@triton.jit
def gumbel_ids(ids, positions, stream, slot, key_low, key_high):
    """Noise of vocabulary ids int32 in any order."""
    w0, w1, w2, w3 = philox_words((ids >> 1).to(tl.uint32), slot, positions, stream, key_low, key_high)
    even = (ids & 1) == 0
    return gumbel_of(unit_interval(tl.where(even, w0, w2), tl.where(even, w1, w3)))
