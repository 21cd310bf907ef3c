"""How an engine process makes its core: a description that travels there, called when it has arrived."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.engine.settings import Settings

if TYPE_CHECKING:
    from deepinfer.engine.core import EngineCore
    from deepinfer.engine.core_process import Startup


@dataclass(frozen=True, kw_only=True)
class ModelCore:
    """The core of a checkpoint directory. Fields as the arguments of `LLM` and as resolved by engine/settings.py.
    verbose: print the settings in force to stderr."""

    path: Path
    settings: Settings
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.85
    num_blocks: int | None = None
    seed: int | None = 0
    verbose: bool = False

    def __call__(self, startup: Startup) -> EngineCore:
        """Loads the model and builds the core on it. ValueError naming what does not fit."""
        from deepinfer.engine.build import build_core, engine_config
        from deepinfer.model import load_model

        startup.progress("weights")
        model = load_model(self.path, device=str(self.settings.device), dtype=self.settings.dtype)
        startup.progress("cache")
        config = engine_config(
            self.settings,
            model.config,
            max_model_len=self.max_model_len,
            gpu_memory_utilization=self.gpu_memory_utilization,
            num_blocks=self.num_blocks,
            seed=self.seed,
        )
        core = build_core(self.path, model, config, on_event=startup.on_event)
        if self.verbose:
            print(self.settings.describe(self.path, model.config, config), file=sys.stderr, flush=True)
        startup.log_every = self.settings.logging_interval
        return core
