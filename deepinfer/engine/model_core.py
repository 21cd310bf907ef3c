"""How an engine process makes its core: a description that travels there, called when it has arrived."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from deepinfer.engine.arguments import Arguments, EngineArguments, shows_arguments
from deepinfer.engine.settings import Settings, resolve_settings
from deepinfer.model.hub import resolve_model

if TYPE_CHECKING:
    from deepinfer.engine.core import EngineCore
    from deepinfer.engine.core_process import Startup


@dataclass(frozen=True, kw_only=True)
class ModelCore:
    """The core of a checkpoint directory under settings that are resolved; `ModelCore.of` takes the arguments of `LLM`.
    verbose: print the settings in force to stderr."""

    path: Path
    settings: Settings
    verbose: bool = False

    @classmethod
    @shows_arguments
    def of(cls, model: str | Path | None = None, *, verbose: bool = False, **arguments: Unpack[Arguments]) -> ModelCore:
        """Arguments and defaults of `LLM`. Settings and directory are resolved here and now, a hub id is downloaded;
        what depends on the model is checked where the core is made. ValueError naming the argument, TypeError for an
        unknown one."""
        settings = resolve_settings(EngineArguments(**arguments))
        if not verbose:
            settings.warn()
        return cls(path=resolve_model(None if model is None else str(model)), settings=settings, verbose=verbose)

    def __call__(self, startup: Startup) -> EngineCore:
        """Loads the model and builds the core on it. ValueError naming what does not fit."""
        from deepinfer.engine.build import build_core, describe, load

        startup.progress("weights")
        model, config = load(self.path, self.settings)
        startup.progress("cache")
        core = build_core(self.path, model, config, on_event=startup.on_event)
        if self.verbose:
            print(describe(self.path, self.settings, model.config, core), file=sys.stderr, flush=True)
        startup.log_every = self.settings.logging_interval
        return core
