"""Decode steps as rounds of the device, under the whole engine: the runner's tokens, drafts and cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from integrity import assert_all_free
from real_engine import finish

pytest.importorskip("triton")

from round_engines import RoundEngine

from deepinfer.cache.draft_window import DraftWindow, PaddedDraftWindow
from deepinfer.cache.edits import OpenSlot, SetTable
from deepinfer.cache.formats import KVFormat
from deepinfer.cache.records import WindowRings
from deepinfer.cache.storage import CacheStorage
from deepinfer.config import EngineConfig
from deepinfer.engine.graphed_drafter import GraphedDrafter
from deepinfer.engine.rounds import RoundDraftModel
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model import Chunk, load_model
from deepinfer.model.presets import tiny
from deepinfer.model.state import Rounding
from deepinfer.speculation.propose import DraftLaw, DraftModelDrafter

CONFIG = EngineConfig(
    max_model_len=300, max_num_seqs=3, max_num_batched_tokens=96, num_blocks=9, drafts=2, graph_rows=9, seed=0
)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=0, max_tokens=5),
    SamplingParams(temperature=0, max_tokens=7, repetition_penalty=1.3),  # no round serves it
    SamplingParams(temperature=0, max_tokens=8),
]


@pytest.fixture(scope="module")
def model(draft_checkpoint: Path):
    return load_model(draft_checkpoint, drafts=True)


def outputs(checkpoint: Path, model, config: EngineConfig, rounds: bool):
    """Tokens of the prompts, and of every plan that ran as a round whether it began before the one before it ended."""
    made = RoundEngine(checkpoint, model, config)
    if not rounds:
        made.runner.rounds = None
    engine, draw = made.engine, torch.Generator().manual_seed(5)
    for number, params in enumerate(PARAMS):
        prompt = torch.randint(3, 400, (20 + 37 * number,), generator=draw).tolist()
        engine.add_request(f"{number}", prompt, params)
    finish(engine)
    said = [engine.pop_output(f"{number}").outputs[0] for number in range(len(PARAMS))]
    engine.close()
    assert_all_free(engine.cache)
    return [(one.token_id, one.token_logprobs) for one in said], made.behind


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_tokens_are_those_of_the_runners_own_path(draft_checkpoint, model, drafts, overlap):
    """Greedy ones; sequences join, leave, and mix with one that no round serves."""
    config = dataclasses.replace(CONFIG, drafts=drafts, overlap=overlap)
    plain, none = outputs(draft_checkpoint, model, config, rounds=False)
    got, ran = outputs(draft_checkpoint, model, config, rounds=True)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in plain]
    for (_, own), (_, theirs) in zip(got, plain, strict=True):
        assert own == pytest.approx(theirs, abs=1e-4)
    assert none == []
    assert len(ran) >= 3
    assert ran.count(True) >= 2 if overlap else not any(ran)


def test_padded_draft_windows_show_what_planned_ones_show() -> None:
    """Shorter and longer than the window, whose ring is longer than it."""
    config = tiny()
    rings = WindowRings(config, 5, KVFormat.named("float32"), torch.device("cpu"), drafts=3)
    slots, lengths = torch.tensor([2, 0, 3, 1]), torch.tensor([0, 7, 16, 41])
    planned = DraftWindow(rings, slots.numpy(), lengths.numpy(), 3, Rounding())
    padded = PaddedDraftWindow(rings, slots, lengths, 3, Rounding())
    assert torch.equal(padded.positions, planned.positions)
    assert torch.equal(padded.indices, planned.indices)


def test_padded_drafts_are_those_of_the_plain_drafter(draft_checkpoint, model) -> None:
    """Greedy ones, behind sequences shorter and longer than the window; the rows of padding change nothing."""
    storage = CacheStorage.for_model(model, max_num_seqs=4, num_blocks=8, drafts=3, padded_rows=64)
    draw = torch.Generator().manual_seed(2)
    for slot, length in enumerate((5, 40, 17)):
        storage.apply([OpenSlot(slot), SetTable(slot, 0, (1 + 2 * slot, 2 + 2 * slot))])
        model.forward([Chunk(slot, 0, torch.randint(3, 400, (length,), generator=draw).tolist(), 0)], storage)
    plain = DraftModelDrafter(model.draft, storage, 3)
    padded = GraphedDrafter(plain, RoundDraftModel(model.draft, storage, 3), storage)
    for slots in ([2], [0, 1, 2], [1, 0]):
        law = DraftLaw(np.zeros(len(slots), np.uint8), torch.ones(len(slots)), (torch.zeros(len(slots)).long(),) * 2)
        anchors = torch.randint(3, 400, (len(slots),), generator=draw)
        got, expected = (one.propose(np.array(slots), anchors, law) for one in (padded, plain))
        assert torch.equal(got.token_ids, expected.token_ids)
        assert torch.equal(got.confidence, expected.confidence)
        assert got.logits is None
