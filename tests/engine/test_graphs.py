"""Padded steps under the whole engine: the tokens and logprobs of an engine that pads nothing."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from integrity import assert_all_free
from real_engine import finish

from deepinfer.config import EngineConfig
from deepinfer.engine.build import build_core
from deepinfer.engine.engine import Engine
from deepinfer.engine.graphs import MOST_ROWS, PaddedStep, sizes_for
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model import load_model

CONFIG = EngineConfig(
    max_model_len=400,
    max_num_seqs=4,
    max_num_batched_tokens=96,
    num_blocks=14,
    window_entries=4,
    drafts=3,
    seed=0,
)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.8, max_tokens=30, seq_seed=3, logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, max_tokens=18, seq_seed=5),
]


@pytest.fixture(scope="module")
def model(draft_checkpoint: Path):
    return load_model(draft_checkpoint, drafts=True)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(3, 400, (size,), generator=draw).tolist() for size in (3, 120, 131, 17, 250)]


def outputs(checkpoint: Path, model, config: EngineConfig, patch: pytest.MonkeyPatch) -> tuple[list[tuple], list[int]]:
    """Tokens and logprobs of the prompts, twice, and the size of every padded step."""
    padded, run = [], PaddedStep.run
    patch.setattr(PaddedStep, "run", lambda step, batch: padded.append(step.rows.rows) or run(step, batch))
    core = build_core(checkpoint, model, config)
    engine, said = Engine(core), []
    for _ in range(2):  # the second time there are hits
        for number, prompt in enumerate(prompts()):
            engine.add_request(f"{number}", prompt, PARAMS[number % len(PARAMS)])
        finish(engine)
        for number in range(len(prompts())):
            (completion,) = engine.pop_output(f"{number}").outputs
            said.append((completion.token_id, completion.token_logprobs))
    engine.close()
    assert_all_free(engine.cache)
    return said, padded


def test_tokens_and_logprobs_are_those_of_steps_without_padding(draft_checkpoint, model, monkeypatch):
    """Drafts, preemption (14 blocks for 4 sequences), prefix hits and their replays, and an overlapped loop."""
    plain, none = outputs(draft_checkpoint, model, CONFIG, monkeypatch)
    assert none == []
    got, padded = outputs(
        draft_checkpoint, model, dataclasses.replace(CONFIG, graph_rows=12, overlap=True), monkeypatch
    )
    assert got == plain
    assert {1, 2, 4, 8, 12} >= set(padded)
    assert len(set(padded)) > 2


def test_sizes_hold_a_row_of_every_sequence_and_all_drafts_of_it():
    assert sizes_for(0, 4, 5) == []
    assert sizes_for(24, 4, 5) == [(24, 4), (12, 2), (6, 1), (4, 4), (2, 2), (1, 1)]
    assert sizes_for(20, 4, 5) == [(12, 2), (6, 1), (4, 4), (2, 2), (1, 1)]
    assert sizes_for(3, 3, 0) == [(3, 3), (2, 2), (1, 1)]
    sizes = sizes_for(MOST_ROWS, 100, 5)
    assert sizes[0] == (384, 64)
    for each in (1, 6):
        counts = [chunks for rows, chunks in sizes if rows == each * chunks]
        assert all(large <= 2 * small for large, small in itertools.pairwise(counts))
