"""Read a checkpoint: tensors by name in their stored types, and Engram tables row by row.

Opening checks every header against the config (inventory_check.py). Reading is lazy: a text-only engine never touches
the bytes of `vision.*` or `mtp.*`. Values are checked as they are read; NaN or Inf is an error that names the tensor
and its file.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

import torch

from deepinfer.model.config import ModelConfig
from deepinfer.model.engram_table import EngramTable
from deepinfer.model.finite import check_finite
from deepinfer.model.inventory_check import locate
from deepinfer.model.safetensors_header import CheckpointError, StoredTensor
from deepinfer.model.tensors import GROUPS, TensorSpec, image_biases, tensor_specs

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
READ_CHUNK = 1 << 30  # Linux moves at most 2 GiB per read call

__all__ = ["TORCH_DTYPES", "CheckpointError", "CheckpointReader", "EngramTable"]


class CheckpointReader:
    """A checked checkpoint directory. Use as a context manager, or call close().

    path: directory with config.json and safetensors files (one, or shards with an index). config: used instead of
    config.json. groups: the parts that must be there, of "text", "draft", "vision"; default all that the config has.
    Other parts may be missing from the disk.
    Raises ConfigError for the config, CheckpointError for the files; both list everything that is wrong.
    """

    def __init__(
        self,
        path: str | Path,
        config: ModelConfig | None = None,
        *,
        groups: Collection[str] = GROUPS,
    ):
        if unknown := set(groups) - set(GROUPS):
            raise ValueError(f"groups holds {sorted(unknown)}; choose from {', '.join(GROUPS)}")
        self.path = Path(path)
        self.config = ModelConfig.from_dir(self.path) if config is None else config
        self._specs = tensor_specs(self.config)
        if self.config.vision is None:
            self._specs |= image_biases(self.config)
            groups = set(groups) - {"vision"}
        self._stored = locate(self.path, self._specs, groups)
        self._descriptors: dict[Path, int] = {}
        self._tables: dict[str, EngramTable] = {}

    def names(self) -> list[str]:
        """Every tensor on disk, in file order of the inventory."""
        return list(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def spec(self, name: str) -> TensorSpec:
        """Shape, type and part of a tensor. Raises CheckpointError for a name outside the inventory."""
        if name not in self._specs:
            raise CheckpointError(f"{name} is no tensor of this config")
        return self._specs[name]

    def file(self, name: str) -> Path:
        """The shard that holds `name`."""
        return self._find(name).file

    @property
    def total_bytes(self) -> int:
        """Payload bytes of all tensors on disk."""
        return sum(stored.nbytes for stored in self._stored.values())

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored type (float8_e4m3fn, float8_e8m0fnu, int8 with two FP4 codes, bfloat16 or float32),
        in memory of its own. Raises CheckpointError for NaN, Inf, or a file that ends early. Engram tables: use
        `table`."""
        spec, stored = self.spec(name), self._find(name)
        raw = torch.empty(stored.nbytes, dtype=torch.uint8)
        self._fill(raw.numpy().data, stored)
        check_finite(raw.numpy(), spec.dtype, name, stored.file)
        return raw.view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)

    def read_pair(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales) of a quantised matrix: `<prefix>.weight` and `<prefix>.scale`, possibly from two files."""
        return self.read(f"{prefix}.weight"), self.read(f"{prefix}.scale")

    def table(self, prefix: str) -> EngramTable:
        """The Engram table `<prefix>.weight` / `<prefix>.scale` (prefix `layers.{L}.engram.embed`), opened but not "
        "read."""
        if prefix not in self._tables:
            if self.spec(f"{prefix}.weight").kind != "engram_table":
                raise CheckpointError(f"{prefix} is no Engram table; read it with read_pair")
            self._tables[prefix] = EngramTable(prefix, self._find(f"{prefix}.weight"), self._find(f"{prefix}.scale"))
        return self._tables[prefix]

    def close(self) -> None:
        """Close all files. Tensors and tables that were handed out stay valid."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._tables.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, name: str) -> StoredTensor:
        stored = self._stored.get(name)
        if stored is None:
            spec = self.spec(name)
            raise CheckpointError(f"{name} is not on disk: the checkpoint was opened without the {spec.group!r} part")
        return stored

    def _fill(self, target: memoryview, stored: StoredTensor) -> None:
        """Read the tensor's bytes into `target`, which has exactly their length."""
        if stored.file not in self._descriptors:
            self._descriptors[stored.file] = os.open(stored.file, os.O_RDONLY)
        descriptor, done = self._descriptors[stored.file], 0
        while done < stored.nbytes:
            got = os.preadv(descriptor, [target[done : done + READ_CHUNK]], stored.offset + done)
            if not got:
                raise CheckpointError(f"{stored.file.name} became shorter while it was read; download it again")
            done += got
