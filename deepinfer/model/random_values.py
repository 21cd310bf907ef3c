"""Random tensor contents that keep a forward pass sane, drawn fast enough for hundreds of gigabytes.

One pool of random numbers per distribution is drawn once; a tensor is a window of the endless repetition of its pool,
at an offset that depends on the seed and its name. The pool's length is prime, so that rows of a matrix do not line up.

Scaling: matrices have standard deviation 1/sqrt(K), so a sub-layer turns a normalised input into an output of size
about 1; norms are 1 +- 0.1; the hyper-connections mix the copies with a doubly stochastic matrix. So the stream grows
like the square root of the number of sub-layers (about 9 after 80) and the logits, from a normalised input, stay within
+-5.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.model.config import ModelConfig
from deepinfer.model.safetensors_writer import repeat
from deepinfer.model.tensors import DTYPE_BYTES, TensorSpec

POOL = 1048573  # largest prime below 2^20: a megabyte of FP8, four of float32
CODE_STD = 32.0  # of FP8 codes: 448 is 14 deviations away, and 3 bits of mantissa resolve the small ones
# Root mean square of a uniform FP4 code: sqrt((0 + .25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8) = 2.93
FP4_RMS = 2.93
SCALE_JITTER = (
    -1,
    0,
    0,
    0,
)  # exponents differ from tile to tile, so that a transposed scale tensor shows in the numbers


class RandomValues:
    """Bytes of every tensor of `config`; the same seed and name give the same bytes, whatever else the checkpoint
    holds."""

    def __init__(self, config: ModelConfig, seed: int, silent_ids: tuple[int, ...] = ()):
        """silent_ids: vocabulary rows of `head.weight` that are zero, so that greedy text never picks one (control
        tokens)."""
        self._config, self._seed, self._silent = config, seed, silent_ids
        rng = np.random.default_rng(seed)
        self._normal = rng.standard_normal(POOL, dtype=np.float32)
        self._jitter = rng.choice(np.array(SCALE_JITTER), POOL)
        self._bytes = rng.integers(0, 256, POOL, dtype=np.uint8)
        self._pool = lru_cache(maxsize=64)(self._make_pool)

    def chunks(self, spec: TensorSpec) -> Iterator[memoryview]:
        """The tensor's bytes in order, in pieces of at most 4 MiB."""
        pieces = repeat(*self.window(spec), spec.nbytes)
        if silent := self.silent_rows(spec):
            row = spec.shape[1] * DTYPE_BYTES[spec.dtype]
            return _zero_ranges(pieces, [(i * row, (i + 1) * row) for i in silent])
        if self.is_shaped(spec):
            return iter([memoryview(self._mixing_base(spec, b"".join(pieces)))])
        return pieces

    def window(self, spec: TensorSpec) -> tuple[memoryview, int]:
        """The pool whose endless repetition holds the tensor, and the byte of it at which the tensor begins."""
        distribution, mean, std = self._distribution(spec)
        pool = self._pool(distribution, spec.dtype, mean, std)
        return pool, zlib.crc32(f"{self._seed}:{spec.name}".encode()) % POOL * DTYPE_BYTES[spec.dtype]

    def silent_rows(self, spec: TensorSpec) -> tuple[int, ...]:
        """Rows of a tensor that are zero, whatever its window holds."""
        return self._silent if spec.name == "head.weight" else ()

    @staticmethod
    def is_shaped(spec: TensorSpec) -> bool:
        """Whether a tensor is more than its window: only `chunks` has its bytes."""
        return spec.name.endswith("_base")

    def _distribution(self, spec: TensorSpec) -> tuple[str, float, float]:
        """(kind of pool, mean, standard deviation) of a tensor. For scales the deviation is that of the whole
        matrix."""
        name, last = spec.name, spec.shape[-1]
        if spec.kind == "engram_table":  # rows of size about 1, as the embedding
            return ("scale" if spec.dtype == "F8_E8M0" else "codes"), 0.0, 1.0 / CODE_STD
        if spec.dtype == "I8":
            return "bytes", 0.0, 1.0
        if spec.dtype == "F8_E4M3":
            return "codes", 0.0, 1.0
        if spec.dtype == "F8_E8M0":
            code = FP4_RMS if spec.kind == "expert" else CODE_STD
            return "scale", 0.0, 1.0 / math.sqrt(last * 32) / code
        if "norm" in name or name.endswith(("q_weight", "k_weight")):
            return "normal", 1.0, 0.1
        if name.endswith(("gate.bias", "gate.bias_vl", ".bias")):
            return "normal", 0.0, 0.1
        if name.endswith("_scale"):  # hyper-connection: how far the coefficients follow the input
            return "normal", 0.5, 0.05
        if name.endswith(("attn_sink", "_base", "embed.weight")) or name.startswith("image_"):
            return "normal", 0.0, 1.0 if not name.endswith("_base") else 0.5
        return "normal", 0.0, 1.0 / math.sqrt(last)

    def _make_pool(self, distribution: str, dtype: str, mean: float, std: float) -> memoryview:
        raw: npt.NDArray[np.uint8]
        if distribution == "bytes":
            raw = self._bytes
        elif distribution == "scale":
            raw = np.clip(127 + round(math.log2(std)) + self._jitter, 1, 254).astype(np.uint8)
        else:
            values = torch.from_numpy(self._normal)
            if distribution == "codes":
                raw = (values * CODE_STD).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            else:
                kind = torch.bfloat16 if dtype == "BF16" else torch.float32
                raw = (values * std + mean).to(kind).view(torch.uint8).numpy()
        return raw.data

    def _mixing_base(self, spec: TensorSpec, noise: bytes) -> bytes:
        """hc_*_base [(2 + hc) * hc]: noise, and 2 on the diagonal of the mix, so that copies mostly keep to
        themselves."""
        hc = self._config.hc_mult
        base = np.frombuffer(noise, dtype=np.float32).copy()
        base[2 * hc :].reshape(hc, hc)[np.diag_indices(hc)] += 2.0
        return base.tobytes()


def _zero_ranges(pieces: Iterator[memoryview], ranges: list[tuple[int, int]]) -> Iterator[memoryview]:
    """`pieces` with the byte ranges [begin, end) set to zero; `ranges` ascend."""
    position = 0
    for piece in pieces:
        end = position + len(piece)
        inside = [(max(b, position), min(e, end)) for b, e in ranges if b < end and e > position]
        if inside:
            changed = bytearray(piece)
            for begin, stop in inside:
                changed[begin - position : stop - position] = bytes(stop - begin)
            piece = memoryview(changed)
        yield piece
        position = end
