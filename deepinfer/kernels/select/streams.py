"""The residual stream: hyper-connections, Engram, the compressor of pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.cpu import ops as cpu
from deepinfer.kernels.layer_weights import HyperWeights
from deepinfer.kernels.reference import compressor, engram, hyper
from deepinfer.kernels.select.backends import cpu_fast, cpu_twins, gpu, gpu_fast, gpu_numbers, gpu_twins
from deepinfer.kernels.select.projections import rms_norm


def _gpu_stream(stream: Tensor) -> bool:
    return gpu_fast(stream) and gpu().serves_stream(stream)


def hyper_step(
    stream: Tensor, update: tuple[Tensor, Tensor, Tensor] | None, pre: Tensor, w: HyperWeights
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From one sub-layer to the next: expand the stream by the update (output, post, comb) if there is one, collapse it
    with `pre` and norm it, find the new coefficients -> stream [N, copies, D], x [N, D], pre, post, comb."""
    if stream.shape[1] == 4 and cpu_fast(stream):
        return cpu.hyper_step(stream, update, pre, w)
    if _gpu_stream(stream):
        return gpu().hyper_step(stream, update, pre, w)
    if update is not None:
        stream = hyper_expand(stream, *update)
    mixes = hyper.hyper_mixes(stream, w.fn.t(), w.norm_eps)
    coefficients = hyper.hyper_coefficients(
        mixes, w.scale, w.base, copies=stream.shape[1], iterations=w.iterations, eps=w.eps
    )
    return stream, hyper_collapse_norm(stream, pre, w.norm, w.norm_eps), *coefficients


def hyper_collapse_norm(stream: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm(collapse(stream, pre)) * weight: [N, copies, D] -> [N, D]."""
    if _gpu_stream(stream):
        return gpu().hyper_collapse_norm(stream, pre, weight, eps)
    return rms_norm(hyper_collapse(stream, pre), weight, eps)


def hyper_collapse(stream: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the copies: [N, copies, D] -> [N, D]."""
    if _gpu_stream(stream):
        return gpu().hyper_collapse(stream, pre)
    return hyper.hyper_collapse(stream, pre)


def hyper_expand(stream: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    if _gpu_stream(stream):
        return gpu().hyper_expand(stream, y, post, comb)
    run = cpu.hyper_expand if stream.shape[1] == 4 and cpu_fast(stream) else hyper.hyper_expand
    return run(stream, y, post, comb)


def engram_inject(stream: Tensor, kv: Tensor, weight: Tensor, dead: Tensor | None, eps: float) -> Tensor:
    """stream [N, copies, D], kv [N, (copies + 1) * D] (keys, then the value), weight [copies, D], dead bool [N] or None
    -> the stream with the gated value added to every copy of every live token."""
    copies = stream.shape[1]
    if copies == 4 and cpu_fast(stream):
        return cpu.engram_inject(stream, kv, weight, dead, eps)
    if copies == 4 and gpu_fast(stream):
        return gpu().engram_inject(stream, kv, weight, dead, eps)
    keys, value = kv.unflatten(1, (copies + 1, -1)).split((copies, 1), dim=1)
    gate = engram.engram_gate(stream, keys, weight, eps)
    if dead is not None:
        gate = gate.masked_fill(dead.unsqueeze(1), 0.0)
    return engram.engram_inject(stream, gate, value.squeeze(1))


def compress_pairs(first: Tensor, second: Tensor, norm_weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32 and cpu_fast(first):
        return cpu.compress_pairs(first, second, norm_weight, eps)
    if gpu_twins(first.device, dtype):
        return gpu().compress_pairs(first, second, norm_weight, eps, dtype)
    return compressor.compress_pairs(first, second, norm_weight, eps, dtype)


def table_rows(codes: int, scales: int, ids: Tensor, rows: int, width: int) -> Tensor | None:
    """Rows of a mapped Engram table (addresses of its bytes) as float32 [..., width]; None where `EngramTable.raw_rows`
    has to read them, or to refuse: no CPU kernels, an id outside the table, NaN in a row."""
    if not cpu_twins(ids.device, torch.float32):
        return None
    out, fine = cpu.table_rows(codes, scales, ids, rows, width)
    return out if fine else None


def ngram_rows(
    history: Tensor, token_map: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int
) -> list[Tensor]:
    """Engram table rows of every token, for each layer int64 [N, columns]. history int64 [N, orders + 1]: raw token ids
    of the token and those before it, -1 ends the look-back; token_map int64 [vocabulary]; the others by layer, see
    `reference/engram.py`."""
    if gpu_numbers(history):
        return list(gpu().ngram_rows(history, multipliers, primes, offsets, pad, token_map).unbind(0))
    compressed = torch.where(history < 0, -1, token_map[history.clamp_min(0)])
    layers = zip(multipliers, primes, offsets, strict=True)
    return [engram.ngram_rows(compressed, *numbers, pad) for numbers in layers]
