"""One rank of an expert-parallel deployment, alone on its device, without a checkpoint: what is built to be measured.

A rank of EP-N holds 1/N of the routed experts and everything else whole, and serves sequences of its own. Its experts
get the tokens of all ranks, on average as many as its own tokens have slots. So a model with 1/N of the experts, all of
whose slots land on them, does one rank's work: the same bytes and operations, at the same shapes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.bench.random_cache import densest_format, fill_records
from deepinfer.cache.blocks import blocks_for
from deepinfer.cache.edits import OpenSlot, SetLength
from deepinfer.cache.formats import lookback
from deepinfer.cache.manager import CacheManager
from deepinfer.cache.storage import CacheStorage
from deepinfer.config import BLOCK_SIZE, VERIFY_ROWS
from deepinfer.engine.device_thread import DeviceThread
from deepinfer.engine.graphs import GraphedModel, PaddedStep
from deepinfer.engine.plan import Admission, StepPlan
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sizing import WIDE_ROWS
from deepinfer.kernels.select import gpu_twins, step_threads
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.batch import Batch
from deepinfer.model.config import ModelConfig
from deepinfer.model.presets import preset
from deepinfer.model.random_source import random_model
from deepinfer.model.wide_outputs import keep_wide_outputs
from deepinfer.speculation.propose import DraftModelDrafter

SPARE_STEPS = 20  # beside those that are timed: warm-up, trace
SMALL_TABLES = 100_000  # rows per hash column of the released shape's Engram tables: 0.6 GiB a table, not 94

LEFT_OUT = (
    "network: dispatch and combine between ranks do not happen, nor do their buffers",
    "imbalance: every token's slots land here; a real rank gets more or less, and waits for the fullest one",
    "router: it scores the experts of this rank only (1/N of its matrix)",
    "Engram tables are much smaller than the released ones, so the host's caches and page tables serve them better",
    "random weights and records: nothing is said about acceptance, and rows choose unrelated entries",
)


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What is built and measured. Raises ValueError naming the field."""

    preset: str = "flash"
    ep: int = 8
    layers: int | None = None
    sequences: int = 64
    context: int = 32_768  # tokens of each sequence before the first step
    nextn: int = 5
    prefill_chunk: int = 32_768  # 0 = no prefill is measured
    keep_tokens: int = 140
    steps: int = 20  # decode steps whose median is the figure
    engram_rows: int | None = None  # per hash column, where the prime search starts; None = small ones
    dtype: str = "bfloat16"
    kv_format: str | None = None  # None: the densest that the device reads
    batch_invariant: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("ep", 1),
            ("sequences", 1),
            ("context", 1),
            ("nextn", 0),
            ("prefill_chunk", 0),
            ("steps", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be at least {least}, got {getattr(self, name)}")

    @property
    def rows(self) -> int:
        """Of a decode step: every sequence's newest token and all of its drafts."""
        return self.sequences * (1 + self.nextn)

    @property
    def most_rows(self) -> int:
        """Of any step."""
        return max(self.rows, self.prefill_chunk)

    @property
    def longest(self) -> int:
        """Tokens of a sequence at the end of all steps, and more."""
        return self.context + 1 + (self.steps + SPARE_STEPS) * (1 + self.nextn)

    @property
    def num_blocks(self) -> int:
        """Cache blocks for what is open at once: all sequences that decode, or the prompt."""
        return max(self.sequences * blocks_for(self.longest), blocks_for(self.prefill_chunk + 1))

    def config(self) -> ModelConfig:
        """The model of one rank. ValueError where the experts cannot be shared among so many."""
        whole = preset(self.preset)
        if whole.n_routed_experts % self.ep:
            raise ValueError(
                f"ep: {whole.n_routed_experts} experts cannot be shared evenly among {self.ep} ranks; use a divisor"
            )
        rows = self.engram_rows or (SMALL_TABLES if self.preset == "flash" else None)
        config = preset(self.preset, layers=self.layers, drafts=self.nextn > 0, engram_vocab_size=rows)
        if self.nextn > config.dspark_block_size:
            raise ValueError(
                f"nextn: preset {self.preset} drafts {config.dspark_block_size} tokens at once, got {self.nextn}; use "
                f"a number from 0 to {config.dspark_block_size}"
            )
        for count, used in (
            (config.n_routed_experts, config.num_experts_per_tok),
            (config.dspark_n_routed_experts, config.dspark_num_experts_per_tok),
        ):
            if count // self.ep < used:
                raise ValueError(
                    f"ep: {self.ep} ranks leave {count // self.ep} experts each, a token uses {used} different ones"
                )
        return dataclasses.replace(
            config,
            n_routed_experts=config.n_routed_experts // self.ep,
            dspark_n_routed_experts=config.dspark_n_routed_experts // self.ep,
        )


class DecodeStep(NamedTuple):
    rows: int  # that it computed
    tokens: int  # that it gave
    seconds: float  # since the result of the step before it


class OneSize(GraphedModel):
    """The forward pass of an engine that always has the same sequences: one padded step, and what fits none."""

    def __init__(self, model: DeepseekV41, storage: CacheStorage, *, rows: int, longest: int) -> None:
        super().__init__(model, storage, rows=0, longest=longest)
        self._steps = [PaddedStep(model, storage, rows, longest, storage.max_num_seqs)]


class Rank:
    """Model, cache and runner of one rank, with `sequences` open that have `context` tokens each."""

    def __init__(self, share: RankShare, device: torch.device) -> None:
        self.share, self.device = share, device
        self.config = share.config()
        self.model = random_model(
            self.config,
            device=device,
            seed=share.seed,
            dtype=share.dtype,
            drafts=self.config.num_drafts > 0,
            invariant=share.batch_invariant,
        )
        if share.rows >= WIDE_ROWS and not share.batch_invariant:
            keep_wide_outputs(self.model)  # as an engine does where there is room
        most = max(share.longest, share.prefill_chunk) + VERIFY_ROWS
        if most > self.config.max_position_embeddings:
            raise ValueError(
                f"context: the model reads {self.config.max_position_embeddings} tokens, {most} are needed"
            )
        self.kv_format = share.kv_format or densest_format(device, share.dtype)
        self.storage = CacheStorage.for_model(
            self.model,
            max_num_seqs=share.sequences,
            num_blocks=share.num_blocks,
            drafts=share.nextn,
            kv_format=self.kv_format,
            padded_rows=share.most_rows,
        )
        self.manager = CacheManager(
            max_num_seqs=share.sequences,
            num_blocks=share.num_blocks,
            table_width=self.storage.tables.shape[1],
            window=self.config.sliding_window,
            num_layers=self.config.num_hidden_layers,
            lookback=lookback(self.config),
        )
        self._random = torch.Generator(device).manual_seed(share.seed)
        fill_records(self.storage, self._random)
        self.forward = OneSize(self.model, self.storage, rows=share.rows, longest=most)
        drafter = None
        if self.model.draft is not None:
            drafter = DraftModelDrafter(self.model.draft, self.storage, share.nextn)
        self.runner = ModelRunner(
            self.forward,
            self.storage,
            max_num_seqs=share.sequences,
            max_model_len=most,
            vocab_size=self.config.vocab_size,
            drafter=drafter,
            drafts=share.nextn,
            threads=partial(step_threads, device, self.model.numerics.dtype),
        )
        if gpu_twins(device, self.model.numerics.dtype):
            from deepinfer.engine.rounds import Rounds  # needs Triton

            self.runner.rounds = Rounds(
                self.forward,
                self.storage,
                self.runner.sampling,
                self.runner.tokens,
                max_model_len=most,
                draft_model=self.model.draft,
                drafts=share.nextn,
            )
        self._slots = np.arange(share.sequences)
        self._number = 0

    # -- decode ---------------------------------------------------------------------------------------------------

    def open_sequences(self) -> None:
        """All slots hold a sequence whose context counts as written, and know their newest token."""
        share = self.share
        for _ in self._slots:
            self.manager.reserve(self.manager.open(), share.longest)
        self.storage.apply(self.manager.take_edits())
        ids = self._tokens(share.sequences, share.context + 1)
        back = min(lookback(self.config), share.context)
        written = [
            SetLength(slot, share.context, tuple(ids[slot, share.context - back : share.context].tolist()))
            for slot in self._slots.tolist()
        ]
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        admissions = [
            Admission(slot, ids[slot].astype(np.int32), share.context + 1, greedy, slot)
            for slot in self._slots.tolist()
        ]
        self.storage.apply(written)
        self.runner.run(self._plan(admissions))

    def decode_steps(self, count: int) -> Iterator[DecodeStep]:
        """Steps of the engine over all sequences, as its overlapped loop runs them: each is handed over while the one
        before it runs. The first one finds an idle device."""
        device = DeviceThread(self.runner)
        try:
            before = time.perf_counter()
            for number in range(count + 1):
                if number < count:
                    device.submit(self._plan([]))
                if not number:
                    continue
                result = device.result()
                if result.error is not None:
                    raise result.error
                now = time.perf_counter()
                verified = 0 if result.num_verified is None else int(result.num_verified.sum())
                yield DecodeStep(len(self._slots) + verified, len(result.token_ids), now - before)
                before = now
        finally:
            device.close()

    def verify_batch(self) -> Batch:
        """A step in which every sequence verifies all of its drafts, at its length."""
        rows = np.full(len(self._slots), 1 + self.share.nextn)
        return Batch.from_arrays(
            slots=self._slots,
            starts=self.storage.lengths(self._slots).copy(),
            lengths=rows,
            num_logits=rows,
            token_ids=self._tokens(len(self._slots), 1 + self.share.nextn).ravel(),
            device=self.device,
        )

    def verify(self, batch: Batch) -> None:
        """The forward pass alone; `rewind` before the next one."""
        with torch.inference_mode():
            self.forward.forward(batch, self.storage)

    def rewind(self, batch: Batch) -> None:
        """The sequences are as long again as before the batch."""
        ends = zip(batch.chunk_slots.tolist(), batch.starts.tolist(), strict=True)
        self.storage.apply([SetLength(slot, length, ()) for slot, length in ends])
        if self.runner.rounds is not None:
            self.runner.rounds.leave(batch.chunk_slots)

    def close_sequences(self) -> None:
        for slot in self._slots.tolist():
            self.manager.close(slot)
        self.storage.apply([OpenSlot(slot) for slot in self._slots.tolist()])

    def _plan(self, admissions: list[Admission]) -> StepPlan:
        slots, count = self._slots, len(self._slots)
        none, rows = np.zeros(count, np.int64), np.full(count, 1 + self.share.nextn)
        starts = np.full(count, self.share.context + self._number * (1 + self.share.nextn))  # at most, as the engine's
        self._number += 1
        return StepPlan(
            number=self._number,
            edits=[],
            admissions=admissions,
            slots=slots,
            starts=starts,
            lengths=rows if self.share.nextn else none + 1,
            num_logits=rows if self.share.nextn else none + 1,
            window_floors=none,
            write_from=none,
            keep_from=none,
            draw_slots=slots,
            draw_rows=none,
            draw_epochs=none,
            num_decodes=count,
            draft_caps=np.full(count, self.share.nextn),
            propose=self.share.nextn > 0,
        )

    # -- prefill --------------------------------------------------------------------------------------------------

    def prefill_batch(self, narrowed: bool) -> Batch:
        """A prompt of `prefill_chunk` tokens in one chunk of a fresh sequence in slot 0. Close what is open before."""
        size = self.share.prefill_chunk
        slot = self.manager.open()
        self.manager.reserve(slot, size + 1)
        self.storage.apply(self.manager.take_edits())
        keep = max(0, size - self.share.keep_tokens) if narrowed else 0
        return Batch.from_arrays(
            slots=np.array([slot]),
            starts=np.zeros(1),
            lengths=np.array([size]),
            num_logits=np.ones(1),
            token_ids=self._tokens(1, size)[0],
            keep_from=np.array([keep]),
            device=self.device,
        )

    def prefill(self, batch: Batch) -> Tensor:
        """Computes the prompt, from its beginning each time."""
        self.storage.apply([SetLength(int(batch.chunk_slots[0]), 0, ())])
        with torch.inference_mode():
            return self.forward.forward(batch, self.storage)

    def end_prefill(self, batch: Batch) -> None:
        slot = int(batch.chunk_slots[0])
        self.manager.close(slot)
        self.storage.apply([OpenSlot(slot)])

    def _tokens(self, count: int, length: int) -> np.ndarray:
        """Random ordinary tokens, int64 [count, length]: the control tokens stand at both ends of the vocabulary."""
        random = np.random.default_rng(self.share.seed)
        return random.integers(3, self.config.vocab_size * 9 // 10, size=(count, length))

    # -- looking in -----------------------------------------------------------------------------------------------

    @property
    def kv_bytes_per_token(self) -> float:
        """Of the block pools as they are allocated, the null block left out."""
        total = sum(part.kv.nbytes + part.keys.nbytes for part in self.storage.records.values())
        return total / ((self.share.num_blocks + 1) * BLOCK_SIZE)
