"""Environment variables: one table, parsed once, documented, and nowhere else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from deepinfer.env import VARIABLES, Environment, EnvironmentVariableError, markdown_table, read_environment

ROOT = Path(__file__).resolve().parents[1]


def test_page_lists_the_table_as_it_is() -> None:
    page = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
    assert markdown_table() in page, "regenerate docs/environment.md from deepinfer.env.markdown_table()"


def test_every_field_has_one_variable() -> None:
    fields = [f.name for f in dataclasses.fields(Environment) if f.name != "unknown"]
    assert fields == [variable.field for variable in VARIABLES]


def test_empty_environment_gives_the_defaults() -> None:
    environment = read_environment({})
    assert environment.nextn_decode == 5
    assert environment.yoco_truncation_mode == "off"
    assert environment.yoco_keep_tokens == 140
    assert environment.accelerator == "auto"
    assert environment.hf_model_dir is None
    assert not environment.batch_invariant
    assert (environment.world_size, environment.rank, environment.unknown) == (1, 0, ())


def test_values_are_parsed() -> None:
    given = {"DEEPINFER_ACCELERATOR": "CPU", "DEEPINFER_USE_NEXTN_DECODE": "0", "DEEPINFER_BATCH_INVARIANT": "on"}
    environment = read_environment(given | {"PROFILE": "1"})
    assert (environment.accelerator, environment.nextn_decode) == ("cpu", 0)
    assert environment.batch_invariant
    assert environment.profile


def test_every_bad_value_is_named_in_one_error() -> None:
    bad = {"DEEPINFER_ACCELERATOR": "tpu", "DEEPINFER_USE_NEXTN_DECODE": "-1", "WORLD_SIZE": "two", "PROFILE": "maybe"}
    with pytest.raises(EnvironmentVariableError) as caught:
        read_environment(bad)
    for name, value in bad.items():
        assert f"{name}={value!r}" in str(caught.value)


def test_keep_tokens_below_the_ring_is_refused() -> None:
    with pytest.raises(EnvironmentVariableError, match="134"):
        read_environment({"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "128"})


def test_rank_must_be_below_world_size() -> None:
    with pytest.raises(EnvironmentVariableError, match="RANK=2"):
        read_environment({"WORLD_SIZE": "2", "RANK": "2"})


def test_misspelt_variable_is_reported() -> None:
    assert read_environment({"DEEPINFER_BATCH_INVARIENT": "1"}).unknown == ("DEEPINFER_BATCH_INVARIENT",)
