"""The benchmark of batch invariance compares rows with themselves alone: on a CPU, whose kernels keep the promise, and
on a rank that does not."""

from __future__ import annotations

import pytest
import torch
from batch_invariance import measure

from deepinfer.bench.rank_share import RankShare
from deepinfer.kernels import select
from deepinfer.model.backbone import DeepseekV41

CPU = torch.device("cpu")
SMALL = {"preset": "tiny", "ep": 2, "layers": 5, "sequences": 3, "context": 100, "steps": 1, "prefill_chunk": 0}


@pytest.mark.skipif(not select.cpu_twins(CPU, torch.float32), reason="needs the CPU kernels")
def test_rows_alone_are_compared_with_rows_together(monkeypatch) -> None:
    share = RankShare(**SMALL, nextn=2, dtype="float32", batch_invariant=True)
    found = measure(share, CPU)
    assert (found.rows, found.rows_alone_differ) == (9, 0) and found.milliseconds > 0
    plain = measure(RankShare(**SMALL, nextn=2, dtype="float32"), CPU)
    assert plain.rows_alone_differ is None

    forward = DeepseekV41.forward

    def moved(model: DeepseekV41, batch: object, cache: object) -> torch.Tensor:
        return forward(model, batch, cache) + 1  # type: ignore[arg-type]

    monkeypatch.setattr(DeepseekV41, "forward", moved)
    assert measure(share, CPU).rows_alone_differ == 6  # of two sequences, three rows each
