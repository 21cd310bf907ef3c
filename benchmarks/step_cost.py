"""What one step of the model must compute and read, from the config alone.

Counted: every matrix product, the attention over window and selected entries, the index scores. Left out, so that the
limits made from it are a little too good to reach: norms, RoPE, the mixing of the copies, Sinkhorn, routing, sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shapes import Shape

from deepinfer.model.config import ModelConfig

KV_BYTES = 4  # the CPU cache holds float32


@dataclass(frozen=True)
class Product:
    """`times` times: `batch` independent products [m, k] x [k, n]. is_weight: the right factor is a matrix of the
    checkpoint; otherwise it is gathered context."""

    name: str
    batch: int
    m: int
    k: int
    n: int
    times: int = 1
    is_weight: bool = True

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n * self.times

    @property
    def weights(self) -> int:
        """Elements of the checkpoint that it reads."""
        return self.batch * self.k * self.n * self.times if self.is_weight else 0


@dataclass(frozen=True)
class StepCost:
    products: tuple[Product, ...]
    kv_bytes: int

    @property
    def flops(self) -> int:
        return sum(product.flops for product in self.products)

    def bytes(self, weight_bytes: float) -> int:
        """Everything that is read at least once, with weights held in `weight_bytes` bytes each. The float32 matrices
        of the hyper-connections count as they are."""
        narrow = sum(p.weights for p in self.products if p.name != "hyper")
        hyper = sum(p.weights for p in self.products if p.name == "hyper")
        return int(narrow * weight_bytes + hyper * 4 + self.kv_bytes)


def expected_experts(config: ModelConfig, rows: int) -> int:
    """Routed experts that `rows` tokens hit when all are equally likely."""
    missed = (1 - config.num_experts_per_tok / config.n_routed_experts) ** rows
    return max(1, round(config.n_routed_experts * (1 - missed)))


def step_cost(config: ModelConfig, shape: Shape, experts_hit: int | None = None) -> StepCost:
    """experts_hit: distinct routed experts per layer; None = as expected of an even router."""
    hit = expected_experts(config, shape.rows) if experts_hit is None else experts_hit
    products = list(_dense(config, shape.rows, shape.batch if shape.new > 1 else shape.rows))
    products += _experts(config, shape.rows, hit)
    kv_bytes = 0
    for layer in range(config.num_hidden_layers):
        found, read = _context(config, shape, layer)
        products += found
        kv_bytes += read
    return StepCost(tuple(products), kv_bytes)


def _dense(c: ModelConfig, rows: int, logit_rows: int) -> Iterator[Product]:
    d, layers, heads = c.hidden_size, c.num_hidden_layers, c.num_attention_heads
    yield Product("wq_a", 1, rows, d, c.q_lora_rank, layers)
    yield Product("wq_b", 1, rows, c.q_lora_rank, heads * c.head_dim, layers)
    yield Product("wkv", 1, rows, d, c.head_dim, layers)
    yield Product("wo_a", c.o_groups, rows, heads * c.head_dim // c.o_groups, c.o_lora_rank, layers)
    yield Product("wo_b", 1, rows, c.o_groups * c.o_lora_rank, d, layers)
    yield Product("router", 1, rows, d, c.n_routed_experts, layers)
    yield Product("hyper", 1, rows, c.hc_mult * d, (2 + c.hc_mult) * c.hc_mult, 2 * layers)
    if c.engram_layer_ids:
        memory = c.engram_columns * c.engram_head_dim
        yield Product("engram wkv", 1, rows, memory, (c.hc_mult + 1) * d, len(c.engram_layer_ids))
    for layer in c.kv_source_layer_ids:
        ratio = c.ratio(layer)
        yield Product("compressor", 1, rows, d, c.head_dim, 2 if ratio == 2 else 1)  # values, and gates of pairs
        yield Product("index wk", 1, max(1, rows // ratio), c.head_dim, c.index_head_dim)
    for _ in c.index_source_layer_ids:
        yield Product("index wq_b", 1, rows, c.q_lora_rank, c.index_n_heads * c.index_head_dim)
        yield Product("index weights", 1, rows, d, c.index_n_heads)
    yield Product("head", 1, logit_rows, d, c.vocab_size)


def _experts(c: ModelConfig, rows: int, hit: int) -> Iterator[Product]:
    d, inner, layers = c.hidden_size, c.moe_intermediate_size, c.num_hidden_layers
    per_expert = max(1, round(rows * c.num_experts_per_tok / hit))
    for name, batch, m in (("shared expert", 1, rows), ("routed experts", hit, per_expert)):
        yield Product(f"{name}, up", batch, m, d, 2 * inner, layers)  # gate and up
        yield Product(f"{name}, down", batch, m, inner, d, layers)


def _context(c: ModelConfig, shape: Shape, layer: int) -> tuple[list[Product], int]:
    """Attention and index scores of one layer: products of mean size over the step's positions, and bytes read."""
    positions = range(shape.context, shape.context + shape.new)
    ratio, rows = c.ratio(layer), shape.rows
    window = [min(p + 1, c.sliding_window) for p in positions]
    visible = [(p + 1) // ratio if ratio else 0 for p in positions]
    keys = _mean(window) + _mean([min(c.index_topk, seen) for seen in visible])
    found = [
        Product("attention, scores", rows, c.num_attention_heads, c.head_dim, keys, is_weight=False),
        Product("attention, values", rows, c.num_attention_heads, keys, c.head_dim, is_weight=False),
    ]
    # A window row, and a selected entry, of a sequence is read at least once however many rows of the step use it.
    fresh = min(shape.context, c.sliding_window - 1) + shape.new
    chosen = min(visible[-1], c.index_topk * shape.new)
    read = (fresh + chosen) * c.head_dim
    if c.owns_index(layer) and visible[-1] > c.index_topk:  # up to there all entries are chosen and none is scored
        scored = visible
        if c.is_candidate_user(layer):
            scored = [min(seen, c.candidate_topk_blocks * c.candidate_block_size) for seen in visible]
        mean = _mean(scored)
        queries = shape.new * c.index_n_heads  # all rows of a sequence meet the same keys
        found.append(Product("index scores", shape.batch, queries, c.index_head_dim, mean, is_weight=False))
        read += min(visible[-1], sum(scored)) * c.index_head_dim
    return found, shape.batch * read * KV_BYTES


def _mean(values: list[int]) -> int:
    return max(1, math.ceil(sum(values) / len(values))) if any(values) else 0
