"""What a `Rank` takes of a machine's memory where it runs on the CPU, worked out before any of it is made.

A CPU has no allocator that says no: a process that takes too much is killed, minutes later and without a word. A GPU
refuses by itself, and names what it had.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch

from deepinfer.bench.random_cache import densest_format
from deepinfer.cache.formats import block_bytes, slot_bytes, staging_bytes
from deepinfer.engine.memory_plan import SLACK, token_bytes
from deepinfer.kernels.device import free_memory
from deepinfer.kernels.select import cpu_twins
from deepinfer.model.config import ConfigError, ModelConfig
from deepinfer.model.page_locked import available_bytes
from deepinfer.model.tensors import TensorSpec, tensor_specs

if TYPE_CHECKING:
    from deepinfer.bench.rank_share import RankShare

GIB = 2**30
# Bytes that one value of a matrix takes for a moment while it gets its form: as read, float32, and where it is packed
# its panels' bfloat16 and what that is compared with (cpu/linear.pack).
LOADED = {"packed": 2 + 4 + 2 + 4, "wide": 2 + 4}
KEPT = {"packed": 2, "wide": 4}  # bytes of a value of a matrix


class RankMemory(NamedTuple):
    """Bytes."""

    weights: int
    tables: int  # of Engram
    cache: int
    loading: int  # beside the weights, while the largest of them is made; free again before there is a cache
    working: int  # activations of the largest step

    @property
    def most(self) -> int:
        """At any one time."""
        return self.weights + self.tables + max(self.loading, self.cache + self.working)


def rank_memory(share: RankShare, device: torch.device) -> RankMemory:
    """Of a rank on a CPU. ValueError where it cannot be built."""
    config, dtype = share.config(), getattr(torch, share.dtype)
    form = "packed" if cpu_twins(device, dtype) else "wide"
    specs = tensor_specs(config).values()
    kv_format = share.kv_format or densest_format(device, share.dtype)
    cache = (share.num_blocks + 1) * block_bytes(config, kv_format)
    cache += (share.sequences + 1) * slot_bytes(config, kv_format, share.nextn, replicas=False)
    cache += staging_bytes(config, kv_format, share.most_rows, drafts=share.nextn, max_num_seqs=share.sequences)
    largest = max(_values(spec) for spec in specs if _is_matrix(spec, config))
    activations = share.most_rows * token_bytes(config)
    if dtype == torch.float32:
        activations = int(activations * 2 / SLACK)  # twice as wide, and nothing is held in reserve on a CPU
    return RankMemory(
        weights=sum(_kept_bytes(spec, config, KEPT[form]) for spec in specs if spec.kind != "engram_table"),
        tables=sum(spec.nbytes for spec in specs if spec.kind == "engram_table"),
        cache=cache,
        loading=largest * (LOADED[form] - KEPT[form]),
        working=activations,
    )


def check_memory(share: RankShare, device: torch.device) -> None:
    """ValueError, with what it would take and the nearest number of layers that fits, where a rank on a CPU needs more
    memory than the machine has to give. Any other device is not looked at."""
    if device.type != "cpu":
        return
    needed, there = rank_memory(share, device), available_bytes() or free_memory(device)[0]
    if needed.most <= there:
        return
    layers = share.config().num_hidden_layers
    weights, tables, cache, loading, working = (f"{size / GIB:,.1f}" for size in needed)
    raise ValueError(
        f"rank_share: {layers} layers of preset {share.preset} with ep={share.ep} take about {needed.most / GIB:,.1f} "
        f"GiB on a CPU (weights {weights}, Engram tables {tables}, then cache {cache} and a step {working}, or before "
        f"that {loading} while weights are made), and {there / GIB:,.1f} GiB are available; run it on a GPU, or lower "
        f"{_fewer_layers(share, device, layers, there)}"
    )


def _fewer_layers(share: RankShare, device: torch.device, layers: int, there: int) -> str:
    """What to lower, as the end of a sentence."""
    for count in range(layers - 1, 0, -1):
        try:
            if rank_memory(dataclasses.replace(share, layers=count), device).most <= there:
                return f"--layers to {count}"
        except ConfigError:  # a cut that leaves no model
            continue
    return "--seqs, --context and --prefill-chunk, for not even one layer fits; a higher ep leaves fewer experts"


def _values(spec: TensorSpec) -> int:
    return spec.nbytes * 2 if spec.dtype == "I8" else torch.Size(spec.shape).numel()


def _is_matrix(spec: TensorSpec, config: ModelConfig) -> bool:
    """What is multiplied with: no vector, no scales, nothing that is looked up, no weights of the mixing of copies."""
    looked_up = spec.kind == "engram_table" or spec.name.endswith("embed.weight")
    plain = spec.dtype in ("F32", "F8_E8M0") or len(spec.shape) < 2 or spec.shape[0] == config.hc_mult
    return not looked_up and not plain


def _kept_bytes(spec: TensorSpec, config: ModelConfig, each: int) -> int:
    if spec.name.endswith("embed.weight"):
        return spec.nbytes
    if spec.dtype == "F8_E8M0":
        return 0  # it went into the values
    return _values(spec) * (each if _is_matrix(spec, config) else 4)
