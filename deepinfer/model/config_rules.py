"""What the fields of a ModelConfig owe each other (model.md section 6, "Constraints between fields").

`violations` lists every broken rule as a sentence that names the fields and their values, so that one error shows all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.model.config import ModelConfig

TILE = 32  # FP8 tiles are 32 x 32, FP4 groups 32 long: every quantised K axis must be a multiple
AT_LEAST_ONE = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "max_position_embeddings",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hc_mult",
    "hc_sinkhorn_iters",
    "swiglu_limit",
    "rms_norm_eps",
    "rope_theta",
    "compress_rope_theta",
    "gate_temp",
    "hc_eps",
]
ENGRAM_SIZES = ["engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"]
DSPARK_SIZES = ["dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok"]


def violations(c: ModelConfig) -> list[str]:
    """Every broken rule; empty for a usable config. Later rules divide by earlier fields, so signs come first."""
    problems = [f"{name} = {getattr(c, name)!r} must be positive" for name in AT_LEAST_ONE if getattr(c, name) <= 0]
    if problems:
        return problems
    problems += [*_sizes(c), *_tokens(c), *_rope(c), *_experts(c)]
    roles = [*_layer_lists(c)]
    problems += roles
    if not roles:  # the rules on sources read the lists by layer id
        problems += [*_sources(c), *_candidates(c)]
    return [*problems, *_engram(c), *_dspark(c), *_vision(c), *_quantization(c)]


def _multiple(name: str, value: int, of: int = TILE) -> Iterator[str]:
    if value % of:
        yield f"{name} = {value} must be a multiple of {of}"


def _sizes(c: ModelConfig) -> Iterator[str]:
    if c.num_attention_heads % c.o_groups:
        yield f"num_attention_heads = {c.num_attention_heads} must be divisible by o_groups = {c.o_groups}"
    else:
        yield from _multiple("num_attention_heads*head_dim/o_groups", c.num_attention_heads * c.head_dim // c.o_groups)
    for name in ("hidden_size", "head_dim", "q_lora_rank", "moe_intermediate_size", "index_head_dim"):
        yield from _multiple(name, getattr(c, name))
    yield from _multiple("o_groups*o_lora_rank", c.o_groups * c.o_lora_rank)


def _tokens(c: ModelConfig) -> Iterator[str]:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        if not 0 <= getattr(c, name) < c.vocab_size:
            yield f"{name} = {getattr(c, name)} is outside the vocabulary of vocab_size = {c.vocab_size}"


def _rope(c: ModelConfig) -> Iterator[str]:
    width = c.qk_rope_head_dim
    if width % 2:
        yield f"qk_rope_head_dim = {width} must be even: RoPE turns pairs"
    for name in ("head_dim", "index_head_dim"):
        if width > getattr(c, name):
            yield f"qk_rope_head_dim = {width} must not exceed {name} = {getattr(c, name)}"
    for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        if getattr(c.rope_scaling, name) <= 0:
            yield f"rope_scaling.{name} = {getattr(c.rope_scaling, name)} must be positive"
    if c.rope_scaling.beta_fast < c.rope_scaling.beta_slow:
        yield (
            f"rope_scaling.beta_fast = {c.rope_scaling.beta_fast} must not be below beta_slow = "
            f"{c.rope_scaling.beta_slow}"
        )
    for name in ("rope_theta", "compress_rope_theta"):
        if getattr(c, name) <= 1:
            yield f"{name} = {getattr(c, name)} must be above 1: YaRN divides by its logarithm"


def _experts(c: ModelConfig) -> Iterator[str]:
    if c.num_experts_per_tok > c.n_routed_experts:
        yield f"num_experts_per_tok = {c.num_experts_per_tok} exceeds n_routed_experts = {c.n_routed_experts}"
    if c.norm_topk_prob and c.num_experts_per_tok < 2:
        yield (
            "num_experts_per_tok = 1 with norm_topk_prob = True: normalising one weight would hide the router; use "
            "2 or more"
        )


def _layer_lists(c: ModelConfig) -> Iterator[str]:
    needed = c.num_hidden_layers + max(c.num_drafts, 0)
    if c.num_drafts < 0:
        yield f"num_nextn_predict_layers = {c.num_drafts} must not be negative"
    if len(c.compress_ratios) < needed:
        yield (
            f"compress_ratios has {len(c.compress_ratios)} entries, needs {needed} = num_hidden_layers "
            f"{c.num_hidden_layers} "
            f"+ num_nextn_predict_layers {c.num_drafts}"
        )
    if odd := sorted(set(c.compress_ratios) - {0, 1, 2}):
        yield f"compress_ratios holds {odd}; only 0, 1 and 2 are supported"
    if any(c.compress_ratios[c.num_hidden_layers :]):
        yield (
            f"compress_ratios[{c.num_hidden_layers}:] = {c.compress_ratios[c.num_hidden_layers :]} must be 0: drafts "
            "do not compress"
        )
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = getattr(c, name)
        if list(ids) != sorted(set(ids)):
            yield f"{name} = {list(ids)} must be strictly ascending"
        if outside := [i for i in ids if not 0 <= i < c.num_hidden_layers]:
            yield f"{name} holds {outside}, outside the layers 0..{c.num_hidden_layers - 1}"


def _sources(c: ModelConfig) -> Iterator[str]:
    kv, index = c.kv_source_layer_ids, c.index_source_layer_ids
    if missing := sorted(set(kv) - set(index)):
        yield f"kv_source_layer_ids {missing} must also be in index_source_layer_ids: new keys need a new selection"
    for name, ids in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
        if flat := [i for i in ids if c.ratio(i) == 0]:
            yield f"{name} holds {flat}, whose compress_ratios are 0"
    for layer in range(c.num_hidden_layers):
        if c.ratio(layer) == 0:
            continue
        source = c.kv_source(layer)
        if source is None or c.index_source(layer) is None:
            name = "kv_source_layer_ids" if source is None else "index_source_layer_ids"
            yield f"layer {layer} has compress_ratios = {c.ratio(layer)} but no entry of {name} is <= {layer}"
        elif c.ratio(source) != c.ratio(layer):
            yield (
                f"layer {layer} has compress_ratios = {c.ratio(layer)} but reads the cache of layer {source} with "
                f"ratio {c.ratio(source)}; a change of ratio needs a new entry in kv_source_layer_ids"
            )


def _candidates(c: ModelConfig) -> Iterator[str]:
    source, blocks, size = c.candidate_source_layer_id, c.candidate_topk_blocks, c.candidate_block_size
    if source == -1:
        return
    if source not in c.kv_source_layer_ids:
        yield (
            f"candidate_source_layer_id = {source} must be in kv_source_layer_ids {list(c.kv_source_layer_ids)} (or "
            "-1 = off)"
        )
        return
    if late := [i for i in c.index_source_layer_ids if i > source and c.kv_source(i) != source]:
        yield (
            f"index_source_layer_ids {late} come after candidate_source_layer_id = {source} but read another KV source"
        )
    if blocks <= 0 or size <= 0:
        yield (
            f"candidate_topk_blocks = {blocks} and candidate_block_size = {size} must be positive "
            "with a candidate source"
        )
    elif blocks * size - (size - 1) < c.index_topk:
        # The last block may hold one visible position only, hence the (size - 1).
        yield (
            f"candidate_topk_blocks*candidate_block_size - (candidate_block_size-1) = {blocks * size - (size - 1)} "
            f"is below index_topk = {c.index_topk}: masked positions could be selected"
        )


def _engram(c: ModelConfig) -> Iterator[str]:
    if not c.engram_layer_ids:
        if c.engram_num_embeddings:
            yield f"engram_num_embeddings = {list(c.engram_num_embeddings)} without engram_layer_ids"
        return
    bad = [
        f"{name} = {getattr(c, name)} must be positive with engram_layer_ids"
        for name in ENGRAM_SIZES
        if getattr(c, name) <= 0
    ]
    if c.engram_max_ngram_size < 2:
        bad.append(f"engram_max_ngram_size = {c.engram_max_ngram_size} must be at least 2")
    if not 0 <= c.engram_pad_token_id < c.vocab_size:
        bad.append(
            f"engram_pad_token_id = {c.engram_pad_token_id} is outside the vocabulary of vocab_size = {c.vocab_size}"
        )
    if c.engram_compressed_vocab_size > c.vocab_size:
        bad.append(
            f"engram_compressed_vocab_size = {c.engram_compressed_vocab_size} exceeds vocab_size = {c.vocab_size}"
        )
    yield from bad
    if bad:
        return
    yield from _multiple("engram_head_dim", c.engram_head_dim)
    # Bounds that keep the prime search below a few seconds for a nonsensical file; the release has 2 x 24 columns.
    if c.engram_columns * len(c.engram_layer_ids) > 1024 or c.engram_vocab_size > 1 << 28:
        yield (
            "engram_n_heads, engram_max_ngram_size or engram_vocab_size is far outside the released range (24 "
            "columns, 16000000)"
        )
        return
    rows = [sum(map(sum, orders)) for orders in c.engram_primes()]
    if list(c.engram_num_embeddings) != rows:
        yield (
            f"engram_num_embeddings = {list(c.engram_num_embeddings)} must be {rows}: the sums of the primes that "
            "follow from "
            f"engram_vocab_size = {c.engram_vocab_size}"
        )


def _dspark(c: ModelConfig) -> Iterator[str]:
    if c.num_drafts <= 0:
        return
    for name in DSPARK_SIZES:
        if getattr(c, name) <= 0:
            yield f"{name} = {getattr(c, name)} must be positive with num_nextn_predict_layers = {c.num_drafts}"
    if not c.dspark_target_layer_ids:
        yield "dspark_target_layer_ids is empty with num_nextn_predict_layers > 0: the drafts have no input"
    if not 0 <= c.dspark_noise_token_id < c.vocab_size:
        yield (
            f"dspark_noise_token_id = {c.dspark_noise_token_id} is outside the vocabulary of vocab_size = "
            f"{c.vocab_size}"
        )
    if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
        yield (
            f"dspark_num_experts_per_tok = {c.dspark_num_experts_per_tok} exceeds dspark_n_routed_experts = "
            f"{c.dspark_n_routed_experts}"
        )


def _vision(c: ModelConfig) -> Iterator[str]:
    v = c.vision
    if v is None:
        return
    sizes = [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "patch_size",
        "rope_theta",
        "downsample_ratio",
        "max_image_tokens",
        "min_pixels",
    ]
    if bad := [name for name in sizes if getattr(v, name) <= 0]:
        yield from (f"vision_config.{name} = {getattr(v, name)} must be positive" for name in bad)
        return
    if v.hidden_size % v.num_attention_heads or v.head_dim % 4:
        yield (
            f"vision_config.hidden_size = {v.hidden_size} over num_attention_heads = {v.num_attention_heads} must "
            "give a head "
            "size divisible by 4: half the pairs turn with the row, half with the column"
        )
    if v.max_image_tokens < 4:
        yield (
            f"vision_config.max_image_tokens = {v.max_image_tokens} must be at least 4: start, one patch, end of "
            "row, end"
        )


def _quantization(c: ModelConfig) -> Iterator[str]:
    for field in dataclasses.fields(c.quantization):
        value = getattr(c.quantization, field.name)
        if value != field.default:
            yield f"quantization_config.{field.name} = {value!r} is not supported; only {field.default!r} is"
