"""The official inventory: name, shape and storage type of every tensor that a config implies.

Sources: model.md 3.1 to 3.3, dspark.md 2.5 (the `mtp.*` table), vision.md 8. The released config gives exactly 96,085
tensors and 510,286,023,000 payload bytes. Weight matrices are [out, in]; `<name>.weight` and `<name>.scale` belong
together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deepinfer.model.config import ModelConfig

Kind = Literal[
    "embedding", "norm", "attention", "compressor", "indexer", "router", "expert", "shared_expert", "hyper", "engram",
    "engram_table", "draft_head", "vision",
]  # fmt: skip
Group = Literal["text", "draft", "vision"]
GROUPS: tuple[Group, ...] = ("text", "draft", "vision")

# Bytes per element of the safetensors types that the format uses.
DTYPE_BYTES: dict[str, int] = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
TILE = 32  # side of an FP8 tile, length of an FP4 group and of an Engram row group


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the file. `dtype` is the safetensors name; `kind` is the part of the model that it belongs to."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind

    @property
    def nbytes(self) -> int:
        """Payload bytes in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def group(self) -> Group:
        """What must be loaded with it: text alone needs neither `draft` (mtp.*) nor `vision` (tower, aligner, "
        "bias_vl)."""
        if self.kind == "vision":
            return "vision"
        return "draft" if self.name.startswith("mtp.") else "text"


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint with this config, by name, in file order: globals, layers, drafts, vision.

    `ffn.gate.bias_vl` (the router's bias for image positions) exists only with a vision_config.
    """
    return {spec.name: spec for spec in _all(config)}


def image_biases(config: ModelConfig) -> dict[str, TensorSpec]:
    """`ffn.gate.bias_vl` of every backbone layer. A checkpoint without a vision_config may carry them or not: the
    release lists them for all layers, and nothing but an image token ever reads them."""
    names = (f"layers.{layer}.ffn.gate.bias_vl" for layer in range(config.num_hidden_layers))
    return {name: TensorSpec(name, (config.n_routed_experts,), "F32", "vision") for name in names}


def _all(c: ModelConfig) -> Iterator[TensorSpec]:
    yield TensorSpec("embed.weight", (c.vocab_size, c.hidden_size), "BF16", "embedding")
    for layer in range(c.num_hidden_layers):
        yield from _layer(c, layer)
    yield TensorSpec("norm.weight", (c.hidden_size,), "BF16", "norm")
    yield TensorSpec("head.weight", (c.vocab_size, c.hidden_size), "BF16", "embedding")
    for stage in range(c.num_drafts):
        yield from _draft_stage(c, stage)
    yield from _vision(c)


def fp8_pair(prefix: str, rows: int, cols: int, kind: Kind) -> Iterator[TensorSpec]:
    """A dense matrix [rows, cols] in FP8 with one E8M0 scale per 32 x 32 tile."""
    yield TensorSpec(f"{prefix}.weight", (rows, cols), "F8_E4M3", kind)
    yield TensorSpec(f"{prefix}.scale", (-(-rows // TILE), -(-cols // TILE)), "F8_E8M0", kind)


def fp4_pair(prefix: str, rows: int, cols: int, kind: Kind) -> Iterator[TensorSpec]:
    """An expert matrix [rows, cols], two FP4 codes per byte (low nibble = even column), one E8M0 scale per 32 "
    "columns."""
    yield TensorSpec(f"{prefix}.weight", (rows, cols // 2), "I8", kind)
    yield TensorSpec(f"{prefix}.scale", (rows, cols // TILE), "F8_E8M0", kind)


def _layer(c: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    prefix = f"layers.{layer}"
    if (index := c.engram_index(layer)) is not None:
        yield from _engram(c, f"{prefix}.engram", c.engram_num_embeddings[index])
    yield from _block(c, prefix, c.n_routed_experts)
    if c.owns_kv(layer):
        at = f"{prefix}.attn.compressor"
        yield TensorSpec(f"{at}.wkv.weight", (c.head_dim, c.hidden_size), "BF16", "compressor")
        if c.ratio(layer) > 1:  # one token per entry needs no gate
            yield TensorSpec(f"{at}.wgate.weight", (c.head_dim, c.hidden_size), "BF16", "compressor")
        yield TensorSpec(f"{at}.norm.weight", (c.head_dim,), "BF16", "compressor")
    at = f"{prefix}.attn.indexer"
    if c.owns_kv(layer):
        yield TensorSpec(f"{at}.wk.weight", (c.index_head_dim, c.head_dim), "BF16", "indexer")
        yield TensorSpec(f"{at}.k_norm.weight", (c.index_head_dim,), "BF16", "indexer")
    if c.owns_index(layer):
        yield from fp8_pair(f"{at}.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank, "indexer")
        yield TensorSpec(f"{at}.weights_proj.weight", (c.index_n_heads, c.hidden_size), "BF16", "indexer")


def _block(c: ModelConfig, prefix: str, experts: int) -> Iterator[TensorSpec]:
    """What a backbone layer and a draft stage share: attention, MoE, hyper-connections."""
    d, inter = c.hidden_size, c.moe_intermediate_size
    at = f"{prefix}.attn"
    yield TensorSpec(f"{prefix}.attn_norm.weight", (d,), "BF16", "norm")
    yield from fp8_pair(f"{at}.wq_a", c.q_lora_rank, d, "attention")
    yield TensorSpec(f"{at}.q_norm.weight", (c.q_lora_rank,), "BF16", "attention")
    yield from fp8_pair(f"{at}.wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank, "attention")
    yield from fp8_pair(f"{at}.wkv", c.head_dim, d, "attention")
    yield TensorSpec(f"{at}.kv_norm.weight", (c.head_dim,), "BF16", "attention")
    o_in, o_rank = c.num_attention_heads * c.head_dim // c.o_groups, c.o_groups * c.o_lora_rank
    yield from fp8_pair(f"{at}.wo_a", o_rank, o_in, "attention")
    yield from fp8_pair(f"{at}.wo_b", d, o_rank, "attention")
    yield TensorSpec(f"{at}.attn_sink", (c.num_attention_heads,), "F32", "attention")

    yield TensorSpec(f"{prefix}.ffn_norm.weight", (d,), "BF16", "norm")
    yield TensorSpec(f"{prefix}.ffn.gate.weight", (experts, d), "BF16", "router")
    yield TensorSpec(f"{prefix}.ffn.gate.bias", (experts,), "F32", "router")
    if c.vision is not None:
        yield TensorSpec(f"{prefix}.ffn.gate.bias_vl", (experts,), "F32", "vision")
    for name, rows, cols in (("w1", inter, d), ("w2", d, inter), ("w3", inter, d)):
        yield from fp8_pair(f"{prefix}.ffn.shared_experts.{name}", rows, cols, "shared_expert")
    for expert in range(experts):
        for name, rows, cols in (("w1", inter, d), ("w2", d, inter), ("w3", inter, d)):
            yield from fp4_pair(f"{prefix}.ffn.experts.{expert}.{name}", rows, cols, "expert")

    coefficients = (2 + c.hc_mult) * c.hc_mult  # pre, post, and the hc x hc mix: 4 + 4 + 16 = 24
    for part in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}.hc_{part}_fn", (coefficients, c.hc_mult * d), "F32", "hyper")
        yield TensorSpec(f"{prefix}.hc_{part}_base", (coefficients,), "F32", "hyper")
        yield TensorSpec(f"{prefix}.hc_{part}_scale", (3,), "F32", "hyper")  # one each for pre, post, mix


def _engram(c: ModelConfig, prefix: str, rows: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}.embed.weight", (rows, c.engram_head_dim), "F8_E4M3", "engram_table")
    yield TensorSpec(f"{prefix}.embed.scale", (rows, c.engram_head_dim // TILE), "F8_E8M0", "engram_table")
    # hc_mult keys and one value that all copies share: (4 + 1) x 5120 = 25600 rows
    yield from fp8_pair(
        f"{prefix}.wkv", (c.hc_mult + 1) * c.hidden_size, c.engram_columns * c.engram_head_dim, "engram"
    )
    for name in ("q_weight", "k_weight"):
        yield TensorSpec(f"{prefix}.{name}", (c.hc_mult, c.hidden_size), "BF16", "engram")


def _draft_stage(c: ModelConfig, stage: int) -> Iterator[TensorSpec]:
    prefix, d, rank = f"mtp.{stage}", c.hidden_size, c.dspark_markov_rank
    if stage == 0:
        yield from fp8_pair(f"{prefix}.main_proj", d, len(c.dspark_target_layer_ids) * d, "draft_head")
        yield TensorSpec(f"{prefix}.main_norm.weight", (d,), "BF16", "draft_head")
    yield from _block(c, prefix, c.dspark_n_routed_experts)
    if stage == c.num_drafts - 1:
        yield TensorSpec(f"{prefix}.norm.weight", (d,), "BF16", "draft_head")
        yield TensorSpec(f"{prefix}.markov_head.embed.weight", (c.vocab_size, rank), "BF16", "draft_head")
        yield TensorSpec(f"{prefix}.markov_head.head.weight", (c.vocab_size, rank), "BF16", "draft_head")
        yield TensorSpec(f"{prefix}.confidence_head.proj.weight", (1, d + rank), "BF16", "draft_head")


def _vision(c: ModelConfig) -> Iterator[TensorSpec]:
    v = c.vision
    if v is None:
        return
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (v.hidden_size, 3 * v.patch_size**2),
        "vision.patch_embed.proj.bias": (v.hidden_size,),
    }
    for i in range(v.num_hidden_layers):
        block = f"vision.blocks.{i}"
        shapes |= {
            f"{block}.norm1.weight": (v.hidden_size,),
            f"{block}.attn.wqkv.weight": (3 * v.hidden_size, v.hidden_size),
            f"{block}.attn.wqkv.bias": (3 * v.hidden_size,),
            f"{block}.attn.wo.weight": (v.hidden_size, v.hidden_size),
            f"{block}.attn.wo.bias": (v.hidden_size,),
            f"{block}.norm2.weight": (v.hidden_size,),
            f"{block}.mlp.w1.weight": (2 * v.intermediate_size, v.hidden_size),  # gate rows first, then up
            f"{block}.mlp.w2.weight": (v.hidden_size, v.intermediate_size),
        }
    shapes |= {
        "vision.norm.weight": (v.hidden_size,),
        "aligner.w1.weight": (c.hidden_size, v.hidden_size * v.downsample_ratio**2),
        "aligner.w1.bias": (c.hidden_size,),
        "aligner.w2.weight": (c.hidden_size, c.hidden_size),
        "aligner.w2.bias": (c.hidden_size,),
        "image_start": (c.hidden_size,),
        "image_newline": (c.hidden_size,),
        "image_end": (c.hidden_size,),
    }
    for name, shape in shapes.items():
        yield TensorSpec(name, shape, "BF16", "vision")
