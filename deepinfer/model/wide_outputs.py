"""A second copy of every wo_a, widened to bfloat16, for steps of many rows (`triton/grouped_output.py`).

The release multiplies with wo_a widened, so the copy is what it multiplies with, and torch's product of it is the
faster one from 96 rows on: 38 instead of 58 us a layer at 384 rows. It takes twice the bytes of the FP8 codes, 64 MiB a
layer of the released model, beside them: few rows go on reading the codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deepinfer.kernels.gpu_weights import GroupedWeight

if TYPE_CHECKING:
    from deepinfer.model.attention import Attention
    from deepinfer.model.backbone import DeepseekV41


def _outputs(model: DeepseekV41) -> Iterator[tuple[Attention, GroupedWeight]]:
    """Every layer whose wo_a is held for the GPU kernels, draft stages included."""
    stages = model.draft.stages if model.draft is not None else []
    for block in [*model.blocks, *stages]:
        wo_a = block.attention.output.wo_a
        if isinstance(wo_a, GroupedWeight):
            yield block.attention, wo_a


def wide_output_bytes(model: DeepseekV41) -> int:
    """What the copies of all layers take; 0 where no kernel would read one."""
    return sum(2 * wo_a.folded.codes.numel() for _, wo_a in _outputs(model))


def kept_output_bytes(model: DeepseekV41) -> int:
    """What the copies that were made take."""
    return sum(wo_a.wide.nbytes for _, wo_a in _outputs(model) if wo_a.wide is not None)


def keep_wide_outputs(model: DeepseekV41) -> None:
    """Makes them. Graphs that are captured afterwards read them."""
    for attention, wo_a in _outputs(model):
        attention.output = dataclasses.replace(attention.output, wo_a=wo_a.widened())
