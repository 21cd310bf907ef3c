"""A model with random weights and no checkpoint: made where it runs, in the stored formats, to be measured.

The weights are those that `make-checkpoint` would write with the same config and seed, bit for bit, so a model of this
kind computes what the checkpoint would. Nothing touches a disk: at the released size of one of eight ranks that would
be 50 GB to write and to read.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer.kernels import select
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.config import ModelConfig
from deepinfer.model.engram_table import EngramTable
from deepinfer.model.load import CheckpointSource
from deepinfer.model.numerics import Numerics
from deepinfer.model.random_values import RandomValues
from deepinfer.model.safetensors_header import CheckpointError, StoredTensor
from deepinfer.model.tensors import TensorSpec, image_biases, tensor_specs
from deepinfer.model.tokenizer_writer import build_tokenizer, control_tokens
from deepinfer.model.weights import TORCH_DTYPES, CheckpointReader


class RandomReader:
    """Stands in for a `CheckpointReader` of a random checkpoint; tensors come on `device`."""

    def __init__(self, config: ModelConfig, seed: int, device: torch.device) -> None:
        self.config = config
        self._device = device
        self._specs = tensor_specs(config)
        if config.vision is None:
            self._specs |= image_biases(config)
        silent = tuple(sorted({0, 1, 2, *control_tokens(config.vocab_size)}))
        self._values = RandomValues(config, seed, silent)
        self._pools: dict[int, tuple[memoryview, Tensor]] = {}  # by address: a pool, and its bytes on the device

    def names(self) -> list[str]:
        return list(self._specs)

    def spec(self, name: str) -> TensorSpec:
        """Raises CheckpointError for a name outside the inventory."""
        if name not in self._specs:
            raise CheckpointError(f"{name} is no tensor of this config")
        return self._specs[name]

    def read(self, name: str) -> Tensor:
        """The tensor in its stored type, in memory of its own."""
        spec = self.spec(name)
        if self._values.is_shaped(spec):
            raw = torch.frombuffer(bytearray(b"".join(self._values.chunks(spec))), dtype=torch.uint8).to(self._device)
        else:
            pool, offset = self._values.window(spec)
            raw = torch.empty(spec.nbytes, dtype=torch.uint8, device=self._device)
            fill_repeated(raw, self._on_device(pool), offset)
        value = raw.view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
        for row in self._values.silent_rows(spec):
            value[row] = 0
        return value

    def table(self, prefix: str) -> RandomTable:
        """An Engram table in host memory."""
        codes, scales = self.spec(f"{prefix}.weight"), self.spec(f"{prefix}.scale")
        return RandomTable(prefix, self._host_rows(codes), self._host_rows(scales))

    def _host_rows(self, spec: TensorSpec) -> npt.NDArray[np.uint8]:
        pool, offset = self._values.window(spec)
        rows = torch.empty(spec.nbytes, dtype=torch.uint8)
        fill_repeated(rows, torch.frombuffer(bytearray(pool), dtype=torch.uint8), offset)
        return rows.numpy().reshape(spec.shape)

    def _on_device(self, pool: memoryview) -> Tensor:
        if id(pool) not in self._pools:
            self._pools[id(pool)] = pool, torch.frombuffer(bytearray(pool), dtype=torch.uint8).to(self._device)
        return self._pools[id(pool)][1]


class RandomTable(EngramTable):
    """An Engram table whose rows are in memory: uint8 [rows, head_dim] codes and [rows, head_dim / 32] scales."""

    def __init__(self, prefix: str, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> None:
        self.prefix = prefix
        self.num_rows, self.head_dim = codes.shape
        self._codes, self._scales = codes, scales
        nowhere = Path("(random)")
        self._stored = (
            StoredTensor(nowhere, "F8_E4M3", codes.shape, 0, codes.nbytes),
            StoredTensor(nowhere, "F8_E8M0", scales.shape, 0, scales.nbytes),
        )


def fill_repeated(target: Tensor, pool: Tensor, offset: int) -> None:
    """`target` uint8 [n] becomes n bytes of the endless repetition of `pool` uint8 [m], from byte `offset` < m on."""
    head = min(len(pool) - offset, len(target))
    target[:head] = pool[offset : offset + head]
    rest = target[head:]
    whole = len(rest) // len(pool)
    rest[: whole * len(pool)].view(whole, len(pool)).copy_(pool)
    tail = rest[whole * len(pool) :]
    tail.copy_(pool[: len(tail)])


class RandomSource(CheckpointSource):
    """A `WeightSource` of random tensors, in the forms of a checkpoint's (see CheckpointSource)."""

    def __init__(
        self, config: ModelConfig, *, seed: int, form: str, device: torch.device, invariant: bool = False
    ) -> None:
        reader = cast(CheckpointReader, RandomReader(config, seed, device))
        super().__init__(reader, form, device, tqdm(disable=True), invariant=invariant)


def random_model(
    config: ModelConfig,
    *,
    device: torch.device,
    seed: int = 0,
    dtype: str = "float32",
    weights: str = "auto",
    drafts: bool = False,
    invariant: bool = False,
) -> DeepseekV41:
    """The model that `load_model` would load from the directory that `make-checkpoint` would write. Raises ConfigError
    if no synthetic tokenizer fits the config."""
    numerics = Numerics.named(dtype, invariant=invariant)
    if weights == "auto":
        twins = select.cpu_twins(device, numerics.dtype)
        weights = "packed" if twins else "gpu" if select.gpu_twins(device, numerics.dtype) else "wide"
    source = RandomSource(config, seed=seed, form=weights, device=device, invariant=invariant)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer.json"
        tokenizer.write_text(json.dumps(build_tokenizer(config), ensure_ascii=False), encoding="utf-8")
        model = DeepseekV41(config, source, numerics, tokenizer, drafts=drafts)
    source.rounded.tell()
    return model
