"""Refuse NaN and Inf in checkpoint bytes, by bit pattern and without converting the tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from deepinfer.model.safetensors_header import CheckpointError

# safetensors type -> (word, mask): a word is not finite if all bits of the mask are set.
# e4m3fn has no Inf, NaN is 0x7f or 0xff; e8m0 has the one NaN 255; for floats an exponent of all ones is Inf or NaN.
NOT_FINITE: dict[str, tuple[str, int]] = {
    "F8_E4M3": ("<u1", 0x7F),
    "F8_E8M0": ("<u1", 0xFF),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F800000),
}
CHUNK = 1 << 18  # bytes looked at together: half of a small second-level cache


def check_finite(raw: npt.NDArray[np.uint8], dtype: str, name: str, file: Path) -> None:
    """raw: the tensor's bytes, 1-D. Raises CheckpointError naming tensor, file and the first bad element."""
    if dtype not in NOT_FINITE:
        return  # I8 holds FP4 codes, all of which are finite
    word, mask = NOT_FINITE[dtype]
    words = raw.view(word)
    step = CHUNK // words.itemsize
    for begin in range(0, len(words), step):
        masked = words[begin : begin + step] & mask
        if masked.max() == mask:  # the largest value that the mask leaves; one vectorised pass, unlike == and any
            first = begin + int((masked == mask).argmax())
            raise CheckpointError(
                f"{name} in {file.name} holds NaN or Inf (flat element {first} of {len(words)}); the file is damaged"
            )
