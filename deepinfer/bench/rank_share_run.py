"""Measures a `Rank`: decode steps, a prefill, what the device does meanwhile; beside the floor of the same work."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import Any

import torch

from deepinfer import __version__
from deepinfer.bench.rank_memory import check_memory
from deepinfer.bench.rank_share import LEFT_OUT, Rank, RankShare
from deepinfer.bench.step_floor import Load, floor_by_part, host_bytes, step_parts
from deepinfer.kernels.select import explain
from deepinfer.kernels.timing import Occupation, Rates, allocated_bytes, measured_rates, occupation, wall_seconds

ACCEPT_LENGTHS = (1.0, 2.5, 3.2)  # tokens of a step and sequence; and as many as may be
PREFILLS = 3
WARM_STEPS = 5
FIRST_STEPS = 2  # of a trace, left out
TRACED_STEPS = 8  # behind them: the device goes from step to step as in the engine
ALONE = 5  # runs of a part by itself
KERNELS_TOLD = 25


def measure(
    share: RankShare, device: torch.device, tell: Any = print, keep: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Builds the rank and measures it -> JSON-ready figures. tell: gets a line for people after each stage; keep: the
    figures so far."""
    share.config()  # what cannot be built is refused before anything is measured or made
    check_memory(share, device)
    rates = measured_rates(device)
    tell(
        f"rates: copy {rates.copy / 1e9:,.0f} GB/s, bf16 {rates.bf16 / 1e12:,.1f}, FP8 {rates.fp8 / 1e12:,.1f} TFLOP/s"
    )
    rank: list[Rank] = []
    built = wall_seconds(lambda: rank.append(Rank(share, device)), device)
    result = describe(rank[0], rates)
    taken = result["memory"]["allocated_bytes"]  # 0 on a CPU, where nobody counts
    tell(f"built in {built:.1f} s" + (f": {taken / 2**30:.1f} GiB on the device" if taken else ""))
    result["decode"] = decode(rank[0], rates, tell)
    result["prefill"] = []
    keep(result)
    for narrowed in (True, False) if share.prefill_chunk else ():
        result["prefill"].append(prefill(rank[0], rates, narrowed, tell))
        result["memory"]["most_allocated_bytes"] = allocated_bytes(device)[1]
        keep(result)
    return result


def describe(rank: Rank, rates: Rates) -> dict[str, Any]:
    config, storage = rank.config, rank.storage
    return {
        "date": datetime.now().isoformat(timespec="seconds"),
        "version": __version__,
        "torch": torch.__version__,
        "device": explain(rank.device, rank.model.numerics.dtype),
        "share": asdict(rank.share),
        "layers": config.num_hidden_layers,
        "experts": config.n_routed_experts,
        "engram_table_rows": list(config.engram_num_embeddings),
        "rates": asdict(rates),
        "kv": {
            "format": rank.kv_format,
            "blocks": rank.share.num_blocks,
            "bytes_per_token": round(rank.kv_bytes_per_token, 2),
            "window_bytes": storage.windows.pool.nbytes,
        },
        "memory": {"allocated_bytes": allocated_bytes(rank.device)[0]},
        "left_out": list(LEFT_OUT),
    }


def decode(rank: Rank, rates: Rates, tell: Any = print) -> dict[str, Any]:
    """The median step, what it could take at best, tokens/s at some accept lengths, what the device does in it."""
    share, device = rank.share, rank.device
    if device.type == "cuda":
        tell(f"graph of {share.sequences * (1 + share.nextn)} rows: {wall_seconds(rank.forward.capture, device):.1f} s")
    tell(f"sequences opened, first step: {wall_seconds(rank.open_sequences, device):.1f} s")
    done = list(rank.decode_steps(WARM_STEPS + share.steps))[WARM_STEPS:]
    seconds = [step.seconds for step in done]
    step = statistics.median(seconds)
    load = Load(share.sequences, 1 + share.nextn, share.context, 1 + share.nextn, 1 + share.nextn, share.nextn)
    parts = floor_by_part(step_parts(rank.config, load), rates)
    floor = sum(part["ms"] for part in parts.values())
    traced_steps = FIRST_STEPS + TRACED_STEPS
    traced = occupation(lambda: list(rank.decode_steps(traced_steps)), device, skip=FIRST_STEPS / traced_steps)
    forward = forward_alone(rank, floor - parts.get("drafts", {"ms": 0.0})["ms"], tell)
    rank.close_sequences()
    result: dict[str, Any] = {
        "step_ms": round(1e3 * step, 3),
        "least_ms": round(1e3 * min(seconds), 3),
        "most_ms": round(1e3 * max(seconds), 3),
        "steps": len(seconds),
        "rows": statistics.median(step.rows for step in done),
        "floor_ms": round(floor, 3),
        "of_floor": round(1e3 * step / floor, 3),
        "floor_parts": rounded(parts),
        "engram_host_bytes": host_bytes(rank.config, load.total),
        "random_accept_length": round(statistics.mean(step.tokens for step in done) / share.sequences, 3),
        "tokens_per_s": accepted_rates(share, step),
        "device": None if traced is None else told(traced, TRACED_STEPS),
        "forward": forward,
    }
    idle = "" if traced is None else f", device idle {traced.idle_share:.1%}"
    tell(f"decode: {1e3 * step:.2f} ms a step, floor {floor:.2f} ms ({1e3 * step / floor:.2f} x){idle}")
    return result


