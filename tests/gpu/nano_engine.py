"""nano in bfloat16 on a GPU under the whole engine, with graphs and rounds, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpu_device import DEVICE
from real_engine import finish

from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.config import EngineConfig
from deepinfer.engine import build
from deepinfer.engine.engine import Engine
from deepinfer.engine.runner import ModelRunner
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.kernels import select
from deepinfer.model import load_model
from deepinfer.model.backbone import DeepseekV41

NANO = Path(__file__).parents[2] / "models" / "nano"
TEXTS = (
    "Once upon a time there was a little girl who lived in a village near the forest.",
    "def fibonacci(n):\n",
    "The old king had three sons and",
    "import os\nimport sys\n\n\ndef main(argv):\n" + "    print(argv)\n" * 20,
)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, ignore_eos=True, seq_seed=7)


@cache
def model() -> DeepseekV41:
    return load_model(NANO, device=str(DEVICE), dtype="bfloat16", drafts=True)


@cache
def prompt_ids() -> list[list[int]]:
    tokenizer = Tokenizer.from_directory(NANO)
    return [tokenizer.encode_prompt(text, add_bos=True) for text in TEXTS]


def kv_format() -> str:
    return "hopper" if select.gpu_twins(DEVICE, torch.bfloat16) else "packed"


class NanoEngine:
    """An engine, its runner, and how many of its plans ran as rounds, and of these behind one that had not ended."""

    def __init__(self, **changes: Any) -> None:
        """changes: fields of EngineConfig."""
        fast = select.gpu_twins(DEVICE, torch.bfloat16)
        drafts = changes.get("drafts", 0)
        sizes = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 256, "num_blocks": 24, "seed": 0}
        graphs = {"graph_rows": 4 * (1 + drafts) if fast else 0, "kv_format": kv_format(), "prefix_caching": "off"}
        made: list[ModelRunner] = []
        plain = build.ModelRunner
        build.ModelRunner = lambda *a, **rest: made.append(plain(*a, **rest)) or made[-1]  # type: ignore
        try:
            core = build.build_core(NANO, model(), EngineConfig(**{**sizes, **graphs, **changes}))
        finally:
            build.ModelRunner = plain  # type: ignore[misc]
        (self.runner,) = made
        self.engine = Engine(core)
        self.rounds = self.runner.rounds
        self.rounds_run = self.rounds_behind = 0
        if self.rounds is not None:
            self.rounds.begin = self._counted(self.rounds.begin)  # type: ignore[method-assign]

    def _counted(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*found: Any, behind: bool) -> Any:
            self.rounds_run += 1
            self.rounds_behind += behind
            return begin(*found, behind=behind)

        return counted

    def complete(self, params: SamplingParams, prompts: Sequence[list[int]], rounds: bool = True) -> list[list[int]]:
        """Tokens of the prompts, computed together; rounds False: on the runner's own path."""
        self.runner.rounds = self.rounds if rounds else None
        for number, prompt in enumerate(prompts):
            self.engine.add_request(f"{number}", list(prompt), params)
        finish(self.engine)
        return [list(self.engine.pop_output(f"{number}").outputs[0].token_id) for number in range(len(prompts))]

    def close(self) -> None:
        self.engine.close()
