"""Batch invariance on a GPU: a request's tokens and log-probabilities are the same bits alone and in any company.

nano runs under the whole engine, and a random network of a few layers at the released widths step by step. On a CPU
(GPU_TESTS_ON_CPU=1) nano runs in float32, where the CPU kernels keep the same promise: that tries the test.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from gpu_device import CUDA, DEVICE, free_gpu, on_gpu, twins_alone
from nano_engine import GREEDY, NANO, SEEDED, kv_format, prompt_ids
from real_engine import finish
from torch import Tensor

from deepinfer.cache.edits import OpenSlot, SetTable
from deepinfer.cache.storage import CacheStorage
from deepinfer.config import EngineConfig
from deepinfer.engine import build
from deepinfer.engine.engine import Engine
from deepinfer.engine.graphs import GraphedModel
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.kernels import select
from deepinfer.model import Batch, Chunk, load_model
from deepinfer.model.backbone import DeepseekV41

PENALISED = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, frequency_penalty=0.5)  # no round serves it
LISTING = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=2)
DRAWN = SamplingParams(temperature=1.0, min_p=0.02, top_k=40, max_tokens=24, ignore_eos=True, seq_seed=11)


class Said(NamedTuple):
    tokens: list[int]
    logprobs: list[float]  # equal as floats: equal bits
    listed: Any
    cached: int


@cache
def nano() -> DeepseekV41:
    return load_model(NANO, device=str(DEVICE), dtype="bfloat16" if CUDA else "float32", drafts=True, invariant=True)


def engine_of(**changes: Any) -> Engine:
    drafts, sequences = changes.get("drafts", 0), changes.get("max_num_seqs", 4)
    fast = select.gpu_twins(DEVICE, torch.bfloat16)
    sizes = {"max_model_len": 640, "max_num_seqs": sequences, "max_num_batched_tokens": 256, "num_blocks": 40}
    forms = {"kv_format": kv_format() if CUDA else "float32", "graph_rows": sequences * (1 + drafts) if fast else 0}
    rest = {"prefix_caching": "off", "seed": 0, "batch_invariant": True}
    return Engine(build.build_core(NANO, nano(), EngineConfig(**{**sizes, **forms, **rest, **changes})))


def said(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[Said]:
    """What comes out where all are computed together."""
    for number, (prompt, params) in enumerate(asked):
        engine.add_request(f"{number}", list(prompt), params)
    finish(engine)
    found = []
    for number in range(len(asked)):
        output = engine.pop_output(f"{number}")
        one = output.outputs[0]
        found.append(
            Said(
                list(one.token_id),
                list(one.token_logprobs),
                (one.logprobs, output.prompt_logprobs),
                output.cached_tokens,
            )
        )
    return found


def long_prompt() -> list[int]:
    return (prompt_ids()[3] + prompt_ids()[0] + prompt_ids()[3])[:330]


@cache
def alone() -> list[Said]:
    """Every request of the tests by itself, without drafts, in chunks of 256."""
    engine = engine_of()
    found = [said(engine, [one])[0] for one in asked()]
    engine.close()
    return found


def asked() -> list[tuple[list[int], SamplingParams]]:
    return [
        (long_prompt(), GREEDY),
        (prompt_ids()[0], SEEDED),
        (prompt_ids()[1], DRAWN),
        (long_prompt()[:140], LISTING),
    ]


class TestNano:
    pytestmark = on_gpu

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"max_num_batched_tokens": 23},
            {"max_num_seqs": 8, "num_blocks": 60},
            {"drafts": 5},
            {"drafts": 3, "varlen": True, "max_num_batched_tokens": 64},
            {"graph_rows": 0},
            {"overlap": True, "drafts": 5},
            {"num_blocks": 7, "max_model_len": 512, "drafts": 2},  # not enough for all: some are preempted
        ],
        ids=str,
    )
    def test_requests_together_say_what_each_says_alone(self, changes: dict[str, Any]) -> None:
        engine = engine_of(**changes)
        together = said(engine, asked())
        engine.close()
        for one, other in zip(together, alone(), strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == other.logprobs
            assert one.listed == other.listed
        free_gpu()

    @pytest.mark.parametrize("drafts", [0, 5])
    def test_beside_requests_that_no_round_serves(self, drafts: int) -> None:
        """A penalty takes the whole step out of the rounds: the plain path draws the same tokens and numbers."""
        engine = engine_of(drafts=drafts)
        together = said(engine, [*asked()[:3], (prompt_ids()[2], PENALISED)])
        engine.close()
        assert together[:3] == alone()[:3]
        free_gpu()

    @pytest.mark.parametrize(("windows", "length"), [(4, 410), (0, 1800)])
    def test_a_prefix_from_the_cache_gives_the_bits_of_a_cold_run(self, windows: int, length: int) -> None:
        """With its window stored, and with windows of ten layers that are computed again."""
        prompt = (long_prompt() * 6)[:length]
        plain = engine_of(max_model_len=2048)
        cold = said(plain, [(prompt, GREEDY)])[0]
        plain.close()
        engine = engine_of(prefix_caching="exact", window_entries=windows, max_model_len=2048)
        said(engine, [(prompt[: length - 130], GREEDY)])
        hot = said(engine, [(prompt, GREEDY), asked()[1]])[0]
        engine.close()
        assert cold.cached == 0 and hot.cached > 0
        assert hot[:3] == cold[:3]
        free_gpu()

    def test_without_the_flag_bits_do_depend_on_company(self) -> None:
        """So the tests above can fail: a network that was loaded without it gives other numbers somewhere."""
        if not CUDA:
            pytest.skip("the CPU kernels know no other way")
        plain = load_model(NANO, device=str(DEVICE), dtype="bfloat16")
        ids = long_prompt()
        whole, pieces = (pieces_of(plain, ids, cuts) for cuts in ([len(ids)], [64, 65, 200, len(ids)]))
        assert not torch.equal(whole, pieces)


def storage_of(network: DeepseekV41, form: str) -> CacheStorage:
    storage = CacheStorage.for_model(network, max_num_seqs=4, num_blocks=52, kv_format=form, drafts=5, padded_rows=2400)
    for slot in range(4):
        storage.apply([OpenSlot(slot), SetTable(slot, 0, tuple(range(1 + 13 * slot, 14 + 13 * slot)))])
    return storage


def pieces_of(
    network: DeepseekV41,
    ids: list[int],
    cuts: list[int],
    mates: list[list[tuple[int, int]]] | None = None,
    storage: CacheStorage | None = None,
) -> Tensor:
    """Logits of every row of `ids`, computed in chunks that end at `cuts`. mates: of every step the slots and lengths
    of the chunks beside it."""
    storage = storage_of(network, kv_format()) if storage is None else storage
    at, written, found = 0, dict.fromkeys(range(1, 4), 0), []
    for step, end in enumerate(cuts):
        chunks = [Chunk(0, at, ids[at:end], end - at)]
        for slot, length in mates[step] if mates else ():
            start = written[slot]
            others = [3 + (start + i) * (slot + 5) % 390 for i in range(length)]
            chunks.append(Chunk(slot, start, others, 1))
            written[slot] += length
        found.append(network.forward(Batch.from_chunks(chunks, DEVICE), storage)[: end - at].clone())
        at = end
    return torch.cat(found)


class TestReleasedWidths:
    pytestmark = twins_alone

    def test_rows_of_a_few_layers_keep_their_bits(self) -> None:
        """One rank's share of six layers: every kind of layer, kernels at their real shapes."""
        from deepinfer.bench.rank_share import RankShare
        from deepinfer.model.random_source import random_model

        config = RankShare(layers=6).config()
        network = random_model(config, device=DEVICE, dtype="bfloat16", drafts=True, invariant=True)
        ids = torch.randint(3, 7000, (1300,), generator=torch.Generator().manual_seed(5)).tolist()
        with torch.inference_mode():
            whole = pieces_of(network, ids, [1300])  # so many rows that keys are unpacked first
            assert torch.isfinite(whole).all()
            cuts = [1, 2, 37, 38, 170, 300, 429, 558, 900, 1300]
            assert torch.equal(pieces_of(network, ids, cuts), whole)
            mates = [[(1, 33)], [(1, 1), (2, 300)], [(3, 700)], [(1, 6), (2, 6)]]
            assert torch.equal(pieces_of(network, ids, [64, 128, 300, 1300], mates), whole)
            # decode and verify steps, padded and as graphs of several sizes
            storage = storage_of(network, kv_format())
            first = pieces_of(network, ids, [100, 300], [[(1, 130)], [(2, 31)]], storage)
            assert torch.equal(first, whole[:300])
            graphs = GraphedModel(network, storage, rows=24, longest=1500)
            graphs.capture()
            at, lengths = 300, {1: 130, 2: 31}
            for rows, others in ((1, {}), (1, {1: 1}), (6, {1: 6, 2: 6}), (6, {}), (2, {2: 6}), (1, {})):
                chunks = [Chunk(0, at, ids[at : at + rows], rows)]
                chunks += [Chunk(slot, lengths[slot], ids[:n], n) for slot, n in others.items()]
                got = graphs.forward(Batch.from_chunks(chunks, DEVICE), storage)[:rows]
                assert torch.equal(got, whole[at : at + rows]), (rows, others)
                at += rows
                for slot, n in others.items():
                    lengths[slot] += n
        free_gpu()
