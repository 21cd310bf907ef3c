"""What a GPU's memory is used for beside weights and cache, and the plan that is printed at start.

The figures are upper bounds worked out from the shapes: a step's activations die before the next layer's are made, so
the widest layer counts, with half as much again for what the allocator cannot use.
"""

from __future__ import annotations

from typing import NamedTuple

from deepinfer.cache.formats import block_bytes, slot_bytes, staging_bytes
from deepinfer.config import BLOCK_SIZE, EngineConfig
from deepinfer.engine.graphs import COUNTS, sizes_for
from deepinfer.kernels import select
from deepinfer.model.config import ModelConfig

SLACK = 1.5
SCORE_BYTES = 512 << 20  # of index scores that are made at once (kernels/triton/indexer.py)
MAXIMA = 1 + 1 / 8 + 1 / 64 + 1 / 512  # scores and their maxima over 8, 64 and 512 entries
LOGITS = 4  # copies of a step's logits while it draws: as they came, tempered, sorted, probabilities
PASS_NODES = 15 << 20  # of a graph of the forward pass: about 1,000 launches, 15 KiB each
TAIL_NODES = 3 << 19  # of a graph of draws or of drafts: about 100
TAILS = (
    6  # kinds of what follows a pass, each a graph once it is asked for: greedy, drawn or truncated; with drafts or not
)


class WorkingMemory(NamedTuple):
    """Bytes at most."""

    activations: int
    scores: int
    logits: int
    graphs: int

    @property
    def total(self) -> int:
        return sum(self)


def token_bytes(model: ModelConfig) -> int:
    """Activations of one token in the widest layer, bfloat16."""
    stream = 2 * model.hc_mult * model.hidden_size  # as it enters a layer and as it leaves it
    attention = 3 * model.num_attention_heads * model.head_dim  # queries, outputs, and a copy
    experts = (model.num_experts_per_tok + 1) * (3 * model.moe_intermediate_size + model.hidden_size)
    return int(2 * (stream + max(attention, experts) + 4 * model.hidden_size) * SLACK)


def unpacked_bytes(model: ModelConfig, *, tokens: int, sequences: int, drafts: int) -> int:
    """Keys of one layer that a step of so many tokens unpacks to bfloat16 before its attention, if it does so
    (`select.will_unpack`): of all windows, and of as many entries as are unpacked at once."""
    windows = (sequences + 1) * (model.sliding_window + 1 + drafts) + tokens
    entries = select.MOST_UNPACKED if model.kv_source_layer_ids else 0
    return 2 * model.head_dim * (windows + entries)


def graph_memory(model: ModelConfig, *, rows: int, sequences: int, drafts: int) -> int:
    """Bytes of all graphs of up to `rows` rows for so many sequences and drafts of each, without their index scores.

    They share one pool, so what a pass needs while it runs counts once, as large as the largest. But every size keeps
    logits of its own (`graphs.sizes_for`): the graphs of what follows read them, and put nothing of theirs there.
    """
    if not rows:
        return 0
    logits = 4 * model.vocab_size  # bytes of a row
    sizes = sizes_for(rows, sequences, drafts)
    kept = sum(size for size, _ in sizes) * logits
    inside = rows * (token_bytes(model) + 2 * logits)  # logits of drafts, and lists of what may be drawn
    tails = TAILS * len(sizes) + (len(COUNTS) if drafts else 0)
    return kept + inside + len(sizes) * PASS_NODES + tails * TAIL_NODES


def working_memory(
    model: ModelConfig, *, tokens: int, sequences: int, drafts: int, graph_rows: int, longest: int, unpacks: bool
) -> WorkingMemory:
    """Of steps of up to `tokens` tokens and `sequences` sequences of up to `longest` tokens, with `drafts` drafts each
    that are verified, and of graphs of up to `graph_rows` rows. unpacks: the largest steps unpack keys before their
    attention."""
    each = 4 * longest if model.kv_source_layer_ids else 0  # a row's scores, float32, at ratio 1

    def scores(count: int) -> int:
        return int(min(SCORE_BYTES, count * each) * MAXIMA)

    drawing = LOGITS * sequences * (1 + drafts) * 4 * model.vocab_size
    graphs = graph_memory(model, rows=graph_rows, sequences=sequences, drafts=drafts) + scores(graph_rows)
    activations = tokens * token_bytes(model)
    activations += unpacked_bytes(model, tokens=tokens, sequences=sequences, drafts=drafts) if unpacks else 0
    return WorkingMemory(activations, scores(tokens), drawing, graphs)


def describe_memory(
    model: ModelConfig, config: EngineConfig, *, weights: int, wide_outputs: int, graphs: int, working: WorkingMemory
) -> str:
    """One line: what each part takes. weights, graphs: bytes as they were found, wide_outputs: of the copies that are
    kept beside the weights (`model/wide_outputs.py`)."""
    parts = {
        "weights": weights,
        "wide output weights": wide_outputs,
        f"{config.num_blocks} blocks of {BLOCK_SIZE} tokens": config.num_blocks * block_bytes(model, config.kv_format),
        f"{config.max_num_seqs} sequences": config.max_num_seqs
        * slot_bytes(model, config.kv_format, config.drafts, replicas=config.window_entries > 0),
        "staged records": staging_bytes(
            model,
            config.kv_format,
            config.max_num_batched_tokens,
            drafts=config.drafts,
            max_num_seqs=config.max_num_seqs,
        ),
        "graphs": graphs,
        f"at most, activations of {config.max_num_batched_tokens} tokens": working.activations,
        "index scores": working.scores,
        "logits": working.logits,
    }
    return "memory in GiB: " + ", ".join(f"{size / 2**30:,.2f} {name}" for name, size in parts.items())
