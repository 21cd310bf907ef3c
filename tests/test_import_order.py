"""The house rules that a reader relies on, held over every file of deepinfer/ (design.md section 1)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "deepinfer"
# A folder imports only what stands below it. codec stands above engine, so the engine cannot know how text is made.
ORDER = [
    "cli", "chat", "bench", "client", "llm", "server", "router", "codec", "engine", "speculation", "grammar", "cache",
    "model", "parallel", "kernels", "metrics",
]  # fmt: skip
LEAVES = {"codec", "grammar", "metrics"}
EVERYBODYS = {"config", "env"}
FILES = sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    """First name below deepinfer/: a folder, or a module at the top ("" for the package's own __init__)."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return {"__init__": "", "__main__": "cli"}.get(first, first)  # python -m deepinfer is the command line


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full, so that a reader sees the folder"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def our_parts(tree: ast.AST) -> set[str]:
    """Folders and top modules of ours that a file imports."""
    names = {name.split(".")[1] for name in imports(tree) if name.startswith("deepinfer.")}
    return {name for name in names if (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()}


def dotted(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_folder_imports_only_what_stands_below_it(path: Path) -> None:
    part = part_of(path)
    used = our_parts(ast.parse(path.read_text(encoding="utf-8"))) - {part}
    if part == "":
        return  # the public names come from everywhere
    if part in EVERYBODYS:
        assert used <= EVERYBODYS
        return
    assert part in ORDER, f"{part} has no place in the order of folders"
    if part in LEAVES:
        assert not used, f"{part} is a leaf and imports {used}"
        return
    above = {name for name in used - EVERYBODYS if ORDER.index(name) <= ORDER.index(part)}
    assert not above, f"{part} imports {above}, which stand above it"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_only_kernels_and_doctor_ask_for_a_device(path: Path) -> None:
    if part_of(path) == "kernels" or named(path) == "cli/doctor.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            assert not name.startswith(("torch.cuda", "torch.backends", "torch.version")), f"line {node.lineno}: {name}"
            assert node.attr not in ("is_cuda", "is_cpu"), f"line {node.lineno}: {name}"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_only_env_reads_the_environment(path: Path) -> None:
    if named(path) == "env.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            assert dotted(node) not in ("os.environ", "os.getenv"), f"line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_training_is_never_imported_and_collectives_stay_in_parallel(path: Path) -> None:
    for name in imports(ast.parse(path.read_text(encoding="utf-8"))):
        assert name.split(".")[0] not in ("training", "tests", "benchmarks", "examples")
        assert part_of(path) == "parallel" or not name.startswith("torch.distributed")


def test_the_order_names_every_folder() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").is_file()}
    assert folders <= set(ORDER)
