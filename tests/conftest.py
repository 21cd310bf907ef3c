"""Fixtures that every folder of tests may use: a tiny random V4.1 checkpoint, an LLM on it, and cache integrity."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `golden` and other helpers that stand beside this file
from integrity import assert_all_free

if TYPE_CHECKING:
    from deepinfer import LLM


# What device="auto" means here, also where there is a GPU: the tests for one are marked and name it.
os.environ.setdefault("DEEPINFER_ACCELERATOR", "cpu")
# Triton reads it when it is imported: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    # The models of the tests are too small to gain from threads, and workers of xdist share the cores: threads that
    # wait for each other on a busy machine made the same tests ten times slower.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def caches_stay_whole() -> Iterator[None]:
    """After every test, every cache that is still alive accounts for all its blocks and slots."""
    yield
    module = sys.modules.get("deepinfer.cache.cache")
    if module is not None:
        for cache in list(module.live_caches):
            cache.check_integrity()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in the official layout: 8 layers with every role, vocabulary 512, window 16."""
    from deepinfer.model.presets import preset
    from deepinfer.model.random_checkpoint import write_random_checkpoint

    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_random_checkpoint(directory, preset("tiny"))
    return directory


@pytest.fixture(scope="session")
def draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with three draft stages behind it, for blocks of 5. Random ones: few drafts are accepted."""
    from deepinfer.model.presets import preset
    from deepinfer.model.random_checkpoint import write_random_checkpoint

    directory = tmp_path_factory.mktemp("drafts") / "checkpoint"
    write_random_checkpoint(directory, preset("tiny", drafts=True))
    return directory


@pytest.fixture(scope="session")
def session_llm(tiny_checkpoint: Path) -> LLM:
    from deepinfer import LLM

    return LLM(tiny_checkpoint, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=128, verbose=False)


@pytest.fixture
def llm(session_llm: LLM) -> Iterator[LLM]:
    """The tiny model behind the public interface; a test must leave it empty."""
    yield session_llm
    assert not session_llm.engine.has_unfinished
    assert_all_free(session_llm.engine.cache)
