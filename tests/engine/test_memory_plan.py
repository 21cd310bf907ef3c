"""What a GPU needs beside weights and cache follows from shapes, and is told by part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepinfer.cache.storage import CacheStorage
from deepinfer.config import EngineConfig
from deepinfer.engine import build
from deepinfer.engine.arguments import EngineArguments
from deepinfer.engine.graphs import GraphedModel, sizes_for
from deepinfer.engine.memory_plan import (
    SCORE_BYTES,
    describe_memory,
    graph_memory,
    token_bytes,
    unpacked_bytes,
    working_memory,
)
from deepinfer.engine.settings import resolve_settings
from deepinfer.engine.sizing import WIDE_ROWS, keeps_wide_outputs
from deepinfer.kernels import select
from deepinfer.kernels.select import backends
from deepinfer.model.presets import flash, preset

FLASH = flash()


def test_a_token_of_the_released_model_takes_some_hundred_kilobytes():
    """Queries and outputs of 64 heads of 512 are 131,072 bytes, the stream twice 81,920; nothing smaller can do."""
    assert 213_000 < token_bytes(FLASH) < 600_000


def test_working_memory_grows_with_what_asks_for_it_and_index_scores_are_bounded():
    sizes = {"tokens": 4096, "sequences": 64, "drafts": 0, "graph_rows": 64, "longest": 32_768, "unpacks": True}
    plan = working_memory(FLASH, **sizes)
    unpacked = unpacked_bytes(FLASH, tokens=4096, sequences=64, drafts=0)
    assert unpacked == 1024 * (65 * 129 + 4096 + (1 << 17))  # keys of 512 values in bfloat16
    assert plan.activations == 4096 * token_bytes(FLASH) + unpacked
    assert working_memory(FLASH, **sizes | {"unpacks": False}).activations == 4096 * token_bytes(FLASH)
    assert plan.logits == 4 * 64 * FLASH.vocab_size * 4
    assert plan.total == sum((plan.activations, plan.scores, plan.logits, plan.graphs))
    assert working_memory(FLASH, **sizes | {"graph_rows": 0}).graphs == 0
    longer = working_memory(FLASH, **sizes | {"longest": FLASH.max_position_embeddings})
    assert plan.scores <= longer.scores < 1.2 * SCORE_BYTES
    assert working_memory(FLASH, **sizes | {"tokens": 1, "longest": 1024}).scores < 5000


@pytest.mark.parametrize(("tokens", "in_cuda", "reserved"), [(1023, False, 0), (1024, False, 1), (1024, True, 0)])
def test_room_for_unpacked_keys_is_reserved_where_steps_unpack_them(monkeypatch, tokens, in_cuda, reserved):
    """Tried with the GPU kernels' interpreter in the place of a GPU."""
    config = EngineConfig(max_model_len=4096, max_num_seqs=4, max_num_batched_tokens=tokens, num_blocks=64)
    with select.interpreted_gpu():
        monkeypatch.setattr(backends.gpu().cuda_attention, "serves", lambda *_: in_cuda)
        working = build._working(config, FLASH, 0, 0, (torch.device("cpu"), torch.bfloat16))
    keys = unpacked_bytes(FLASH, tokens=tokens, sequences=4, drafts=0)
    assert working.activations == tokens * token_bytes(FLASH) + reserved * keys


def test_every_graph_keeps_the_logits_of_its_own_size():
    """64 sequences with 5 drafts: (1 + 2 + 4 + 8 + 12 + 16 + 24 + 32 + 48 + 64) x (1 + 6) = 1,477 rows, 764 MB."""
    logits = 4 * FLASH.vocab_size
    with_drafts = graph_memory(FLASH, rows=384, sequences=64, drafts=5)
    assert with_drafts > 384 * token_bytes(FLASH) + (1477 + 2 * 384) * logits
    # what is there twice as often: the nodes of 20 graphs, of 6 kinds of draws behind each, and of 16 of drafts
    assert with_drafts < 384 * token_bytes(FLASH) + (1477 + 2 * 384) * logits + (600 << 20)
    # one sequence more in the largest graph: one row more that is kept
    fewer = [graph_memory(FLASH, rows=48, sequences=count, drafts=0) for count in (47, 48)]
    assert fewer[1] - fewer[0] == logits
    assert graph_memory(FLASH, rows=0, sequences=64, drafts=5) == 0


def test_padded_steps_keep_as_many_rows_as_are_planned():
    """Without CUDA nothing is captured, but the steps are there, and each would keep the logits of all of its rows."""
    config = preset("tiny")
    storage = CacheStorage(config, max_num_seqs=5, num_blocks=8, drafts=2, device=torch.device("cpu"))
    graphs = GraphedModel(SimpleNamespace(device=torch.device("cpu")), storage, rows=15, longest=64)
    assert sum(graphs.sizes) == sum(rows for rows, _ in sizes_for(15, 5, 2)) == (1 + 2 + 4 + 5) * (1 + 3)


@pytest.mark.parametrize(
    ("wished", "size", "rows", "kept"),
    [(None, 1 << 30, 96, True), (None, 1 << 30, 95, False), (None, (1 << 30) + 1, 96, False), (None, 0, 96, False),
     (True, 16 << 30, 1, True), (False, 1 << 30, 96, False)],
)  # fmt: skip
def test_wide_outputs_are_kept_where_asked_or_where_they_pay_and_fit(wished, size, rows, kept):
    assert keeps_wide_outputs(wished=wished, size=size, free=16 << 30, rows=rows) is kept


def test_wide_outputs_that_do_not_fit_are_refused_with_what_to_do_instead():
    with pytest.raises(
        ValueError, match=r"^wide_outputs: .* 11 bytes, and 10 are left .*; leave wide_outputs out"
    ) as no:
        keeps_wide_outputs(wished=True, size=11, free=10, rows=WIDE_ROWS)
    assert "raise gpu_memory_utilization" in str(no.value)
    assert not keeps_wide_outputs(wished=None, size=11, free=10, rows=WIDE_ROWS)  # as it says
    assert keeps_wide_outputs(wished=True, size=11, free=11, rows=1)


def test_wide_outputs_that_nobody_reads_are_told():
    def notes(**asked):
        return resolve_settings(EngineArguments(device="cpu", **asked), environ={}).notes

    assert not any("wide_outputs" in note for note in (*notes(), *notes(wide_outputs=False)))
    assert "wide_outputs without effect: no GPU kernels read it" in notes(wide_outputs=True)
    with pytest.raises(ValueError, match="wide_outputs"):
        notes(wide_outputs="yes")


def test_the_line_at_start_names_every_part():
    config = EngineConfig(
        max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=4096, num_blocks=2048, kv_format="hopper", drafts=5
    )
    sizes = {"tokens": 4096, "sequences": 64, "drafts": 5, "graph_rows": 384, "longest": 4096}
    working = working_memory(FLASH, **sizes, unpacks=False)
    line = describe_memory(FLASH, config, weights=50 << 30, wide_outputs=43 << 26, graphs=3 << 30, working=working)
    assert "50.00 weights" in line
    assert "2.69 wide output weights" in line
    assert "3.00 graphs" in line
    assert f"{2048 * 113_920 / 2**30:,.2f} 2048 blocks of 128 tokens" in line  # docs/engine.md: bytes of a block
    for part in ("64 sequences", "staged records", "activations of 4096 tokens", "index scores", "logits"):
        assert part in line
    with pytest.raises(ValueError, match="kv_format"):
        EngineConfig(max_model_len=8, max_num_seqs=1, max_num_batched_tokens=8, num_blocks=1, kv_format="paged")
