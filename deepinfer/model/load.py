"""From a checkpoint directory to a model that can run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.engram_table import EngramTable
from deepinfer.model.numerics import Numerics
from deepinfer.model.parameters import DenseWeight, Fp4Weight, Fp8Weight, Weight
from deepinfer.model.weights import CheckpointReader

WEIGHT_FORMS = ("wide", "stored")


class CheckpointSource:
    """Hands the layers their tensors, one at a time, in the form asked for.

    wide: every matrix becomes float32 once (what a CPU multiplies fastest). stored: FP8, FP4 and BF16 stay as they are
    and are widened at each use (a quarter to an eighth of the memory, and slower). Peak memory is the weights handed
    out so far plus the tensor being read.
    """

    def __init__(self, reader: CheckpointReader, form: str, device: torch.device, bar: tqdm) -> None:
        self._reader, self._form, self._bar = reader, form, bar
        self.device = device

    def _read(self, name: str) -> Tensor:
        value = self._reader.read(name)
        self._bar.update(value.nbytes)
        return value.to(self.device)

    def vector(self, name: str) -> Tensor:
        return self._read(name).float()

    def matrix(self, name: str) -> Weight:
        spec = self._reader.spec(f"{name}.weight")
        codes = self._read(f"{name}.weight")
        weight: Weight
        if spec.dtype == "BF16":
            weight = DenseWeight(codes)
        elif spec.dtype == "F8_E4M3":
            weight = Fp8Weight(codes, self._read(f"{name}.scale"))
        else:
            weight = Fp4Weight(codes, self._read(f"{name}.scale"))
        return weight if self._form == "stored" else DenseWeight(weight.dense())

    def table(self, name: str) -> EngramTable:
        return self._reader.table(name)


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    weights: str = "wide",
    progress: bool = False,
) -> DeepseekV41:
    """Check and load the text backbone of a checkpoint directory in the official layout.

    dtype: "float32" (nothing is rounded) or "bfloat16" (the release's numerics). weights: see CheckpointSource.
    Raises ConfigError, CheckpointError (before any tensor is read, everything wrong in one message; NaN and Inf while
    reading), ValueError for an unknown dtype or form, FileNotFoundError without tokenizer.json.
    """
    if weights not in WEIGHT_FORMS:
        raise ValueError(f"weights {weights!r} is not one of {', '.join(WEIGHT_FORMS)}")
    numerics = Numerics.named(dtype)
    tokenizer_file = Path(path) / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise FileNotFoundError(f"{tokenizer_file} is missing: the Engram token map and all text depend on it")
    with CheckpointReader(path, groups=("text",)) as reader:
        tables = ("engram_table",)  # stay on disk
        size = sum(
            spec.nbytes for spec in map(reader.spec, reader.names()) if spec.group == "text" and spec.kind not in tables
        )
        with tqdm(total=size, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar:
            source = CheckpointSource(reader, weights, torch.device(device), bar)
            return DeepseekV41(reader.config, source, numerics, tokenizer_file)
