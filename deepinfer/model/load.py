"""From a checkpoint directory to a model that can run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer.kernels import select
from deepinfer.kernels.cpu.linear import PANEL, pack
from deepinfer.kernels.gpu_weights import FoldedWeight, GroupedWeight, ShuffledExperts, SplitHeads, StackedWeight
from deepinfer.kernels.weights import (
    DenseWeight,
    Experts,
    Fp4Weight,
    Fp8Weight,
    LooseExperts,
    PackedExperts,
    PackedWeight,
    Weight,
)
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.config import ModelConfig
from deepinfer.model.engram_table import EngramTable
from deepinfer.model.expert_cache import ExpertCache, bank_bytes
from deepinfer.model.numerics import Numerics
from deepinfer.model.rounded_weights import RoundedWeights
from deepinfer.model.tensors import Group
from deepinfer.model.weights import CheckpointError, CheckpointReader

if TYPE_CHECKING:
    from deepinfer.kernels.triton.experts_layout import ShuffledBank

EXPERT_TENSORS = tuple(f"{name}.{part}" for name in ("w1", "w2", "w3") for part in ("weight", "scale"))
WEIGHT_FORMS = ("auto", "packed", "gpu", "wide", "stored")


class CheckpointSource:
    """Hands the layers their tensors, one at a time, in the form asked for.

    packed: bfloat16 panels for the CPU kernels, exact. gpu: FP8 and FP4 in the order and with the factors of the GPU
    kernels (gpu_weights.py), as stored where those do not serve the model's shape, BF16 as it is. wide: float32 once.
    stored: FP8, FP4 and BF16 stay as they are and are widened at each use (a quarter to an eighth of the memory, and
    slower). Peak memory is the weights handed out so far plus the tensor being read (two more copies of it while it is
    widened and packed).

    invariant: the GPU kernels' products with the weights give a row the same bits however many rows there are.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        form: str,
        device: torch.device,
        bar: tqdm,
        *,
        invariant: bool = False,
        expert_cache: ExpertCache | None = None,
    ) -> None:
        self._reader, self._form, self._bar, self._invariant = reader, form, bar, invariant
        self._expert_cache = expert_cache
        self.device = device
        self.rounded = RoundedWeights()
        config = reader.config
        # Asked once, for wq_b and wo_a must agree.
        self._split_heads = form == "gpu" and select.splits_heads(config.head_dim, config.qk_rope_head_dim)
        self._shuffle_experts = form == "gpu" and select.shuffles_experts(config.hidden_size)

    def _read(self, name: str) -> Tensor:
        value = self._reader.read(name)
        self._bar.update(value.nbytes)
        return value.to(self.device)

    def vector(self, name: str) -> Tensor:
        return self._read(name).float()

    def embedding(self, name: str) -> Tensor:
        return self._read(f"{name}.weight")

    def _stored(self, name: str) -> DenseWeight | Fp8Weight | Fp4Weight:
        codes = self._read(f"{name}.weight")
        if codes.dtype == torch.bfloat16:
            return DenseWeight(codes, self._invariant)
        scales = self._read(f"{name}.scale")
        return Fp8Weight(codes, scales) if codes.dtype == torch.float8_e4m3fn else Fp4Weight(codes, scales)

    def _formed(self, weight: Weight) -> Weight:
        if self._form == "stored":
            return weight
        if self._form == "gpu":
            return self._folded(weight) if isinstance(weight, Fp8Weight) else weight
        dense = weight.dense()
        return PackedWeight(pack(dense), dense.shape[0]) if self._form == "packed" else DenseWeight(dense)

    def _folded(self, weight: Fp8Weight) -> FoldedWeight:
        folded, changed = FoldedWeight.fold(weight.codes, weight.scales, invariant=self._invariant)
        self.rounded.add_values(changed, weight.codes.numel())
        return folded

    def matrix(self, name: str) -> Weight:
        return self._formed(self._stored(name))

    def stacked(self, names: Sequence[str]) -> tuple[StackedWeight | None, list[Weight]]:
        parts = [self.matrix(name) for name in names]
        folded = [part for part in parts if isinstance(part, FoldedWeight)]
        if len(folded) < len(parts):
            return None, parts
        stacked = StackedWeight.stack(folded)
        return stacked, list(stacked.parts())

    def heads(self, name: str, head_dim: int) -> Weight:
        weight = self.matrix(name)
        if self._split_heads and isinstance(weight, FoldedWeight):
            return SplitHeads.split(weight, head_dim)
        return weight

    def grouped(self, name: str, groups: int, head_dim: int) -> Sequence[Weight]:
        stored = self._stored(name)
        if self._split_heads and isinstance(stored, Fp8Weight):
            return GroupedWeight.group(self._folded(stored), groups, head_dim)
        # .dense() once: FP8 tiles need not end where a group ends
        rows = stored.dense().unflatten(0, (groups, -1))
        if self._form in ("stored", "gpu"):  # exact in bfloat16, twice the stored bytes
            return [DenseWeight(part.to(torch.bfloat16)) for part in rows]
        return [self._formed(DenseWeight(part)) for part in rows]

    def experts(self, prefix: str, count: int) -> Experts:
        names = [f"{prefix}.experts.{number}" for number in range(count)] + [f"{prefix}.shared_experts"]
        if self._form == "packed":
            return self._packed_experts(names)
        if self._shuffle_experts and self._reader.spec(f"{names[0]}.w1.weight").dtype == "I8":
            return self._shuffled_experts(prefix, names)
        bank = [(self.matrix(f"{n}.w1"), self.matrix(f"{n}.w3"), self.matrix(f"{n}.w2")) for n in names]
        return LooseExperts(bank[:-1], bank[-1])

    def _packed_experts(self, names: list[str]) -> PackedExperts:
        spec = self._reader.spec(f"{names[-1]}.w2.weight")
        width, inner = spec.shape
        up = torch.empty(len(names), 2 * inner // PANEL, width, PANEL, dtype=torch.bfloat16)
        down = torch.empty(len(names), width // PANEL, inner, PANEL, dtype=torch.bfloat16)
        for number, name in enumerate(names):
            half = inner // PANEL
            up[number, :half] = pack(self._stored(f"{name}.w1").dense())
            up[number, half:] = pack(self._stored(f"{name}.w3").dense())
            down[number] = pack(self._stored(f"{name}.w2").dense())
        return PackedExperts(up, down)

    def _shuffled_experts(self, prefix: str, names: list[str]) -> Experts:
        from deepinfer.kernels.triton.experts_layout import ShuffledBank

        width, inner = self._reader.spec(f"{names[-1]}.w2.weight").shape
        bank = ShuffledBank.empty(len(names) - 1, inner, width, self.device)
        cache = self._expert_cache
        rounded = None if cache is None else cache.read(prefix, bank)
        if rounded is None:
            counts = self._shuffle(bank, names[:-1])
            if cache is not None:
                cache.write(prefix, bank, int(counts.sum()))
        else:
            specs = [self._reader.spec(f"{name}.{part}") for name in names[:-1] for part in EXPERT_TENSORS]
            self._bar.update(sum(spec.nbytes for spec in specs))
            counts = torch.tensor([rounded])
        self.rounded.add_groups(counts.sum(), bank.experts * 3 * inner * width // 32)
        stacked, _ = self.stacked((f"{names[-1]}.w1", f"{names[-1]}.w3"))
        shared_down = self.matrix(f"{names[-1]}.w2")
        assert stacked is not None and isinstance(shared_down, FoldedWeight)
        return ShuffledExperts(bank, stacked, shared_down)

    def _shuffle(self, bank: ShuffledBank, names: list[str]) -> Tensor:
        """Fills the bank, one expert at a time: beside it there is never more than one as it is stored -> groups that
        had to be rounded, int64 [experts]."""
        counts = []
        for number, name in enumerate(names):
            stored = [self._stored(f"{name}.{part}") for part in ("w1", "w3", "w2")]
            gate, up, down = ((part.packed, part.scales) for part in stored if isinstance(part, Fp4Weight))
            counts.append(bank.write(number, gate, up, down))
        return torch.stack(counts)

    def table(self, name: str) -> EngramTable:
        return self._reader.table(name)


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    weights: str = "auto",
    drafts: bool = False,
    invariant: bool = False,
    expert_cache: str | Path | None = None,
    progress: bool = False,
) -> DeepseekV41:
    """Check and load the text backbone of a checkpoint directory in the official layout.

    dtype: "float32" (nothing is rounded) or "bfloat16" (the release's numerics). weights: packed, gpu, wide or stored
    (see CheckpointSource); auto: packed where the CPU kernels run, gpu where those of a GPU do, else wide. drafts:
    with the draft model, which is a CheckpointError where the checkpoint has none. invariant: a row's bits do not
    depend on the rows beside it on a GPU, too (engine/invariance.py says for which models). expert_cache: a directory
    where experts in the order of the GPU kernels are kept for the next load (expert_cache.py). What a form had to round
    is a warning in the log, with counts.
    Raises ConfigError, CheckpointError (before any tensor is read, everything wrong in one message; NaN and Inf while
    reading), ValueError for an unknown dtype or form and for a cache that cannot be written, FileNotFoundError without
    tokenizer.json.
    """
    if weights not in WEIGHT_FORMS:
        raise ValueError(f"weights {weights!r} is not one of {', '.join(WEIGHT_FORMS)}")
    numerics = Numerics.named(dtype, invariant=invariant)
    twins = select.cpu_twins(torch.device(device), numerics.dtype)
    if weights == "packed" and not twins:
        on_cpu = torch.device(device).type == "cpu"
        reason = select.explain(torch.device(device), numerics.dtype) if on_cpu else f"they do not run on {device}"
        raise ValueError(f"weights='packed' needs the CPU kernels: {reason}")
    if weights == "auto":
        weights = "packed" if twins else "gpu" if select.gpu_twins(torch.device(device), numerics.dtype) else "wide"
    tokenizer_file = Path(path) / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise FileNotFoundError(f"{tokenizer_file} is missing: the Engram token map and all text depend on it")
    groups: tuple[Group, ...] = ("text", "draft") if drafts else ("text",)
    with CheckpointReader(path, groups=groups) as reader:
        if drafts and not reader.config.num_drafts:
            raise CheckpointError(
                f"{path} has no draft stages (num_nextn_predict_layers is 0): load it with drafts=False"
            )
        cache = None
        if expert_cache is not None and weights == "gpu" and select.shuffles_experts(reader.config.hidden_size):
            cache = ExpertCache(Path(expert_cache), path)
            cache.check(_banks(reader.config, drafts))
        specs = [spec for spec in map(reader.spec, reader.names()) if spec.group in groups]
        size = sum(spec.nbytes for spec in specs if spec.kind != "engram_table")  # tables stay on disk
        with tqdm(total=size, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar:
            source = CheckpointSource(
                reader, weights, torch.device(device), bar, invariant=invariant, expert_cache=cache
            )
            model = DeepseekV41(reader.config, source, numerics, tokenizer_file, drafts=drafts)
    source.rounded.tell()
    if cache is not None:
        cache.tell()
    return model


def _banks(config: ModelConfig, drafts: bool) -> list[tuple[str, int]]:
    """Name and bytes of every layer's routed experts as the GPU kernels hold them."""
    layers = range(config.num_hidden_layers + (config.num_drafts if drafts else 0))
    one = bank_bytes(1, config.moe_intermediate_size, config.hidden_size)
    return [(f"{config.layer_prefix(layer)}.ffn", config.expert_counts(layer)[0] * one) for layer in layers]
