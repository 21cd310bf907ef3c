"""Engines on a CPU whose plans of decodes run as rounds of the device, in Triton's interpreter; and drafts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import TableDrafter
from real_engine import VOCAB_USED, guess_from_cold_runs
from torch import Tensor

from deepinfer.config import EngineConfig
from deepinfer.engine import build
from deepinfer.engine.device_round import DraftsOfRound, RoundColumns
from deepinfer.engine.engine import Engine
from deepinfer.engine.graphs import GraphedModel
from deepinfer.engine.rounds import Rounds
from deepinfer.engine.runner import ModelRunner
from deepinfer.kernels.triton.sampling_rows import RowLaws
from deepinfer.model.backbone import DeepseekV41
from deepinfer.speculation.propose import DraftLaw


class RoundEngine:
    """An engine, its runner, and of every plan that ran as a round whether it began before the one before had ended.

    right: drafts of rounds are what cold runs gave, each with this probability; None = the draft model's.
    """

    def __init__(
        self, checkpoint: Path, model: DeepseekV41, config: EngineConfig, *, right: float | None = None
    ) -> None:
        made: list[ModelRunner] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "ModelRunner", lambda *a, **rest: made.append(ModelRunner(*a, **rest)) or made[-1])
            core = build.build_core(checkpoint, model, config)
        (self.runner,) = made
        assert isinstance(self.runner.model, GraphedModel)
        self.engine = Engine(core)
        self.behind: list[bool] = []
        rounds = self.runner.rounds = Rounds(
            self.runner.model,
            self.runner.storage,
            self.runner.sampling,
            self.runner.tokens,
            max_model_len=config.max_model_len,
            draft_model=model.draft if config.drafts else None,
            drafts=config.drafts,
        )
        if right is not None and config.drafts:
            rounds._rounds._drafter = _KnownAnswers(rounds._columns, self.runner, config.drafts, right)
        begin = rounds.begin

        def counted(*found: Any, behind: bool) -> Any:
            self.behind.append(behind)
            return begin(*found, behind=behind)

        rounds.begin = counted  # type: ignore[method-assign]


class _KnownAnswers:
    """`guess_from_cold_runs` behind the interface of a round."""

    def __init__(self, columns: RoundColumns, runner: ModelRunner, k: int, right: float) -> None:
        self._columns, self._null_slot = columns, len(runner.tokens)
        self._inner = guess_from_cold_runs(right)(self, k)  # type: ignore[arg-type]
        assert isinstance(self._inner, TableDrafter)
        self._inner.tokens = runner.tokens

    def lengths(self, slots: Any) -> Any:
        """In the storage's place, which is behind."""
        return self._columns.lengths.numpy()[slots]

    def propose(self, slots: Tensor, anchors: Tensor, laws: RowLaws) -> DraftsOfRound:
        live = (slots != self._null_slot).nonzero()[:, 0]
        law = DraftLaw(None, None, (None, None))  # type: ignore[arg-type]  # nobody asks
        proposal = self._inner.propose(slots[live].numpy(), anchors[live], law)
        drafts = torch.full((len(slots), self._inner.k), VOCAB_USED)
        confidence = torch.full((len(slots), self._inner.k), -1.0)
        drafts[live], confidence[live] = proposal.token_ids, proposal.confidence
        return DraftsOfRound(drafts, confidence)
