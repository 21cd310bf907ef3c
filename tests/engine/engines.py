"""One way to build an engine around a model of the tests: the real cache, the real runner, drafts if asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drafters import TableDrafter

from deepinfer.cache.manager import CacheManager
from deepinfer.cache.storage import CacheStorage
from deepinfer.config import EngineConfig
from deepinfer.engine.core import EngineCore
from deepinfer.engine.engine import Engine
from deepinfer.engine.grammars import Grammars
from deepinfer.engine.runner import ModelRunner
from deepinfer.model.config import ModelConfig
from deepinfer.speculation.budget import CostCurve, StepCosts
from deepinfer.speculation.planner import DraftPlanner
from deepinfer.speculation.propose import Drafter

# As if every row cost something: drafts that are unlikely do not pay.
COSTS = StepCosts(verify=CostCurve({1: 1.0, 8: 1.5, 64: 6.0}), draft=CostCurve({1: 0.2, 64: 0.4}))

MakeDrafter = Callable[[CacheStorage, int], Drafter]  # of the engine's storage and the number of drafts


def make_runner(
    model: Any,
    model_config: ModelConfig,
    config: EngineConfig,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    drafter: MakeDrafter | None = None,
) -> ModelRunner:
    storage = CacheStorage(
        model_config,
        max_num_seqs=config.max_num_seqs,
        num_blocks=config.num_blocks,
        drafts=config.drafts,
        window_entries=config.window_entries,
        device=model.device,
    )
    assert (drafter is not None) == (config.drafts > 0)
    own = drafter(storage, config.drafts) if drafter else None
    runner = ModelRunner(
        model,
        storage,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        drafter=own,
        drafts=config.drafts,
    )
    if isinstance(own, TableDrafter):
        own.tokens = runner.tokens
    return runner


def make_engine(
    model: Any,
    model_config: ModelConfig,
    config: EngineConfig,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    drafter: MakeDrafter | None = None,
    detokenizer: Any = None,
    refused_ids: dict[int, str] | None = None,
    clock: Callable[[], float] | None = None,
    offload_unit: int = 1000,
    grammars: Grammars | None = None,
) -> Engine:
    """offload_unit: bytes of `offload_bytes` that one offloaded block is said to take."""
    runner = make_runner(
        model, model_config, config, vocab_size=vocab_size, eos_token_ids=eos_token_ids, drafter=drafter
    )
    timed: dict[str, Any] = {} if clock is None else {"clock": clock}
    manager = CacheManager.for_model(model_config, config, offload_blocks=config.offload_bytes // offload_unit)
    planner = None
    if config.varlen:
        planner = DraftPlanner(config.max_num_seqs, config.drafts, varlen=True, costs=COSTS)
    core = EngineCore(
        runner,
        manager,
        config,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        refused_ids=refused_ids,
        planner=planner,
        grammars=grammars,
        **timed,
    )
    return Engine(core, detokenizer=detokenizer, **timed)
