"""The cost of a step, measured before the engine serves: the right sizes, and nothing of it is seen later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from integrity import assert_all_free

from deepinfer.cache.edits import SetLength
from deepinfer.cache.manager import CacheManager
from deepinfer.cache.storage import CacheStorage
from deepinfer.config import EngineConfig
from deepinfer.engine import profile
from deepinfer.engine.drafting import describe_choice
from deepinfer.engine.profile import grid, measure_costs, typical_seconds
from deepinfer.model import load_model
from deepinfer.model.backbone import DeepseekV41
from deepinfer.speculation.propose import DraftModelDrafter


@pytest.fixture(scope="module")
def model(draft_checkpoint: Path) -> DeepseekV41:
    return load_model(draft_checkpoint, drafts=True)


class Timed:
    """A clock that stands still but where the real model and the real drafter run: they take what a rule says."""

    def __init__(
        self, model: DeepseekV41, drafter: Any, fixed: float = 1.0, per_row: float = 0.01, draft: float = 0.1
    ) -> None:
        self.now = 0.0
        self.device = model.device
        self.rows: list[int] = []
        self.shapes: list[np.ndarray] = []
        self.sequences: list[int] = []
        self._model, self._drafter = model, drafter
        self._fixed, self._per_row, self._draft = fixed, per_row, draft

    def __call__(self) -> float:
        return self.now

    def forward(self, batch: Any, storage: Any) -> torch.Tensor:
        self.now += self._fixed + self._per_row * batch.num_rows
        self.rows.append(batch.num_rows)
        self.shapes.append(batch.lengths)
        return self._model.forward(batch, storage)

    def propose(self, slots: np.ndarray, *rest: Any) -> Any:
        self.now += self._draft * len(slots)
        self.sequences.append(len(slots))
        return self._drafter.propose(slots, *rest)


class Parts:
    def __init__(self, model: DeepseekV41, *, drafts: int = 5, **sizes: int) -> None:
        fitting = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 16} | sizes
        self.config = EngineConfig(**fitting, drafts=drafts, varlen=True, window_entries=2)
        self.storage = CacheStorage.for_model(
            model,
            max_num_seqs=self.config.max_num_seqs,
            num_blocks=self.config.num_blocks,
            drafts=drafts,
            window_entries=2,
        )
        self.manager = CacheManager.for_model(model.config, self.config)
        assert model.draft is not None
        self.drafter = DraftModelDrafter(model.draft, self.storage, drafts)

    def measure(self, timed: Timed, **options: Any) -> Any:
        return measure_costs(
            timed, self.storage, self.manager, timed, self.config, vocab_size=512, clock=timed, **options
        )


def test_the_grid_is_fine_where_steps_are_small_and_ends_with_the_largest_step() -> None:
    assert grid(1, (1, 2, 4)) == [1]
    assert grid(4, (1, 2, 4)) == [1, 2, 4]
    assert grid(24, profile.ROWS) == [1, 2, 4, 6, 8, 12, 16, 24]
    assert grid(192, profile.ROWS) == list(profile.ROWS)
    assert grid(1536, profile.ROWS)[-4:] == [192, 384, 768, 1536]
    assert grid(1000, (1, 2, 4)) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]


def test_the_curves_are_what_the_clock_saw_at_every_size_that_a_step_may_have(model: DeepseekV41) -> None:
    parts = Parts(model)
    timed = Timed(model, parts.drafter)
    costs = parts.measure(timed)
    assert costs.verify.sizes.tolist() == [1, 2, 4, 6, 8, 12, 16, 24] == sorted(set(timed.rows))
    assert costs.draft.sizes.tolist() == [1, 2, 4] == sorted(set(timed.sequences))
    for rows in (1, 6, 20, 24):
        assert costs.verify.at(rows) == pytest.approx(1 + 0.01 * rows)
    assert costs.draft.at(3) == pytest.approx(0.3)
    assert not costs.are_flat
    assert all(shape.max() <= 6 and shape.max() - shape.min() <= 1 for shape in timed.shapes)


def test_steps_are_no_larger_than_the_token_budget_allows(model: DeepseekV41) -> None:
    parts = Parts(model, max_num_batched_tokens=10)
    timed = Timed(model, parts.drafter)
    parts.measure(timed)
    assert max(timed.rows) == 10


def test_a_slow_model_is_measured_once_and_a_fast_one_three_times(model: DeepseekV41) -> None:
    """Between them, small steps are measured more often than large ones: they take less of the time."""
    for fixed, per_row, small, large in ((1.0, 0.01, 1, 1), (1e-6, 0.0, 3, 3), (0.0, 0.009, 2, 1)):
        parts = Parts(model)
        timed = Timed(model, parts.drafter, fixed=fixed, per_row=per_row, draft=1e-6)
        parts.measure(timed)
        assert (timed.rows.count(4), timed.rows.count(24) - 1) == (small, large)  # the largest is run once before


def test_one_slow_repeat_counts_for_nothing_or_for_its_rank(model: DeepseekV41) -> None:
    """A busy moment: the least ignores it, and what a caller takes instead is given all repeats."""
    parts = Parts(model, max_num_seqs=1)
    timed = Timed(model, parts.drafter, fixed=1e-3, per_row=0.0, draft=1e-3)
    forward, calls = timed.forward, []

    def once_slow(batch: Any, storage: Any) -> torch.Tensor:
        calls.append(batch.num_rows)
        if calls.count(2) == 2:
            timed.now += 0.05 * (batch.num_rows == 2)
        return forward(batch, storage)

    timed.forward = once_slow  # type: ignore[method-assign]
    seen: list[list[float]] = []

    def least(times: list[float]) -> float:
        seen.append(times)
        return min(times)

    costs = parts.measure(timed, typical=least)
    assert costs.verify.at(2) == pytest.approx(1e-3)
    assert max(map(max, seen)) > 0.05


def test_afterwards_the_cache_is_as_good_as_new(model: DeepseekV41) -> None:
    parts = Parts(model)
    parts.measure(Timed(model, parts.drafter))
    manager, storage = parts.manager, parts.storage
    assert_all_free(manager)
    assert manager.num_cached_blocks == manager.num_windows == 0 and manager.stats == type(manager.stats)()
    assert manager.take_edits() == []
    slots = np.arange(4)
    assert storage.lengths(slots).tolist() == [0] * 4
    assert (storage.tables == 0).all() and (storage.last_tokens == -1).all()
    assert [manager.open() for _ in slots] == slots.tolist()  # in the order of a new one
    for slot in slots.tolist():
        manager.close(slot)


def test_a_failure_while_measuring_leaves_nothing_behind(model: DeepseekV41) -> None:
    parts = Parts(model)
    timed = Timed(model, parts.drafter)

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    timed.forward = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        parts.measure(timed)
    assert_all_free(parts.manager)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_blocks": 2, "max_num_seqs": 8},  # fewer blocks than sequences
        {"max_model_len": 2, "num_blocks": 4},  # no room for a verify step
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    ],
)
def test_small_engines_are_measured_as_far_as_they_go(model: DeepseekV41, sizes: dict[str, int]) -> None:
    parts = Parts(model, **sizes)
    costs = parts.measure(Timed(model, parts.drafter))
    assert costs.verify.at(1) > 0 and costs.draft.at(1) > 0
    assert_all_free(parts.manager)


def test_rows_stand_behind_a_context_that_fills_the_windows(model: DeepseekV41, monkeypatch) -> None:
    parts = Parts(model, max_model_len=640, num_blocks=20)
    seen: set[int] = set()
    apply = parts.storage.apply

    def spy(edits: Any) -> None:
        edits = list(edits)
        seen.update(edit.length for edit in edits if isinstance(edit, SetLength))
        apply(edits)

    monkeypatch.setattr(parts.storage, "apply", spy)
    parts.measure(Timed(model, parts.drafter))
    assert seen == {512 - 6}


def test_the_printed_lines_name_the_curves_ends(model: DeepseekV41) -> None:
    parts = Parts(model)
    costs = parts.measure(Timed(model, parts.drafter))
    lines = describe_choice("as it pays", costs, calibrated=True)
    assert lines[0] == "verified: as it pays"
    assert lines[1].startswith("measured: 1 row 1.01e+03 ms, 8 rows 1.08e+03 ms, 24 rows 1.24e+03 ms; drafting for ")
    assert lines[1].endswith("1 sequence 100 ms, 2 sequences 200 ms, 4 sequences 400 ms")
    assert lines[2] == "confidence: calibrated by dspark_calibration.json"
    assert len(describe_choice("always 5", None, calibrated=False)) == 2


def test_a_shared_processor_counts_by_its_best_repeat_and_a_device_of_ones_own_by_the_middle_one() -> None:
    times = [1.0, 3.0, 2.5]
    assert typical_seconds(torch.device("cpu"))(times) == 1.0
    assert typical_seconds(torch.device("cuda"))(times) == 2.5
