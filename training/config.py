"""Model configuration: the fields of a released-layout config.json, and the constants derived from them."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class NanoConfig:
    """Text backbone hyperparameters, named as in `text_config` of the checkpoint layout."""

    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 10
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 128
    qk_rope_head_dim: int = 32
    q_lora_rank: int = 128
    o_groups: int = 2
    o_lora_rank: int = 128
    moe_intermediate_size: int = 192
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    sliding_window: int = 128
    max_position_embeddings: int = 4096
    rope_theta: float = 10000
    compress_rope_theta: float = 40000
    rope_scaling: dict[str, Any] = field(
        default_factory=lambda: {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 1024,
        }
    )
    compress_ratios: list[int] = field(default_factory=lambda: [0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0])
    kv_source_layer_ids: list[int] = field(default_factory=lambda: [1, 3, 5])
    index_source_layer_ids: list[int] = field(default_factory=lambda: [1, 3, 5, 7])
    index_n_heads: int = 8
    index_head_dim: int = 64
    index_topk: int = 96
    candidate_source_layer_id: int = 5
    candidate_topk_blocks: int = 64
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: list[int] = field(default_factory=lambda: [1, 3])
    engram_num_embeddings: list[int] = field(default_factory=list)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 6400
    engram_n_heads: int = 4
    engram_head_dim: int = 32
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0  # draft stages; the backbone is trained and exported without (see draft_export)
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: list[int] = field(default_factory=lambda: [7, 8, 9])
    dspark_markov_rank: int = 48
    dspark_n_routed_experts: int = 4
    dspark_num_experts_per_tok: int = 2
    image_token_id: int = -1

    # ------------------------------------------------------------------ layer roles

    def ratio(self, layer: int) -> int:
        """Compression ratio of the cache that `layer` reads; 0 means window only."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int:
        """Layer whose compressed KV `layer` reads."""
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def index_source(self, layer: int) -> int:
        """Layer whose top-k selection `layer` uses."""
        return max(s for s in self.index_source_layer_ids if s <= layer)

    # ------------------------------------------------------------------ derived tables

    def engram_primes(self) -> list[np.ndarray]:
        """Bucket counts of each Engram layer, [orders, heads] int64; a prime is used once over all layers."""
        layers, candidate = [], self.engram_vocab_size
        for _ in self.engram_layer_ids:
            primes = np.empty((self.engram_max_ngram_size - 1, self.engram_n_heads), dtype=np.int64)
            for index in np.ndindex(*primes.shape):
                while not _is_prime(candidate):
                    candidate += 1
                primes[index] = candidate
                candidate += 1
            layers.append(primes)
        return layers

    def engram_multipliers(self) -> list[np.ndarray]:
        """Odd hash multipliers of each Engram layer, [max_ngram] int64; product with any compressed id fits int63."""
        bound = ((2**63 - 1) // max(self.engram_compressed_vocab_size, 1)) // 2
        draws = [
            np.random.default_rng(10007 * layer).integers(0, bound, size=self.engram_max_ngram_size, dtype=np.int64)
            for layer in self.engram_layer_ids
        ]
        return [2 * draw + 1 for draw in draws]

    def rope_frequencies(self, compressed: bool) -> np.ndarray:
        """Rotation frequencies [qk_rope_head_dim / 2] float32; layers with a ratio use the other base plus YaRN."""
        dim = self.qk_rope_head_dim
        exponent = np.arange(0, dim, 2, dtype=np.float64) / dim
        if not compressed:
            return (1.0 / self.rope_theta**exponent).astype(np.float32)
        base, scaling = self.compress_rope_theta, self.rope_scaling
        freq = 1.0 / base**exponent

        def dim_of(rotations: float) -> float:
            length = scaling["original_max_position_embeddings"]
            return dim * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(base))

        low = max(math.floor(dim_of(scaling["beta_fast"])), 0)
        high = min(math.ceil(dim_of(scaling["beta_slow"])), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        return (freq * (1 - ramp) + freq / scaling["factor"] * ramp).astype(np.float32)

    # ------------------------------------------------------------------ files

    @classmethod
    def load(cls, path: str | Path) -> NanoConfig:
        """Reads a released-layout config.json (or a folder holding one)."""
        path = Path(path)
        root = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        names = {f.name for f in dataclasses.fields(cls)}
        values = {key: value for key, value in root["text_config"].items() if key in names}
        values["image_token_id"] = root.get("image_token_id", -1)
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The config.json tree of the released layout."""
        text = dataclasses.asdict(self)
        image = text.pop("image_token_id")
        text |= {
            "model_type": "deepseek_v41_text",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
        }
        return {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "image_token_id": image,
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "scale_fmt": "ue8m0",
                "expert_dtype": "fp4",
            },
            "text_config": text,
        }


def nano(tokenizer_dir: str | Path) -> NanoConfig:
    """The bundled model's configuration for the tokenizer in `tokenizer_dir`."""
    from training.tokenizer import IMAGE, NOISE, load_tokenizer, token_map

    tokenizer = load_tokenizer(tokenizer_dir)
    config = NanoConfig(
        vocab_size=tokenizer.get_vocab_size(),
        engram_compressed_vocab_size=int(token_map(tokenizer).max()) + 1,
        dspark_noise_token_id=tokenizer.token_to_id(NOISE),
        image_token_id=tokenizer.token_to_id(IMAGE),
    )
    config.engram_num_embeddings = [int(p.sum()) for p in config.engram_primes()]
    return config


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))
