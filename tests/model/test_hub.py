"""A model name leads to a directory, or to an error that says what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from deepinfer.model import hub
from deepinfer.model.hub import ModelNotFoundError, resolve_model


@pytest.fixture(autouse=True)
def no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPINFER_HF_MODEL_DIR", raising=False)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_local_directory_is_itself(model_dir: Path) -> None:
    assert resolve_model(str(model_dir)) == model_dir


def test_variable_replaces_the_default_but_not_a_given_name(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(model_dir))
    assert resolve_model() == model_dir
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", "/no/such/place")
    assert resolve_model(str(model_dir)) == model_dir
    with pytest.raises(ModelNotFoundError, match="DEEPINFER_HF_MODEL_DIR"):
        resolve_model()


def test_nano_is_the_bundled_model(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BUNDLED", model_dir.parent)
    model_dir.rename(model_dir.parent / "nano")
    assert resolve_model() == resolve_model("nano") == model_dir.parent / "nano"


def test_missing_bundled_model_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BUNDLED", tmp_path)
    with pytest.raises(ModelNotFoundError, match="make-checkpoint"):
        resolve_model("nano")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_missing_file_is_named(model_dir: Path, missing: str) -> None:
    (model_dir / missing).unlink()
    with pytest.raises(ModelNotFoundError, match=missing):
        resolve_model(str(model_dir))


def test_config_alone_is_enough_to_describe(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").unlink()
    assert resolve_model(str(model_dir), describe_only=True) == model_dir


def test_file_instead_of_directory_is_refused(model_dir: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is a file"):
        resolve_model(str(model_dir / "config.json"))


@pytest.mark.parametrize("name", ["", "  ", "./nowhere", "/nowhere", "a/b/c", "word"])
def test_name_that_leads_nowhere_is_refused_without_a_download(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("no download expected"))
    with pytest.raises(ModelNotFoundError):
        resolve_model(name)


def test_unreadable_directory_is_refused(model_dir: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    model_dir.chmod(0)
    try:
        with pytest.raises(ModelNotFoundError, match="permission"):
            resolve_model(str(model_dir))
    finally:
        model_dir.chmod(0o755)


def test_hub_id_is_downloaded_without_code_or_pickles(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        assert name == "owner/name"
        asked.append(allow_patterns)
        return str(model_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("owner/name") == model_dir
    assert resolve_model("owner/name", describe_only=True) == model_dir
    assert all(pattern.endswith((".json", ".safetensors")) for patterns in asked for pattern in patterns)
    assert not any("safetensors" in pattern for pattern in asked[1])


def test_offline_without_a_cached_copy_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("not there")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match="hf download owner/name"):
        resolve_model("owner/name")
