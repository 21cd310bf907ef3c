"""The training model in float32 against recorded logits of small reference checkpoints, where those are present."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from training.config import NanoConfig
from training.export import load_export
from training.model import Mode, NanoModel
from training.tokenizer import token_map

ROOTS = [
    Path(__file__).parents[1] / "golden",
    Path(__file__).parents[2] / "shared/golden",
    Path(__file__).parents[3] / "shared/golden",
]
CASES = ["01-core-trace", "04-engram-repeat", "06-yarn-long"]


@pytest.mark.parametrize("case", CASES)
def test_logits_match_the_reference(case: str) -> None:
    folder = next((root / case for root in ROOTS if (root / case).is_dir()), None)
    if folder is None:
        pytest.skip("reference data is not here")
    config = NanoConfig.load(folder)
    model = NanoModel(config, token_map(Tokenizer.from_file(str(folder / "tokenizer.json"))))
    load_export(model, folder)
    expected = load_file(folder / "expected.safetensors")
    prompts = json.loads((folder / "prompts.json").read_text())
    for prompt in prompts if isinstance(prompts, list) else prompts["prompts"]:
        name = prompt["name"]
        ids = torch.tensor([prompt["ids"] + expected[f"{name}.decode_ids"].tolist()])
        want = torch.cat([expected[f"{name}.prefill_logits"], expected[f"{name}.decode_logits"]])
        with torch.no_grad():
            # Reference prompts are single documents even where they repeat the first id.
            got = model.logits(ids, Mode(sparse=True))[0]
        assert (got - want).abs().max() < 1e-4 * want.abs().max(), name
