"""How an engine process makes its core: a description that travels there, called when it has arrived."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.engine.settings import Settings, check_sizes, resolve_settings
from deepinfer.model.hub import resolve_model

if TYPE_CHECKING:
    from deepinfer.engine.core import EngineCore
    from deepinfer.engine.core_process import Startup


@dataclass(frozen=True, kw_only=True)
class ModelCore:
    """The core of a checkpoint directory; `ModelCore.of` takes the arguments of `LLM`. Fields as these, and as resolved
    by engine/settings.py. verbose: print the settings in force to stderr."""

    path: Path
    settings: Settings
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.85
    num_blocks: int | None = None
    seed: int | None = 0
    verbose: bool = False

    @classmethod
    def of(
        cls,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.85,
        enable_prefix_caching: bool = True,
        prefix_mode: str = "exact",
        kv_format: str = "auto",
        yoco_truncation: str | None = None,
        yoco_keep_tokens: int | None = None,
        overlap: bool | None = None,
        queue_policy: str = "first-come",
        window_store_bytes: int | None = None,
        offload_bytes: int | None = None,
        batch_invariant: bool | None = None,
        seed: int | None = 0,
        num_blocks: int | None = None,
        verbose: bool = False,
    ) -> ModelCore:
        """Arguments and defaults of `LLM`, without those for several ranks and for drafting. Settings and directory are
        resolved here and now, a hub id is downloaded; what depends on the model is checked where the core is made.
        ValueError naming the argument."""
        check_sizes(max_num_seqs, max_model_len, num_blocks)
        settings = resolve_settings(
            device=device,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            ep=1,
            dp=None,
            cp=1,
            nextn=None,
            enable_prefix_caching=enable_prefix_caching,
            prefix_mode=prefix_mode,
            kv_format=kv_format,
            yoco_truncation=yoco_truncation,
            yoco_keep_tokens=yoco_keep_tokens,
            overlap=overlap,
            queue_policy=queue_policy,
            window_store_bytes=window_store_bytes,
            offload_bytes=offload_bytes,
            batch_invariant=batch_invariant,
        )
        return cls(
            path=resolve_model(None if model is None else str(model)),
            settings=settings,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            num_blocks=num_blocks,
            seed=seed,
            verbose=verbose,
        )

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
