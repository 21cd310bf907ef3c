"""A step that finds no memory names the settings to lower, wherever it was, and the engine goes on with the next
request."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from drafters import RowDrafter
from engines import make_engine
from integrity import assert_all_free
from plans import GREEDY, greedy_tokens
from scripted import CONFIG, EOS, VOCAB, ScriptedModel, noise_row, run, tokens
from torch import Tensor

from deepinfer.cache.edits import OpenSlot, SetTable
from deepinfer.cache.storage import CacheStorage
from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.errors import EngineStepError, OutOfMemoryStepError
from deepinfer.engine.graphs import GraphedModel
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model.batch import Batch, Chunk
from deepinfer.speculation.propose import DraftLaw, Proposal

PROMPT = list(range(2, 50))


class FullOnce(ScriptedModel):
    """No memory in its second step, with an activation in its hands."""

    activation: weakref.ref[Tensor]

    def forward(self, batch: Batch, storage: CacheStorage) -> Tensor:
        logits = super().forward(batch, storage)
        if len(self.steps) == 2:
            activation = torch.zeros(3)
            self.activation = weakref.ref(activation)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return logits


class FullDrafter(RowDrafter):
    """No memory when it drafts for the second time."""

    calls = 0

    def propose(self, slots: np.ndarray, anchors: Tensor, law: DraftLaw) -> Proposal:
        self.calls += 1
        if self.calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return super().propose(slots, anchors, law)


def engine_of(model: ScriptedModel, drafts: int = 0) -> Engine:
    config = EngineConfig(
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_blocks=16,
        seed=0,
        prefix_caching="off",
        drafts=drafts,
    )
    drafter = (lambda storage, k: FullDrafter(storage, k, row=noise_row)) if drafts else None
    return make_engine(model, CONFIG, config, vocab_size=VOCAB, eos_token_ids=(EOS,), drafter=drafter)


@pytest.mark.parametrize("drafts", [0, 3], ids=["forward pass", "drafts"])
def test_the_error_names_the_settings_and_the_next_request_is_answered(drafts: int) -> None:
    model = ScriptedModel() if drafts else FullOnce()
    engine = engine_of(model, drafts)
    engine.add_request("lost", PROMPT, GREEDY)
    with pytest.raises(EngineStepError) as caught:
        while engine.has_unfinished:
            engine.step()
    for name in ("max_num_batched_tokens", "gpu_memory_utilization", "num_blocks"):
        assert name in str(caught.value)
    step = caught.value.__cause__
    assert isinstance(step, OutOfMemoryStepError)
    assert isinstance(step.__cause__, torch.OutOfMemoryError) and "Tried to allocate" in str(step.__cause__)
    if isinstance(model, FullOnce):  # what the step held is free, though the error is not
        assert model.activation() is None
    params = SamplingParams(temperature=0, max_tokens=8)
    assert tokens(run(engine, [PROMPT], params)) == [[greedy_tokens(PROMPT, 8)]]
    assert_all_free(engine.cache)


def test_a_model_with_padded_steps_says_the_same() -> None:
    storage = CacheStorage(CONFIG, max_num_seqs=2, num_blocks=4, device=torch.device("cpu"))
    storage.apply([OpenSlot(0), SetTable(0, 0, (1,))])
    graphs = GraphedModel(FullOnce(), storage, rows=0, longest=64)  # type: ignore[arg-type]
    first, second = (Batch.from_chunks([Chunk(0, 3 * i, [5, 6, 7], 1)], torch.device("cpu")) for i in range(2))
    assert torch.equal(graphs.forward(first, storage), noise_row(7, 2)[None])
    with pytest.raises(OutOfMemoryStepError, match="step of 3 tokens: lower max_num_batched_tokens"):
        graphs.forward(second, storage)
