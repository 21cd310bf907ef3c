"""What a step costs on this machine, measured at start: the curves by which drafts are verified or left (spec/dspark.md
4.2).

Dummy steps run through the model, the cache and the drafter that will serve, in slots and blocks that are given back
before the first request comes. They write into them; that is never seen, because what a slot or a block holds counts
only up to the length of the sequence that it is opened for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer.cache.edits import OpenSlot, SetLength
from deepinfer.cache.manager import CacheManager
from deepinfer.cache.storage import CacheStorage
from deepinfer.config import BLOCK_SIZE, EngineConfig
from deepinfer.engine.runner import StepModel
from deepinfer.model.batch import Batch
from deepinfer.speculation.budget import CostCurve, StepCosts
from deepinfer.speculation.propose import Drafter, DraftLaw, Rule

REPEATS = 3
SECONDS = 0.8  # once everything is measured, only what fits into this is measured again: engines are to start soon
CONTEXT = 512  # tokens before every row: windows are full, and there is something to select from
# Close together where a step is small and rows are cheap, then so that straight lines between them are near enough.
ROWS = (1, 2, 4, 6, 8, 12, 16, 32, 64, 128, 192)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)


class _Point(NamedTuple):
    drafts: bool  # a draft pass, else a target pass
    size: int  # sequences, or rows


def grid(most: int, points: tuple[int, ...]) -> list[int]:
    """Sizes to measure: the points below `most`, doubled on beyond the last of them, and `most` itself."""
    sizes = [size for size in points if size < most]
    while sizes and 2 * sizes[-1] < most and sizes[-1] >= points[-1]:
        sizes.append(2 * sizes[-1])
    return [*sizes, most]


def measure_costs(
    model: StepModel,
    storage: CacheStorage,
    manager: CacheManager,
    drafter: Drafter,
    config: EngineConfig,
    *,
    vocab_size: int,
    typical: Callable[[list[float]], float] = min,
    clock: Callable[[], float] = time.perf_counter,
    progress: bool = False,
) -> StepCosts:
    """Seconds of target passes by rows and of draft passes by sequences.

    Nothing else may use the engine's parts meanwhile; afterwards all slots and blocks are free, as they were. typical:
    what the repeats of one point amount to.
    """
    sequences = min(config.max_num_seqs, config.num_blocks)
    most_rows = min(sequences * (1 + config.drafts), config.max_num_batched_tokens)
    points = [_Point(False, rows) for rows in grid(most_rows, ROWS)]
    points += [_Point(True, count) for count in grid(sequences, SEQUENCES)]
    seconds: dict[_Point, list[float]] = {point: [] for point in points}
    with _dummies(storage, manager, config, sequences) as dummies:
        steps = _Steps(model, storage, drafter, dummies, config.drafts, vocab_size)
        bar = tqdm(
            total=len(points) * REPEATS, desc="Measuring steps", disable=not progress, delay=1, leave=False
        )  # shown only to those who have to wait
        with bar, torch.inference_mode():
            for point in (points[0], _Point(False, most_rows), _Point(True, sequences)):
                steps.run(point)  # what is made at first use is not to be measured
            begin = clock()
            # Round after round, so that a busy moment of the machine does not spoil all repeats of one point.
            for turn in range(REPEATS):
                for point in points:
                    if turn and clock() - begin + min(seconds[point]) > SECONDS:
                        continue
                    before = clock()
                    steps.run(point)
                    seconds[point].append(clock() - before)
                    bar.update()
    curves = [
        CostCurve({point.size: typical(times) for point, times in seconds.items() if point.drafts is drafts})
        for drafts in (False, True)
    ]
    return StepCosts(verify=curves[0], draft=curves[1])


def typical_seconds(device: torch.device) -> Callable[[list[float]], float]:
    """What repeats on a device amount to: processors are shared with other programs, which only ever add time."""
    return min if device.type == "cpu" else statistics.median


class _Dummies(NamedTuple):
    slots: np.ndarray  # int64 [n]
    context: int  # tokens that each of them counts as written


@contextmanager
def _dummies(storage: CacheStorage, manager: CacheManager, config: EngineConfig, count: int) -> Iterator[_Dummies]:
    """Open slots with blocks for a context and a verify step each; afterwards closed, and the slots as good as new."""
    rows = 1 + config.drafts
    room = min(config.num_blocks // count, manager.table_width) * BLOCK_SIZE
    context = max(0, min(CONTEXT, room, config.max_model_len) - rows)
    slots: list[int] = []
    try:
        for _ in range(count):
            slots.append(manager.open())
            manager.reserve(slots[-1], context + rows)
        storage.apply(manager.take_edits())
        yield _Dummies(np.array(slots, np.int64), context)
    finally:
        for slot in reversed(slots):  # so that they are taken in the same order again
            manager.close(slot)
        storage.apply([OpenSlot(slot) for slot in slots])


class _Steps:
    """Runs one point of the grid."""

    def __init__(
        self,
        model: StepModel,
        storage: CacheStorage,
        drafter: Drafter,
        dummies: _Dummies,
        drafts: int,
        vocab_size: int,
    ) -> None:
        self._model, self._storage, self._drafter, self._dummies = model, storage, drafter, dummies
        self._rows_each = 1 + drafts
        # Many different tokens, so that their experts are as many as they will be.
        self._ids = np.random.default_rng(0).integers(vocab_size, size=len(dummies.slots) * self._rows_each)

    def run(self, point: _Point) -> None:
        result: Any = self._draft(point.size) if point.drafts else self._verify(point.size)
        result.flatten()[:1].tolist()  # until the device is done

    def _verify(self, rows: int) -> Tensor:
        """Half as many drafts per sequence as there may be, which is about what is verified; more where the sequences
        do not suffice."""
        slots = self._dummies.slots
        count = min(len(slots), -(-rows // -(-self._rows_each // 2)))
        count = max(count, -(-rows // self._rows_each))
        lengths = np.full(count, rows // count) + (np.arange(count) < rows % count)
        self._rewind(count)
        batch = Batch.from_arrays(
            slots=slots[:count],
            starts=np.full(count, self._dummies.context),
            lengths=lengths,
            num_logits=lengths,
            token_ids=self._ids[:rows],
            device=self._model.device,
        )
        return self._model.forward(batch, self._storage)

    def _draft(self, count: int) -> Tensor:
        self._rewind(count)
        device = self._model.device
        law = DraftLaw(
            rules=np.full(count, Rule.GREEDY, np.uint8),
            temperature=torch.ones(count, device=device),
            key=(torch.zeros(count, dtype=torch.int64, device=device),) * 2,
        )
        anchors = torch.from_numpy(self._ids[:count]).to(device)
        return self._drafter.propose(self._dummies.slots[:count], anchors, law).token_ids

    def _rewind(self, count: int) -> None:
        context = self._dummies.context
        self._storage.apply([SetLength(slot, context, ()) for slot in self._dummies.slots[:count].tolist()])
