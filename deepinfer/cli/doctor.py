"""`deepinfer doctor`: what this machine can run, and why not."""

import os
import platform
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import NamedTuple

import typer

PACKAGES = (
    "torch", "numpy", "tokenizers", "safetensors", "msgspec", "pyzmq", "prometheus-client", "typer", "rich", "tqdm",
    "huggingface-hub", "deepseek-recipe", "llguidance", "fastapi", "pydantic", "uvicorn", "uvloop", "httptools",
    "pebble",
)  # fmt: skip
PYTHON_NEEDED = (3, 11)


class Finding(NamedTuple):
    what: str
    state: str  # "ok", "no" (something cannot run) or "note"
    detail: str


def doctor() -> None:
    """Prints one line per finding; exit code 1 if the engine cannot run at all."""
    findings = list(examine())
    for finding in findings:
        typer.echo(f"{finding.state:4}  {finding.what}: {finding.detail}")
    if any(finding.state == "no" and finding.what in ("python", "torch") for finding in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Everything worth knowing, in the order of dependence."""
    enough = sys.version_info >= PYTHON_NEEDED
    yield Finding("python", "ok" if enough else "no", f"{platform.python_version()}, 3.11 or newer is needed")
    for package in PACKAGES:
        try:
            yield Finding(package, "ok", metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding(package, "no", f"not installed; pip install {package}")
    try:
        torch = import_module("torch")
    except ImportError as error:
        yield Finding("torch", "no", f"cannot be imported: {error}")
        return
    yield Finding("cpu", "ok", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads; nano runs here")
    yield from (Finding(*fact) for fact in import_module("deepinfer.kernels.gpu_report").facts())
    kernels = import_module("deepinfer.kernels.cpu.build").library()
    yield Finding("cpu kernels", "ok" if kernels.handle else "note", kernels.explanation)
    yield from _model()


def _model() -> Iterator[Finding]:
    from deepinfer.env import read_environment
    from deepinfer.model.hub import resolve_model

    try:
        environment = read_environment()
        yield Finding("model", "ok", f"the default is {resolve_model(None)}")
    except ValueError as error:
        yield Finding("model", "note", str(error))
        return
    if environment.unknown:
        yield Finding("environment", "note", f"variables without a meaning: {', '.join(environment.unknown)}")
