"""Weights in the form of the GPU kernels are the checkpoint's weights: every matrix of a model, value for value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from twins import DEVICE

from deepinfer.kernels.gpu_weights import FoldedWeight, GroupedWeight, ShuffledExperts, SplitHeads, StackedWeight
from deepinfer.kernels.triton.rope import split_order
from deepinfer.kernels.weights import LooseExperts, loose
from deepinfer.model import load_model
from deepinfer.model.wide_outputs import keep_wide_outputs, kept_output_bytes, wide_output_bytes


def matrices(owner: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every weight with `dense` below an object of the model, by where it hangs."""
    if hasattr(owner, "dense") and path:
        yield path, owner
    elif isinstance(owner, LooseExperts | ShuffledExperts):
        bank = loose(owner)
        for number, expert in enumerate([*bank.routed, bank.shared]):
            yield from ((f"{path}[{number}].{i}", weight) for i, weight in enumerate(expert))
    elif isinstance(owner, list | GroupedWeight):
        for number, part in enumerate(owner):
            yield from matrices(part, f"{path}[{number}]")
    elif is_dataclass(owner) or type(owner).__module__.startswith("deepinfer.model"):
        names = [field.name for field in fields(owner)] if is_dataclass(owner) else list(vars(owner))
        for name in names:
            if name not in ("config", "stacked", "_engrams", "table", "trace"):
                yield from matrices(getattr(owner, name), f"{path}.{name}")


def test_every_matrix_of_a_model_has_the_values_of_the_checkpoint(draft_checkpoint: Path) -> None:
    stored = dict(matrices(load_model(draft_checkpoint, dtype="bfloat16", weights="stored", drafts=True)))
    model = load_model(draft_checkpoint, dtype="bfloat16", weights="gpu", drafts=True)
    formed = dict(matrices(model))
    assert formed.keys() == stored.keys()
    assert {"FoldedWeight", "SplitHeads", "GroupPart", "ExpertPart", "DenseWeight"} == {
        type(weight).__name__ for weight in formed.values()
    }
    for name, weight in formed.items():
        want = stored[name].dense()
        # a code among e4m3's denormals may move: 2^-9 of a row's factor, which is 1/448 of its largest value at least
        difference = (weight.dense() - want).abs().amax(-1)
        assert (difference <= want.abs().amax(-1) * 2.0**-17).all(), name
        assert not difference.any() or isinstance(weight, FoldedWeight | SplitHeads), name
    first = model.blocks[0].attention.queries
    assert isinstance(first.stacked, StackedWeight)
    assert first.stacked.whole.codes.data_ptr() == first.wq_a.codes.data_ptr()  # nothing is held twice


def test_wide_copies_of_the_output_weights_hold_their_values_in_split_order(draft_checkpoint: Path) -> None:
    model = load_model(draft_checkpoint, device=str(DEVICE), dtype="bfloat16", weights="gpu", drafts=True)
    size = wide_output_bytes(model)
    assert kept_output_bytes(model) == 0
    keep_wide_outputs(model)
    assert kept_output_bytes(model) == size > 0
    assert model.draft is not None
    for block in [*model.blocks, *model.draft.stages]:
        wo_a = block.attention.output.wo_a
        assert isinstance(wo_a, GroupedWeight) and wo_a.wide is not None
        order = split_order(len(wo_a.order))
        for part, wide in zip(wo_a, wo_a.wide.unflatten(0, (wo_a.groups, -1)), strict=True):
            assert torch.equal(
                wide.float().unflatten(1, (-1, len(order))), part.dense().unflatten(1, (-1, len(order)))[..., order]
            )
    packed = load_model(draft_checkpoint, dtype="bfloat16", weights="stored")
    assert wide_output_bytes(packed) == 0  # no kernel would read a copy


def test_stacked_and_ordered_weights_give_their_parts_back() -> None:
    draw = torch.Generator().manual_seed(0)

    def folded(rows: int, columns: int) -> FoldedWeight:
        codes = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
        return FoldedWeight(codes, torch.exp2(torch.randint(-9, 3, (rows,), generator=draw).float()))

    one, other = folded(24, 64), folded(40, 64)
    stacked = StackedWeight.stack([one, other])
    assert [part.dense().tolist() for part in stacked.parts()] == [one.dense().tolist(), other.dense().tolist()]
    heads = folded(2 * 8, 32)
    split = SplitHeads.split(heads, 8)
    assert torch.equal(split.dense(), heads.dense())
    assert torch.equal(split.folded.dense()[:4], heads.dense()[0:8:2])
    wide = folded(6, 2 * 128)
    grouped = GroupedWeight.group(wide, 3, 128)
    assert torch.equal(torch.cat([part.dense() for part in grouped]), wide.dense())
    assert not torch.equal(grouped.folded.dense(), wide.dense())
    with pytest.raises(IndexError):
        grouped[3]
