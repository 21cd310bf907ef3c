"""What one step must read and multiply at least, from the config alone: the floor that its time is held against.

Counted once each: every weight that the step needs (experts as often as an even router hits them), cache records, the
products as defined, logits written and read. Where the stream of a step is larger than a cache could keep (prefill), it
is read and written once per sub-layer. Left out, so that the floor is a little too good to reach: norms, rotations,
quantisation, Sinkhorn, routing, sampling, activations between the kernels of one sub-layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer.kernels.timing import Rates
from deepinfer.model.config import ModelConfig
from deepinfer.model.footprint import compressed_record_bytes, index_record_bytes, window_record_bytes

FP8 = 1.0
FP4 = 0.5 + 1 / 32  # with an E8M0 scale per 32
BF16 = 2.0
F32 = 4.0
STREAM_CACHE = 32 << 20  # bytes of a stream that stay in the second-level cache from one sub-layer to the next


@dataclass(frozen=True)
class Load:
    """One step of a rank: `sequences` that have `context` tokens each and add `rows` each."""

    sequences: int
    rows: int
    context: int
    logits: int  # rows per sequence that give logits
    kept: int  # rows per sequence that go past the last KV source
    drafts: int = 0  # made per sequence after it; 0 = none

    @property
    def total(self) -> int:
        return self.sequences * self.rows


@dataclass(frozen=True)
class Part:
    """Bytes that move and operations (2 a multiply-add), and which matrix rate bounds them (Rates.seconds)."""

    name: str
    bytes: float
    flops: float = 0.0
    rate: str = "copy"

    def seconds(self, rates: Rates) -> float:
        return rates.seconds(self.bytes, self.flops, self.rate)


def floor_by_part(parts: list[Part], rates: Rates) -> dict[str, dict[str, float]]:
    """Milliseconds, GB and TFLOP by name, the longest first. Parts follow each other: their floors add up."""
    found: dict[str, dict[str, float]] = {}
    for part in parts:
        line = found.setdefault(part.name, {"ms": 0.0, "gb": 0.0, "tflop": 0.0})
        line["ms"] += 1e3 * part.seconds(rates)
        line["gb"] += part.bytes / 1e9
        line["tflop"] += part.flops / 1e12
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


def step_parts(c: ModelConfig, load: Load) -> list[Part]:
    """Everything that a step of this load needs, in the formats of the GPU."""
    found: list[Part] = []
    last = max(c.kv_source_layer_ids, default=c.num_hidden_layers)
    for layer in range(c.num_hidden_layers):
        keyed = load.kept if layer > last else load.rows  # of each sequence: they leave keys
        passing = load.kept if layer >= last else load.rows  # at the last source the others have done their duty
        found += _block(c, layer, load.sequences * passing, load.sequences * keyed)
        found += _context(c, layer, load, passing)
        found += _sources(c, layer, load.total, load.sequences * passing)
    found += _index_scores(c, load)
    columns = c.engram_columns * c.engram_head_dim
    for _ in c.engram_layer_ids:
        found.append(_product("Engram", load.total, columns, (c.hc_mult + 1) * c.hidden_size, FP8, "fp8"))
    found.append(_head(c, "head and logits", load.sequences * load.logits))
    if load.drafts:
        found += _drafts(c, load)
    return found


def expected_experts(rows: int, experts: int, slots: int) -> float:
    """Experts that `rows` tokens hit when each takes `slots` different ones, all equally likely."""
    return experts * (1 - (1 - slots / experts) ** rows)


def host_bytes(c: ModelConfig, rows: int) -> int:
    """Bytes of Engram rows (codes and scales) that a step of so many tokens reads from host memory."""
    return len(c.engram_layer_ids) * rows * c.engram_columns * (c.engram_head_dim + c.engram_head_dim // 32)


def _product(name: str, m: float, k: int, n: int, width: float, rate: str) -> Part:
    """[m, k] x [k, n], the right one a weight of `width` bytes each. Nothing without rows."""
    return Part(name, k * n * width, 2.0 * m * k * n, rate) if m else Part(name, 0.0)


def _block(c: ModelConfig, layer: int, rows: int, keyed: int) -> Iterator[Part]:
    """A layer's products but for those of its sources: `rows` pass it, `keyed` leave window keys."""
    d, inner, wide = c.hidden_size, c.moe_intermediate_size, c.num_attention_heads * c.head_dim
    rank = c.o_groups * c.o_lora_rank
    yield _product("attention products", rows, d, c.q_lora_rank, FP8, "fp8")
    yield _product("attention products", rows, c.q_lora_rank, wide, FP8, "fp8")
    yield _product("attention products", keyed, d, c.head_dim, FP8, "fp8")
    yield _product("attention products", rows, wide // c.o_groups, rank, FP8, "bf16")  # wo_a: input not rounded
    yield _product("attention products", rows, rank, d, FP8, "fp8")
    experts, slots = c.expert_counts(layer)
    yield _product("router", rows, d, experts, BF16, "bf16")
    weights = 3 * d * inner
    hit = expected_experts(rows, experts, slots)
    yield Part("routed experts", hit * weights * FP4, 2.0 * rows * slots * weights, "fp8")
    yield Part("shared expert", weights * FP8 if rows else 0.0, 2.0 * rows * weights, "fp8")
    stream = rows * c.hc_mult * d * 2
    moved = 2 * stream if stream > STREAM_CACHE else 0
    for _ in range(2):
        mixing = _product("mHC", rows, c.hc_mult * d, (2 + c.hc_mult) * c.hc_mult, F32, "bf16")
        yield Part("mHC", mixing.bytes + moved, mixing.flops, "bf16")


def _context(c: ModelConfig, layer: int, load: Load, asking: int) -> Iterator[Part]:
    """Attention over the window and the selected entries. A record is read at least once for each sequence."""
    if not asking:
        return
    ratio = c.ratio(layer)
    end = load.context + load.rows
    window = _mean_up_to(c.sliding_window, end - asking, asking)
    selected = min(c.index_topk, _mean_visible(end - asking, asking, ratio)) if ratio else 0.0
    width, heads = c.head_dim, c.num_attention_heads
    shown = min(end, c.sliding_window + asking - 1)
    least = min(c.index_topk, end // ratio) if ratio else 0  # all rows of a sequence may choose the same
    nbytes = load.sequences * (shown * window_record_bytes(c) + least * compressed_record_bytes(c))
    flops = 4.0 * load.sequences * asking * heads * width * (window + selected)
    yield Part("attention", nbytes, flops, "bf16")


def _sources(c: ModelConfig, layer: int, rows: int, asking: int) -> Iterator[Part]:
    """Compressor, index keys and index scores of the layers that have them; `asking` rows choose entries."""
    d = c.hidden_size
    if c.owns_kv(layer):
        ratio = c.ratio(layer)
        for _ in range(2 if ratio == 2 else 1):
            yield _product("compressor", rows, d, c.head_dim, BF16, "bf16")
        yield _product("compressor", rows / ratio, c.head_dim, c.index_head_dim, BF16, "bf16")
    if c.owns_index(layer):
        yield _product("indexer", asking, c.q_lora_rank, c.index_n_heads * c.index_head_dim, FP8, "fp8")
        yield _product("indexer", asking, d, c.index_n_heads, BF16, "bf16")


def _index_scores(c: ModelConfig, load: Load) -> Iterator[Part]:
    """Index scores of every index source that has more entries than it selects."""
    last = max(c.kv_source_layer_ids, default=c.num_hidden_layers)
    for layer in c.index_source_layer_ids:
        asking = load.kept if layer >= last else load.rows
        end, ratio = load.context + load.rows, c.ratio(layer)
        entries, seen = end // ratio, _mean_visible(end - asking, asking, ratio)
        if c.is_candidate_user(layer):
            most = c.candidate_topk_blocks * c.candidate_block_size
            entries, seen = min(entries, most), min(seen, most)
        if not asking or entries <= c.index_topk:
            continue
        nbytes = load.sequences * entries * index_record_bytes(c)
        flops = 2.0 * load.sequences * asking * c.index_n_heads * c.index_head_dim * seen
        yield Part("index scores", nbytes, flops, "fp8")


def _head(c: ModelConfig, name: str, rows: int) -> Part:
    product = _product(name, rows, c.hidden_size, c.vocab_size, BF16, "bf16")
    return Part(name, product.bytes + 2 * rows * c.vocab_size * F32, product.flops, "bf16")


def _drafts(c: ModelConfig, load: Load) -> Iterator[Part]:
    """Keys of the step's rows into the stages' windows, the pass over the blocks, the heads."""
    d, taps = c.hidden_size, len(c.dspark_target_layer_ids)
    written = load.sequences * min(load.rows, c.sliding_window + 1 + load.drafts)
    blocks = load.sequences * c.dspark_block_size
    yield _product("drafts", written, taps * d, d, FP8, "fp8")
    for layer in range(c.num_hidden_layers, c.num_hidden_layers + c.num_drafts):
        for part in _block(c, layer, blocks, blocks):
            yield Part("drafts", part.bytes, part.flops, part.rate)
        yield Part("drafts", 0.0, 2.0 * written * d * c.head_dim, "fp8")  # the stage's wkv once more, for the context
        keys = min(load.context + load.rows, c.sliding_window) + c.dspark_block_size
        flops = 4.0 * blocks * c.num_attention_heads * c.head_dim * keys
        yield Part("drafts", load.sequences * keys * window_record_bytes(c), flops, "bf16")
    made = load.sequences * load.drafts
    yield _head(c, "drafts", made)
    for _ in range(load.drafts):  # one after the other, each reads the whole head of the bigram
        yield _product("drafts", load.sequences, c.dspark_markov_rank, c.vocab_size, BF16, "bf16")
    yield _product("drafts", made, d + c.dspark_markov_rank, 1, BF16, "bf16")


def _mean_visible(first: int, count: int, ratio: int) -> float:
    """Mean of (p + 1) // ratio over positions first .. first + count - 1, to half an entry."""
    return (2 * first + count + 1) / 2 / ratio if count else 0.0


def _mean_up_to(most: int, first: int, count: int) -> float:
    """Mean of min(p + 1, most) over positions first .. first + count - 1."""
    if not count:
        return 0.0
    short = max(0, min(count, most - first))  # positions that see fewer than `most`
    return (short * (2 * first + short + 1) / 2 + (count - short) * most) / count
