"""What the pages say about the code is still true."""

from __future__ import annotations

import ast
import re
import runpy
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepinfer import SamplingParams
from deepinfer.codec.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@by_page
def test_named_tests_exist(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
    defined = {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert named <= defined, named - defined


@by_page
def test_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|md|cpp|json))`", text)
    made_later = ("models/nano/", "results/")  # a trained model and the benchmark's output
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "deepinfer" / name).exists()]
    assert [name for name in missing if not name.startswith(made_later)] == []


def test_the_prompt_in_the_readme_is_the_one_that_make_run_prints() -> None:
    """Its tokens, and so its end, are the tokenizer's."""
    code = runpy.run_path(str(ROOT / "examples" / "offline_inference.py"), run_name="example")
    llm = SimpleNamespace(tokenizer=Tokenizer.from_directory(ROOT / "models" / "nano"))
    prompt = code["shortened"](code["long_prompt"](llm, code["LONG_TOKENS"]))
    assert f"INPUT: {prompt!r}; OUTPUT: " in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_parameter_of_sampling_is_explained() -> None:
    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    assert {field.name for field in fields(SamplingParams) if f"`{field.name}`" not in page} == set()


def test_every_operation_with_a_cpu_kernel_has_its_line() -> None:
    tree = ast.parse((ROOT / "deepinfer/kernels/cpu/ops.py").read_text())
    chosen = [ast.parse(file.read_text()) for file in (ROOT / "deepinfer/kernels/select").glob("*.py")]
    operations = {node.name for module in chosen for node in module.body if isinstance(node, ast.FunctionDef)}
    twins = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} & operations
    page = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    assert {name for name in twins if not re.search(rf"^\|.*`{name}`", page, re.MULTILINE)} == set()