def forward_alone(rank: Rank, floor_ms: float, tell: Any) -> dict[str, Any]:
    """The pass over all rows by itself, from an idle device to an idle device."""
    batch = rank.verify_batch()
    seconds = []
    for _ in range(1 + ALONE):
        seconds.append(wall_seconds(lambda: rank.verify(batch), rank.device))
        rank.rewind(batch)
    traced = occupation(lambda: rank.verify(batch), rank.device)
    rank.rewind(batch)
    taken = 1e3 * statistics.median(seconds[1:])
    tell(f"forward pass alone: {taken:.2f} ms, floor {floor_ms:.2f} ms ({taken / floor_ms:.2f} x)")
    return {
        "ms": round(taken, 3),
        "floor_ms": round(floor_ms, 3),
        "of_floor": round(taken / floor_ms, 3),
        "device": None if traced is None else told(traced, 1),
    }


def accepted_rates(share: RankShare, step_seconds: float) -> dict[str, float]:
    """Tokens/s of the rank by accept length (tokens of a step and sequence); "all" = every draft is accepted."""
    lengths = {f"{length:g}": length for length in ACCEPT_LENGTHS if length <= 1 + share.nextn}
    lengths["all"] = 1.0 + share.nextn
    return {name: round(share.sequences * length / step_seconds, 1) for name, length in lengths.items()}


def prefill(rank: Rank, rates: Rates, narrowed: bool, tell: Any = print) -> dict[str, Any]:
    """A prompt from its first token on. narrowed: layers after the last KV source run on its last tokens only."""
    share, size = rank.share, rank.share.prefill_chunk
    batch = rank.prefill_batch(narrowed)
    try:
        seconds = [wall_seconds(lambda: rank.prefill(batch), rank.device) for _ in range(1 + PREFILLS)][1:]
        traced = occupation(lambda: rank.prefill(batch), rank.device)
    finally:
        rank.end_prefill(batch)
    taken = statistics.median(seconds)
    parts = floor_by_part(
        step_parts(rank.config, Load(1, size, 0, 1, min(size, share.keep_tokens) if narrowed else size)), rates
    )
    floor, tflop = (sum(part[name] for part in parts.values()) for name in ("ms", "tflop"))
    share_of_fp8 = tflop * 1e12 / taken / rates.fp8
    tell(
        f"prefill of {size:,} tokens, {'narrowed' if narrowed else 'all layers'}: {1e3 * taken:.1f} ms, "
        f"{size / taken:,.0f} tokens/s, {share_of_fp8:.1%} of the FP8 matrix rate, "
        f"{1e3 * taken / floor:.2f} x its floor"
    )
    return {
        "tokens": size,
        "narrowed": narrowed,
        "ms": round(1e3 * taken, 3),
        "runs": len(seconds),
        "tokens_per_s": round(size / taken, 1),
        "tflop": round(tflop, 3),
        "share_of_fp8_rate": round(share_of_fp8, 4),
        "floor_ms": round(floor, 3),
        "of_floor": round(1e3 * taken / floor, 3),
        "floor_parts": rounded(parts),
        "device": None if traced is None else told(traced, 1),
    }


def rounded(parts: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {unit: round(value, 4) for unit, value in part.items()} for name, part in parts.items()}


def told(traced: Occupation, steps: int) -> dict[str, Any]:
    """Per step: how long the device was at it, how much of that it stood still, and where its time went."""
    kernels = list(traced.kernels.items())
    return {
        "span_ms": round(1e3 * traced.span_s / steps, 3),
        "busy_ms": round(1e3 * traced.busy_s / steps, 3),
        "idle_share": round(traced.idle_share, 4),
        "launches": round(sum(count for count, _ in traced.kernels.values()) / steps, 1),
        "kernels": [
            {"name": name[:120], "count": round(count / steps, 2), "ms": round(1e3 * seconds / steps, 4)}
            for name, (count, seconds) in kernels[:KERNELS_TOLD]
        ],
    }


def report(result: dict[str, Any]) -> str:
    """For a terminal."""
    share, deco, kv = result["share"], result["decode"], result["kv"]
    lines = [
        f"one rank of {share['ep']}: {share['preset']}, {result['layers']} layers, {result['experts']} experts a layer",
        f"  {result['device']}",
        f"  KV: {kv['bytes_per_token']:,.1f} bytes a token allocated ({kv['format']})",
        "",
        f"decode, {share['sequences']} sequences of {share['context']:,} tokens, {share['nextn']} drafts: "
        f"{deco['step_ms']:.2f} ms a step ({deco['least_ms']:.2f} to {deco['most_ms']:.2f}), "
        f"floor {deco['floor_ms']:.2f} ms, {deco['of_floor']:.2f} x",
        *(f"  {name:<20} {part['ms']:8.3f} ms" for name, part in deco["floor_parts"].items()),
        "  tokens/s of this rank at an accept length of "
        + ", ".join(f"{name}: {value:,.0f}" for name, value in deco["tokens_per_s"].items()),
    ]
    alone = deco["forward"]
    lines.append(
        f"  forward pass alone {alone['ms']:.2f} ms, floor {alone['floor_ms']:.2f} ms, {alone['of_floor']:.2f} x"
    )
    if deco["device"] is not None:
        device = deco["device"]
        lines.append(f"  device: busy {device['busy_ms']:.2f} ms a step, idle {device['idle_share']:.1%}")
        lines += [
            f"    {kernel['ms']:8.3f} ms {kernel['count']:7.1f} x  {kernel['name']}" for kernel in device["kernels"]
        ]
    for line in result.get("prefill", ()):
        which = "decoder on its last tokens only" if line["narrowed"] else "all layers"
        lines.append(
            f"prefill, {line['tokens']:,} tokens in one chunk, {which}: {line['ms']:.1f} ms, "
            f"{line['tokens_per_s']:,.0f} tokens/s, {line['share_of_fp8_rate']:.1%} of the FP8 matrix rate, "
            f"{line['of_floor']:.2f} x its floor"
        )
    return "\n".join([*lines, "", "Left out:", *(f"- {what}" for what in result["left_out"])])
