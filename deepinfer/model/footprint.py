"""What a model needs in memory: weights per part, cache bytes per token and per sequence, and what N devices hold.

All figures are of the stored formats (FP8, FP4) and follow from the config alone (model.md 3.1, 4.1 to 4.3).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from deepinfer.model.config import ModelConfig
from deepinfer.model.tensors import TensorSpec, tensor_specs


@dataclass(frozen=True)
class ModuleSize:
    """One part of the model: its group (text, draft, vision), tensor count, bytes and storage types."""

    group: str
    kind: str
    tensors: int
    nbytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """One line of a sum that is shown to the user. `nbytes` may be fractional: an entry of two tokens with an odd
    size."""

    what: str
    formula: str
    nbytes: Fraction


@dataclass(frozen=True)
class Fit:
    """What one choice of devices holds, in bytes per device unless said otherwise."""

    devices: int
    tables: str  # where the Engram tables live: "host" or "device"
    expert_bytes: int  # ceil(experts / devices) experts of each layer
    replicated_bytes: int  # everything else, on every device
    table_bytes: int  # the tables' share; 0 with the tables in host memory
    kv_bytes: int  # left for the cache; negative = short by that much
    tokens: int | None  # tokens of context that fit, over all devices; None = no layer keeps any, so no limit
    host_bytes: int  # host memory for the tables, in all


def module_sizes(specs: Iterable[TensorSpec]) -> list[ModuleSize]:
    """Tensors summed by part, in inventory order."""
    found: dict[tuple[str, str], list[TensorSpec]] = {}
    for spec in specs:
        found.setdefault((spec.group, spec.kind), []).append(spec)
    return [
        ModuleSize(
            group, kind, len(members), sum(s.nbytes for s in members), tuple(dict.fromkeys(s.dtype for s in members))
        )
        for (group, kind), members in found.items()
    ]


def compressed_record_bytes(config: ModelConfig) -> int:
    """One compressed KV entry: FP4 values, and an E4M3 scale per 16 of them: 512/2 + 512/16 = 288."""
    return config.head_dim // 2 + config.head_dim // 16


def index_record_bytes(config: ModelConfig) -> int:
    """One index key: FP4 values, and an E8M0 scale per 32 of them: 128/2 + 128/32 = 68."""
    return config.index_head_dim // 2 + config.index_head_dim // 32


def window_record_bytes(config: ModelConfig) -> int:
    """One window KV entry: FP8 values, and an E8M0 scale per 32 of them: 512 + 512/32 = 528."""
    return config.head_dim + config.head_dim // 32


def kv_lines(config: ModelConfig) -> list[Line]:
    """Cache bytes per token of context, line by line; the sum is 890 for the released config (model.md 4.2)."""
    lines = []
    records = (("compressed KV", compressed_record_bytes(config)), ("index keys", index_record_bytes(config)))
    for what, record in records:
        for ratio in sorted({config.ratio(layer) for layer in config.kv_source_layer_ids}, reverse=True):
            layers = [layer for layer in config.kv_source_layer_ids if config.ratio(layer) == ratio]
            named = f"{what}, layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
            per_token = Fraction(len(layers) * record, ratio)
            lines.append(Line(named, f"{len(layers)} x {record} B / {ratio} token{'s' * (ratio > 1)}", per_token))
    return lines


def sequence_lines(config: ModelConfig) -> list[Line]:
    """Bytes that a running sequence holds whatever its length."""
    step = 1 + (config.dspark_block_size if config.num_drafts else 0)  # rows of one verify step: 1 + 5 drafts
    rows = config.sliding_window + step
    ring = f"{rows} rows x {window_record_bytes(config)} B"
    size = rows * window_record_bytes(config)
    layers, drafts = config.num_hidden_layers, config.num_drafts
    why = f"{config.sliding_window} window + {step} of a step"
    lines = [Line(f"window KV ({why})", f"{layers} layers x {ring}", Fraction(layers * size))]
    if drafts:
        # the record of every other window, as the release rounds it: 3 x 134 x 528 B = 212,256
        lines.append(Line("window KV of the drafts", f"{drafts} stages x {ring}", Fraction(drafts * size)))
    open_rows = sum(config.ratio(layer) == 2 for layer in config.kv_source_layer_ids)
    if open_rows:
        # The pending token of a group of two: FP32 value and gate. A step that is taken back may have closed some of
        # its groups: one row for each pair that it may have begun, and one for the pair before.
        row, pairs = 2 * 4 * config.head_dim, step // 2 + 1
        formula = f"{open_rows} layers x {pairs} x {row} B"
        lines.append(Line("open compressor rows", formula, Fraction(open_rows * pairs * row)))
    return lines


def total(lines: Iterable[Line]) -> Fraction:
    """Sum of the lines, in bytes."""
    return sum((line.nbytes for line in lines), Fraction(0))


def fits(config: ModelConfig, device_bytes: int, devices: Iterable[int]) -> list[Fit]:
    """What N devices of `device_bytes` usable memory hold, for each N, with the Engram tables in host and in device
    memory.

    Experts are split by expert, tables by row, everything else is replicated (expert parallel, data parallel
    attention). No redundant expert slots, no activations: take those off `device_bytes`.
    """
    specs = list(tensor_specs(config).values())
    tables = sum(s.nbytes for s in specs if s.kind == "engram_table")
    text = [s for s in specs if s.kind == "expert" and s.group == "text"]
    draft = [s for s in specs if s.kind == "expert" and s.group == "draft"]
    groups = (
        (sum(s.nbytes for s in text), config.n_routed_experts),
        (sum(s.nbytes for s in draft), config.dspark_n_routed_experts),
    )
    replicated = sum(s.nbytes for s in specs) - tables - sum(size for size, _ in groups)
    per_token = total(kv_lines(config))
    result = []
    for n in devices:
        experts = sum(size // count * -(-count // n) for size, count in groups if count)
        for place in ("host", "device") if tables else ("host",):
            share = -(-tables // n) if place == "device" else 0
            left = device_bytes - experts - replicated - share
            tokens = int(max(left, 0) // per_token) * n if per_token else None
            result.append(Fit(n, place, experts, replicated, share, left, tokens, tables if place == "host" else 0))
    return result
