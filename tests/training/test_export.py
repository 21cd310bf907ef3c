"""The bundled checkpoint: released layout, and agreement of the engine with the training model."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from training import quant
from training.config import NanoConfig, nano
from training.draft import DraftModel
from training.draft_export import entries as draft_entries
from training.draft_export import with_stages
from training.export import entries, export_model, load_export
from training.model import Mode, NanoModel
from training.tokenizer import load_tokenizer, token_map

MODEL = Path(__file__).parents[2] / "models/nano"
TEXT = (
    "The river ran past the old mill. In the morning a boat came down from the hills.\n\ndef area(width, height):\n    "
)


@pytest.fixture(scope="module")
def tensors() -> dict[str, tuple[str, list[int]]]:
    found = {}
    for file in sorted(MODEL.glob("*.safetensors")):
        with safe_open(file, "pt") as reader:
            for name in reader.keys():  # noqa: SIM118
                part = reader.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    return found


def test_names_dtypes_and_shapes(tensors: dict[str, tuple[str, list[int]]]) -> None:
    config = NanoConfig.load(MODEL)
    model = NanoModel(config, np.zeros(config.vocab_size, dtype=np.int64))
    draft = DraftModel(config)
    wanted = {}
    listed = [(model, *entry) for entry in entries(config)] + [(draft, *entry) for entry in draft_entries(config)]
    for owner, name, kind, parameter, index in listed:
        stack = model.tables[int(parameter[7:])] if parameter.startswith("tables.") else getattr(owner, parameter)
        rows, *columns = (stack[index] if index else stack).shape if parameter != "wo_a" else (256, 512)
        if kind in ("bf16", "f32"):
            wanted[name] = ({"bf16": "BF16", "f32": "F32"}[kind], [rows, *columns])
        elif kind == "fp4":
            wanted[f"{name}.weight"] = ("I8", [rows, columns[0] // 2])
            wanted[f"{name}.scale"] = ("F8_E8M0", [rows, columns[0] // 32])
        else:
            wanted[f"{name}.weight"] = ("F8_E4M3", [rows, columns[0]])
            wanted[f"{name}.scale"] = ("F8_E8M0", [rows if kind == "rows" else rows // 32, columns[0] // 32])
    assert tensors == wanted


def test_index_and_sizes(tensors: dict[str, tuple[str, list[int]]]) -> None:
    index = json.loads((MODEL / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert sum(f.stat().st_size for f in MODEL.iterdir()) <= 40_000_000
    assert all(re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) for name in index["weight_map"].values())


def test_config_fits_the_tokenizer() -> None:
    config = NanoConfig.load(MODEL)
    assert with_stages(config) == with_stages(nano(MODEL))
    assert config.num_nextn_predict_layers == 0 or config == with_stages(config)


def test_export_comes_back(tmp_path: Path) -> None:
    """Weights on the checkpoint's grid survive a second export unchanged."""
    config = NanoConfig.load(MODEL)
    first, second = (NanoModel(config, token_map(load_tokenizer(MODEL))) for _ in range(2))
    load_export(first, MODEL)
    export_model(first, tmp_path)
    load_export(second, tmp_path)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_fp4_codes() -> None:
    values = torch.tensor([[0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0.5]])
    assert torch.equal(quant.unpack_fp4(quant.pack_fp4(values)), values)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0])
    assert quant.round_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


@pytest.mark.slow
def test_engine_agrees_with_the_training_model() -> None:
    llm = pytest.importorskip("deepinfer").LLM(model=str(MODEL), device="cpu", dtype="float32", verbose=False)
    tokenizer = load_tokenizer(MODEL)
    ids = [0, *tokenizer.encode(TEXT * 40).ids][:700]
    model = NanoModel(NanoConfig.load(MODEL), token_map(tokenizer))
    load_export(model, MODEL)
    with torch.no_grad():
        want = model.logits(torch.tensor([ids]), Mode(sparse=True))[0]
    got = llm.logits(ids)
    assert (got - want).abs().max() < 1e-3 * want.abs().max()
