"""How cache records lie in memory, and what a block, a slot and a stored window therefore take.

"float32" and "bfloat16" hold a value in that type. "packed" holds the bytes of the release: 528 for a window entry, 288
for a compressed one, 68 for an index key at the real sizes. Values that the bfloat16 numerics rounded already come back
from a packed record bit for bit; float32 numerics keep unrounded records, so they need the float32 format. "hopper" is
"packed" with the index keys of a block as the GPU's scores read them, where keys have the released width: first all
codes of the block, then all scales (kernels/triton/index_keys.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import BLOCK_SIZE, KV_FORMATS, VERIFY_ROWS
from deepinfer.kernels import select
from deepinfer.kernels.reference import records
from deepinfer.model.config import ModelConfig
from deepinfer.model.state import Rounding

LAYOUT_VERSION = 1  # of what a block or a stored window holds: part of every hash chain's namespace


@dataclass(frozen=True)
class RecordFormat:
    """One kind of record. width: elements of `dtype` per record of so many values. encode: values [N, D] -> records
    [N, width(D)]."""

    dtype: torch.dtype
    width: Callable[[int], int]
    encode: Callable[[Tensor], Tensor]

    @classmethod
    def plain(cls, dtype: torch.dtype) -> RecordFormat:
        return cls(dtype, lambda size: size, lambda values: values.to(dtype))

    def bytes(self, size: int) -> int:
        """Bytes of a record of `size` values."""
        return self.width(size) * self.dtype.itemsize


@dataclass(frozen=True)
class KVFormat:
    """The three kinds of records of a cache. paged_keys: keys of a block lie together, codes before scales."""

    window: RecordFormat
    compressed: RecordFormat
    key: RecordFormat
    paged_keys: bool = False

    def pages(self, config: ModelConfig) -> bool:
        """Whether the keys of this model lie so."""
        shape = config.index_n_heads, config.index_head_dim, config.index_topk, config.candidate_block_size
        return self.paged_keys and select.pages_keys(*shape)

    @property
    def packed(self) -> bool:
        """Whether window and compressed records are the release's bytes."""
        return self.window.dtype == torch.uint8

    @classmethod
    def plain(cls, dtype: torch.dtype) -> KVFormat:
        one = RecordFormat.plain(dtype)
        return cls(one, one, one)

    @classmethod
    def named(cls, name: str) -> KVFormat:
        """ "float32", "bfloat16", "packed" or "hopper"; anything else is a ValueError."""
        if name not in KV_FORMATS:
            raise ValueError(f"kv_format: {name!r} is not one of {', '.join(KV_FORMATS)}")
        if name not in ("packed", "hopper"):
            return cls.plain(getattr(torch, name))
        return cls(
            RecordFormat(torch.uint8, records.window_bytes, records.pack_window),
            RecordFormat(torch.uint8, records.compressed_bytes, records.pack_compressed),
            RecordFormat(torch.uint8, records.key_bytes, records.pack_key),
            paged_keys=name == "hopper",
        )


def format_problem(kv_format: str, dtype: torch.dtype) -> str | None:
    """Why records of a model with numerics `dtype` cannot be held in this format, with what can; None if they can."""
    KVFormat.named(kv_format)
    if dtype == torch.float32 and kv_format != "float32":
        return (
            f"kv_format: {kv_format!r} would round the records of a float32 model, which keeps unrounded records; use "
            'kv_format "float32", or dtype "bfloat16", whose records are rounded before they are stored'
        )
    return None


def rounding(config: ModelConfig, kind: KVFormat, device: torch.device) -> Rounding:
    """Which records the kernels round that write them. ValueError for keys in pages that nothing could read."""
    twins, pages = kind.packed and select.gpu_twins(device, torch.bfloat16), kind.pages(config)
    if pages and not twins:
        raise ValueError('kv_format: "hopper" needs the GPU kernels; use "packed"')
    return Rounding(twins and select.rounds_records(config.head_dim), pages)


def open_pairs(drafts: int) -> int:
    """Even positions whose open row is kept per slot and ratio-2 source.

    A whole verify step may have to be undone (a sequence that leaves for host memory with the step in flight goes on
    below it), so the row before any length n - 1 - drafts .. n may be needed: drafts + 2 positions, but a length that
    is even needs none. What lies between an odd length and n is (drafts + 1) // 2 even positions at most.
    """
    return (drafts + 1) // 2 + 1


def ring_rows(config: ModelConfig, drafts: int) -> int:
    """Window rows per slot and layer: the window, and what one verify step may write (134 = 128 + 1 + 5)."""
    return config.sliding_window + 1 + drafts


def window_layers(config: ModelConfig, drafts: int) -> int:
    """Layers that have window rings: the backbone's, and where drafts are made the stages of the draft model."""
    return config.num_hidden_layers + (config.num_drafts if drafts else 0)


def block_bytes(config: ModelConfig, kv_format: str) -> int:
    """Bytes of one cache block: per KV source, 128 / ratio entries of compressed KV and index key."""
    kind = KVFormat.named(kv_format)
    per_entry = kind.compressed.bytes(config.head_dim) + kind.key.bytes(config.index_head_dim)
    return sum(BLOCK_SIZE // config.ratio(layer) * per_entry for layer in config.kv_source_layer_ids)


def window_entry_bytes(config: ModelConfig, kv_format: str) -> int:
    """Bytes of one stored window: `sliding_window` rows of every layer of the backbone."""
    kind = KVFormat.named(kv_format)
    return config.num_hidden_layers * config.sliding_window * kind.window.bytes(config.head_dim)


def slot_bytes(config: ModelConfig, kv_format: str, drafts: int, *, replicas: bool = True) -> int:
    """Bytes that a sequence takes whatever its length: window rings of all layers, two replicas of a boundary's window
    (only where windows are stored), the open rows (a value and a gate in float32) of the ratio-2 sources, last tokens.
    """
    kind = KVFormat.named(kv_format)
    rings = window_layers(config, drafts) * ring_rows(config, drafts) * kind.window.bytes(config.head_dim)
    pairs = sum(config.ratio(layer) == 2 for layer in config.kv_source_layer_ids) * open_pairs(drafts)
    tokens = (lookback(config) + drafts) * torch.int64.itemsize
    stored = 2 * window_entry_bytes(config, kv_format) if replicas else 0
    return rings + stored + pairs * 2 * config.head_dim * torch.float32.itemsize + tokens


def staging_bytes(
    config: ModelConfig, kv_format: str, max_num_batched_tokens: int, *, drafts: int = 0, max_num_seqs: int = 0
) -> int:
    """Bytes of the area behind the window rings in which a step puts its new rows: one per token in every layer. Where
    drafts are made, a draft pass puts a block of rows per sequence there, which may be more."""
    # at the real sizes and 32,768 tokens a step: 40 layers x 32,768 x 528 = 692,060,160
    kind = KVFormat.named(kv_format)
    rows = max(max_num_batched_tokens, max_num_seqs * config.dspark_block_size if drafts else 0)
    return window_layers(config, drafts) * rows * kind.window.bytes(config.head_dim)


def lookback(config: ModelConfig) -> int:
    """Tokens before the current one that Engram's longest n-gram reads: 3 for 4-grams, 0 without Engram."""
    return max(config.engram_max_ngram_size - 1, 0)


def check_drafts(drafts: int) -> None:
    """ValueError unless one verify step can write this many drafts."""
    if not 0 <= drafts < VERIFY_ROWS:
        raise ValueError(f"drafts: must be from 0 to {VERIFY_ROWS - 1}, got {drafts!r}")
