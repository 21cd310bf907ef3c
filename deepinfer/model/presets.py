"""Named configurations: `flash` is the released model, `tiny` a CPU-sized one with every mechanism of it.

`cut_layers` shortens a model while every remaining layer keeps its role.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from deepinfer.model.config import ConfigError, ModelConfig, RopeScaling, VisionConfig
from deepinfer.model.primes import engram_primes


def flash() -> ModelConfig:
    """DeepSeek-V4.1-Flash as released, with vision and drafts (model.md 1.1 to 1.3)."""
    return ModelConfig(
        vocab_size=129280, hidden_size=5120, num_hidden_layers=40, num_attention_heads=64, head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1280, o_groups=8, o_lora_rank=1024, swiglu_limit=10.0, rms_norm_eps=1e-20,
        max_position_embeddings=1048576,
        rope_theta=10000.0, compress_rope_theta=160000.0, rope_scaling=RopeScaling(16.0, 32.0, 1.0, 65536),
        n_routed_experts=384, num_experts_per_tok=6, moe_intermediate_size=2304, routed_scaling_factor=1.5,
        norm_topk_prob=True,
        sliding_window=128, compress_ratios=(0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3,
        kv_source_layer_ids=(2, 8, 14, 20), index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
        index_n_heads=32, index_head_dim=128, index_topk=512,
        candidate_source_layer_id=20, candidate_topk_blocks=2048, candidate_block_size=8,
        hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
        engram_layer_ids=(1, 14), engram_num_embeddings=(384006168, 384016682), engram_max_ngram_size=4,
        engram_vocab_size=16000000, engram_n_heads=8, engram_head_dim=256, engram_pad_token_id=2,
        engram_compressed_vocab_size=99092,
        num_nextn_predict_layers=3, dspark_block_size=5, dspark_noise_token_id=128799, dspark_target_layer_ids=(37,
        38, 39),
        dspark_markov_rank=256, dspark_n_routed_experts=128, dspark_num_experts_per_tok=3,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, image_token_id=129264,
        vision=VisionConfig(32, 1024, 16, 2816, 14, 10000.0, 3, 1024, 295936, None),
    )  # fmt: skip


def tiny() -> ModelConfig:
    """Eight layers with every role, small enough for milliseconds on a CPU (model.md 6, the half-size variant).

    Roles: 0 window; 1 full r2 + Engram; 2 reuse; 3 second full r2 + Engram; 4 full r1 + candidate source; 5 reuse;
    6 reindex inside candidates; 7 reuse. swiglu_limit 1.0 makes the clamp fire. The drafts tap layers 5 to 7.
    """
    return ModelConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=8, num_attention_heads=8, head_dim=128, qk_rope_head_dim=32,
        q_lora_rank=64, o_groups=2, o_lora_rank=64, swiglu_limit=1.0, rms_norm_eps=1e-20, max_position_embeddings=65536,
        rope_theta=10000.0, compress_rope_theta=160000.0, rope_scaling=RopeScaling(16.0, 32.0, 1.0, 4096),
        n_routed_experts=16, num_experts_per_tok=3, moe_intermediate_size=128, routed_scaling_factor=1.5,
        norm_topk_prob=True,
        sliding_window=16, compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0),
        kv_source_layer_ids=(1, 3, 4), index_source_layer_ids=(1, 3, 4, 6),
        index_n_heads=8, index_head_dim=64, index_topk=8,  # 8 heads, not 4: fewer exact ties of all-closed ReLUs
        candidate_source_layer_id=4, candidate_topk_blocks=4, candidate_block_size=4,
        hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
        engram_layer_ids=(1, 3), engram_num_embeddings=(660, 864), engram_max_ngram_size=4,
        engram_vocab_size=101, engram_n_heads=2, engram_head_dim=64, engram_pad_token_id=2,
        engram_compressed_vocab_size=400,
        num_nextn_predict_layers=3, dspark_block_size=5, dspark_noise_token_id=489, dspark_target_layer_ids=(5, 6, 7),
        dspark_markov_rank=32, dspark_n_routed_experts=8, dspark_num_experts_per_tok=2,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, image_token_id=502,
        vision=VisionConfig(2, 64, 2, 96, 4, 10000.0, 3, 64, 64, None),
    )  # fmt: skip


PRESETS: dict[str, Callable[[], ModelConfig]] = {"tiny": tiny, "flash": flash}


def preset(
    name: str,
    *,
    layers: int | None = None,
    experts: int | None = None,
    drafts: bool = False,
    vision: bool = False,
    engram_vocab_size: int | None = None,
) -> ModelConfig:
    """A preset, cut to `layers` layers and `experts` routed experts. Drafts and vision are left out unless asked for.

    engram_vocab_size: another start of the prime search, hence other table sizes (24 columns of about that many rows).
    Raises ConfigError for an unknown name or a cut that leaves no valid model.
    """
    if name not in PRESETS:
        raise ConfigError("preset", [f"{name!r} is unknown; choose one of {', '.join(PRESETS)}"])
    config = PRESETS[name]()
    changes: dict[str, Any] = {}
    if experts is not None:
        if not config.num_experts_per_tok <= experts <= config.n_routed_experts:
            wanted = f"{config.num_experts_per_tok}..{config.n_routed_experts}"
            raise ConfigError(
                "preset", [f"experts = {experts} must be in {wanted} (num_experts_per_tok..n_routed_experts)"]
            )
        changes["n_routed_experts"] = experts
        changes["dspark_n_routed_experts"] = max(
            config.dspark_num_experts_per_tok, min(experts, config.dspark_n_routed_experts)
        )
    if not vision:
        changes["vision"] = None
    if engram_vocab_size is not None:
        changes |= {"engram_vocab_size": engram_vocab_size, "engram_num_embeddings": _rows(config, engram_vocab_size)}
    config = dataclasses.replace(config, **changes)
    return cut_layers(config, config.num_hidden_layers if layers is None else layers, drafts=drafts)


def _rows(config: ModelConfig, start: int, tables: int | None = None) -> tuple[int, ...]:
    """Rows of the first `tables` Engram tables (default all): the sums of their primes."""
    tables = len(config.engram_layer_ids) if tables is None else tables
    primes = engram_primes(tables, config.engram_num_orders, config.engram_n_heads, start)
    return tuple(sum(map(sum, orders)) for orders in primes)


def cut_layers(config: ModelConfig, layers: int, *, drafts: bool) -> ModelConfig:
    """The first `layers` layers of `config`.

    The rule: every list of layer ids keeps its entries below `layers`; compress_ratios keeps its first `layers`
    entries, plus the drafts' zeros; the candidate filter goes with its source; Engram rows are recomputed from the list
    that is left (they are the same numbers, since primes are handed out in list order); the drafts tap the last layers
    that exist. Sources stand before their users, so no remaining layer loses one.
    """
    if not 1 <= layers <= config.num_hidden_layers:
        raise ConfigError("preset", [f"layers = {layers} must be in 1..{config.num_hidden_layers}"])

    def below(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i for i in ids if i < layers)

    changes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "kv_source_layer_ids": below(config.kv_source_layer_ids),
        "index_source_layer_ids": below(config.index_source_layer_ids),
        "engram_layer_ids": below(config.engram_layer_ids),
    }
    if config.candidate_source_layer_id >= layers:
        changes |= {"candidate_source_layer_id": -1, "candidate_topk_blocks": 0, "candidate_block_size": 0}
    kept = len(changes["engram_layer_ids"])
    changes["engram_num_embeddings"] = _rows(config, config.engram_vocab_size, kept)
    if not kept:
        changes |= {f.name: f.default for f in dataclasses.fields(config) if f.name.startswith("engram_")}
    stages = config.num_drafts if drafts else 0
    changes |= {"num_nextn_predict_layers": stages, "compress_ratios": config.compress_ratios[:layers] + (0,) * stages}
    if stages:
        taps = min(len(config.dspark_target_layer_ids), layers)
        changes["dspark_target_layer_ids"] = tuple(range(layers - taps, layers))
    else:
        changes |= {f.name: f.default for f in dataclasses.fields(config) if f.name.startswith("dspark_")}
    return dataclasses.replace(config, **changes)
