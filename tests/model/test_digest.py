"""Cached state is shared only between engines that hold the same model."""

from __future__ import annotations

import shutil
from pathlib import Path

from deepinfer.model.digest import SAMPLE, model_digest


def test_a_copy_is_the_same_model_and_a_changed_one_is_not(tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))
    original = model_digest(tiny_checkpoint)
    assert model_digest(copy) == original and len(original) == 32
    (copy / "notes.txt").write_text("what else lies there does not matter")
    assert model_digest(copy) == original

    for name in ("config.json", "tokenizer.json"):
        file = copy / name
        text = file.read_text()
        file.write_text(text + " ")
        assert model_digest(copy) != original
        file.write_text(text)

    weights = max(copy.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(weights.read_bytes())
    assert len(data) > SAMPLE
    data[len(data) // 2 + 5] ^= 1  # a fine-tune changes every tensor, so the middle too
    weights.write_bytes(data)
    assert model_digest(copy) != original
    weights.rename(copy / "other.safetensors")
    assert model_digest(copy) != original
