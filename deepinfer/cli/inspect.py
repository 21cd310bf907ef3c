"""`deepinfer inspect`: what a checkpoint holds, its size, and what it needs on N devices. Reads headers only."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.model.config import ModelConfig
from deepinfer.model.footprint import Fit, Line, fits, kv_lines, module_sizes, sequence_lines, total
from deepinfer.model.hub import resolve_model
from deepinfer.model.inventory_check import INDEX_NAME, SINGLE_NAME
from deepinfer.model.tensors import tensor_specs
from deepinfer.model.weights import CheckpointReader

GIB = 1 << 30


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            help="`nano` (bundled), a directory, or a hub id (only its config is downloaded). "
            "Default: DEEPINFER_HF_MODEL_DIR, else nano.",
            show_default=False,
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    device_memory_gib: Annotated[
        float, typer.Option(help="Memory of one device in GiB, for the sum of what fits.", min=0.001)
    ] = 141.0,
    devices: Annotated[str, typer.Option(help="Numbers of devices to show, separated by commas.")] = "1,2,4,8",
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the device memory that weights and cache may take.", min=0.01, max=1.0)
    ] = 0.85,
) -> None:
    """Show what a checkpoint holds, and what it needs: weights by part, cache per token, and what N devices hold.

    Every header is checked against config.json; missing, unexpected or wrong tensors and damaged files are listed
    together. A directory with config.json alone is shown as "config only".
    """
    try:
        counts = [int(word) for word in devices.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"{devices!r}: give positive integers separated by commas, as 1,2,4,8")
    report = describe(model, int(device_memory_gib * gpu_memory_utilization * GIB), counts)
    report["device_memory_gib"], report["gpu_memory_utilization"] = device_memory_gib, gpu_memory_utilization
    typer.echo(json.dumps(report, indent=1) if json_output else render(report))


def describe(model: str | None, device_bytes: int, devices: list[int]) -> dict[str, Any]:
    """The report as JSON-ready data; byte counts are integers unless a cache line has a fraction.

    device_bytes: memory that weights and cache may take on one device. Raises the errors of resolve_model and
    CheckpointReader.
    """
    path = resolve_model(model, describe_only=True)
    config = ModelConfig.from_dir(path)
    files: list[str] = []
    if (path / INDEX_NAME).exists() or (path / SINGLE_NAME).exists():
        with CheckpointReader(path, config) as reader:
            files = sorted({reader.file(name).name for name in reader.names()})
    specs = list(tensor_specs(config).values())
    sources = [f"{layer} (ratio {config.ratio(layer)})" for layer in config.kv_source_layer_ids]
    weights = "config only"
    if files:
        weights = f"{len(files)} file{'s' * (len(files) > 1)}, all headers agree with config.json"
    return {
        "model": str(path),
        "weights": weights,
        "files": files,
        "tokenizer": "tokenizer.json" if (path / "tokenizer.json").is_file() else "missing",
        "layers": config.num_hidden_layers,
        "experts": f"{config.num_experts_per_tok} of {config.n_routed_experts}",
        "kv_sources": sources,
        "engram_layers": list(config.engram_layer_ids),
        "drafts": config.num_drafts,
        "vision": config.vision is not None,
        "decoder_narrowing": config.narrowing_obstacle() or "possible",
        "modules": [dataclasses.asdict(size) for size in module_sizes(specs)],
        "total_tensors": len(specs),
        "total_bytes": sum(spec.nbytes for spec in specs),
        "kv_bytes_per_token": _number(total(kv_lines(config))),
        "kv_lines": _lines(kv_lines(config)),
        "sequence_bytes": _number(total(sequence_lines(config))),
        "sequence_lines": _lines(sequence_lines(config)),
        "fits": [dataclasses.asdict(fit) for fit in fits(config, device_bytes, devices)],
    }


def render(report: dict[str, Any]) -> str:
    """The report as text for a terminal."""
    head = [
        ("model", Path(report["model"])),
        ("weights", report["weights"]),
        ("tokenizer", report["tokenizer"]),
        ("layers", f"{report['layers']}, experts {report['experts']}"),
        ("KV sources", ", ".join(report["kv_sources"]) or "none: window only"),
        ("Engram layers", ", ".join(map(str, report["engram_layers"])) or "none"),
        ("drafts / vision", f"{report['drafts']} stages / {'yes' if report['vision'] else 'no'}"),
        ("decoder narrowing", report["decoder_narrowing"]),
    ]
    out = [f"{name:<18}{value}" for name, value in head]
    rows = [["part", "group", "tensors", "bytes", "", "types"]]
    for m in report["modules"]:
        sizes = [f"{m['tensors']:,}", f"{m['nbytes']:,}", _size(m["nbytes"])]
        rows.append([m["kind"], m["group"], *sizes, " ".join(m["dtypes"])])
    whole = report["total_bytes"]
    rows.append(["total", "", f"{report['total_tensors']:,}", f"{whole:,}", _size(whole), ""])
    out += ["", *_table(rows, left=(0, 1, 5))]
    for title, lines, summed in (
        ("Cache per token of context", report["kv_lines"], report["kv_bytes_per_token"]),
        ("Fixed state per running sequence", report["sequence_lines"], report["sequence_bytes"]),
    ):
        body = [[line["what"], line["formula"], f"{line['nbytes']:,} B"] for line in lines]
        out += ["", title, *_table([*body, ["total", "", f"{summed:,} B"]], left=(0, 1))]
    usable = f"{report['device_memory_gib']:g} GiB x {report['gpu_memory_utilization']:g}"
    out += ["", f"On N devices of {usable}: experts split, the rest replicated; no activations, no redundant experts"]
    rows = [["N", "Engram in", "experts", "replicated", "tables", "left for cache", "tokens in all", "host memory"]]
    rows += [_fit_row(Fit(**fit)) for fit in report["fits"]]
    return "\n".join([*out, *_table(rows, left=(1,))])


def _fit_row(fit: Fit) -> list[str]:
    if fit.kv_bytes < 0:
        left, tokens = f"{_size(-fit.kv_bytes)} short", "does not fit"
    else:
        left = _size(fit.kv_bytes)
        tokens = "no limit" if fit.tokens is None else f"{fit.tokens:,}"
    sizes = [_size(n) for n in (fit.expert_bytes, fit.replicated_bytes, fit.table_bytes)]
    return [str(fit.devices), fit.tables, *sizes, left, tokens, _size(fit.host_bytes)]


def _lines(lines: list[Line]) -> list[dict[str, Any]]:
    return [{"what": line.what, "formula": line.formula, "nbytes": _number(line.nbytes)} for line in lines]


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _size(nbytes: int) -> str:
    """A byte count in the largest binary unit that keeps it at or above 1."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"


def _table(rows: list[list[str]], left: tuple[int, ...]) -> list[str]:
    """Aligned lines; the columns in `left` are left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [
        [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]
    return ["  " + "  ".join(row).rstrip() for row in cells]
