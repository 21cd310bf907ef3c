"""Engram tables: about 100 GB each in the release, read one row at a time from a memory map.

Row format (model.md 3.1): head_dim FP8 codes, and one E8M0 scale per 32 of them in a second tensor.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.kernels import select
from deepinfer.model.finite import check_finite
from deepinfer.model.safetensors_header import StoredTensor

TILE = 32  # FP8 codes per scale


class EngramTable:
    """Rows of `<prefix>.weight` [num_rows, head_dim] and `<prefix>.scale` [num_rows, head_dim/32], mapped and "
    "never loaded."""

    def __init__(self, prefix: str, codes: StoredTensor, scales: StoredTensor):
        self.prefix = prefix
        self.num_rows, self.head_dim = codes.shape
        self._stored = (codes, scales)
        self._codes, self._scales = _map(codes), _map(scales)

    def raw_rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids: integer tensor of any shape. Returns FP8 codes [.., head_dim] float8_e4m3fn and scales [.., head_dim/32]
        float8_e8m0fnu. Touches only the pages of these rows. Raises IndexError for an id outside the table,
        CheckpointError for NaN in a row that was read."""
        flat = ids.reshape(-1).to(device="cpu", dtype=torch.int64).numpy()
        if flat.size and not (flat.min() >= 0 and flat.max() < self.num_rows):
            raise IndexError(
                f"{self.prefix}: row ids {flat.min()}..{flat.max()} leave the table of {self.num_rows} rows; "
                "the hash and the config disagree"
            )
        # Ascending distinct ids: every page is touched once, in disk order.
        distinct, inverse = np.unique(flat, return_inverse=True)
        gathered = []
        for mapped, stored, dtype in zip(
            (self._codes, self._scales), self._stored, (torch.float8_e4m3fn, torch.float8_e8m0fnu), strict=True
        ):
            rows = mapped[distinct]
            check_finite(rows.reshape(-1), stored.dtype, self.prefix, stored.file)
            gathered.append(torch.from_numpy(rows[inverse]).view(dtype).reshape(*ids.shape, mapped.shape[1]))
        return gathered[0], gathered[1]

    def rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values of rows `ids` [..] as [.., head_dim], float32 or bfloat16 (both exact: 4 significant bits, a power
        of two). Raises as raw_rows."""
        addresses = self._codes.ctypes.data, self._scales.ctypes.data
        fast = select.table_rows(*addresses, ids, self.num_rows, self.head_dim)
        if fast is not None:
            return fast.to(dtype)
        codes, scales = self.raw_rows(ids)
        groups = codes.to(torch.float32).reshape(*scales.shape, TILE)  # [.., head_dim/32, 32]
        values = groups * scales.to(torch.float32).unsqueeze(-1)
        return values.reshape(codes.shape).to(dtype)


def _map(stored: StoredTensor) -> npt.NDArray[np.uint8]:
    """The tensor's bytes [rows, columns] over a read-only map of its file."""
    with stored.file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)  # a row is 264 bytes; read-ahead would fetch up to 128 KiB around each
    flat = np.frombuffer(mapped, dtype=np.uint8, count=stored.nbytes, offset=stored.offset)
    return flat.reshape(stored.shape)
