"""The shape of a DeepSeek-V4.1 checkpoint: config.json as one frozen dataclass.

Every field of the file is obeyed or refused by name. A field that has one supported value (FIXED_*) is checked and not
stored; a field that this engine does not know is an error, because silently ignoring it could change every logit.
All problems of a file are listed in one ConfigError. The constraints between fields live in config_rules.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.model.config_section import ConfigError, Section
from deepinfer.model.primes import engram_primes

# Fields with exactly one supported value. Absent means that value.
FIXED_ROOT: dict[str, Any] = {"model_type": "deepseek_v41", "tie_word_embeddings": False}
FIXED_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
}
FIXED_VISION: dict[str, Any] = {"model_type": "deepseek_v41_vision"}
FIXED_ROPE: dict[str, Any] = {"rope_type": "yarn"}
FIXED_QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
# Fields that change nothing at inference, with the Python types that they may have.
HARMLESS_ROOT: dict[str, tuple[type, ...]] = {
    "architectures": (list,),
    "dtype": (str,),
    "torch_dtype": (str,),
    "transformers_version": (str,),
    "use_cache": (bool,),
}
HARMLESS_TEXT: dict[str, tuple[type, ...]] = {
    "dtype": (str,),
    "torch_dtype": (str,),
    "transformers_version": (str,),
    "use_cache": (bool,),
    "initializer_range": (int, float),
    "architectures": (list, type(None)),
}
TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")  # stand at the root of the file


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers with ratio > 0 (model.md 2.0); ratio-0 layers use none."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class QuantizationConfig:
    """The one supported storage format: FP8 e4m3 with E8M0 scales per 32x32 tile, experts packed FP4 (model.md 3.1)."""

    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, int] = (32, 32)
    scale_fmt: str = "ue8m0"
    expert_dtype: str = "fp4"


@dataclass(frozen=True)
class VisionConfig:
    """The picture encoder (vision.md 1). Its norm eps is 1e-6 and stands in no file."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class ModelConfig:
    """Text fields under their file names, flattened, with vision and quantisation beside them.

    Raises ConfigError on construction if the fields contradict each other (config_rules.py).
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    sliding_window: int
    compress_ratios: tuple[int, ...]  # [num_hidden_layers + drafts]; the ratio of the cache that a layer reads
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    gate_temp: float = 1.0  # absent from the released file
    candidate_source_layer_id: int = -1  # -1 = no candidate filter
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()  # table rows, one per Engram layer
    engram_max_ngram_size: int = 0
    engram_vocab_size: int = 0  # where the prime search starts
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 0
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    vision: VisionConfig | None = None
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)

    def __post_init__(self) -> None:
        from deepinfer.model.config_rules import violations  # there, not here: the rules need the type

        problems = violations(self)
        if problems:
            raise ConfigError("ModelConfig", problems)

    # -- layer roles (model.md 1.4); layer num_hidden_layers + s is draft stage s --------------------------------------

    @property
    def num_drafts(self) -> int:
        """DSpark stages `mtp.0 ..`; 0 = the checkpoint has no draft model."""
        return self.num_nextn_predict_layers

    def layer_prefix(self, layer: int) -> str:
        """What the names of a layer's tensors begin with."""
        stage = layer - self.num_hidden_layers
        return f"layers.{layer}" if stage < 0 else f"mtp.{stage}"

    def expert_counts(self, layer: int) -> tuple[int, int]:
        """Routed experts of a layer, and how many of them a token uses."""
        if layer < self.num_hidden_layers:
            return self.n_routed_experts, self.num_experts_per_tok
        return self.dspark_n_routed_experts, self.dspark_num_experts_per_tok

    def ratio(self, layer: int) -> int:
        """Tokens per entry of the compressed cache that `layer` reads: 0 (window only), 1 or 2."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed KV `layer` reads (itself if it owns one); None for a window-only layer."""
        return _last_source(self.kv_source_layer_ids, layer) if self.ratio(layer) else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose top-k selection `layer` uses (itself if it runs an indexer); None for a window-only layer."""
        return _last_source(self.index_source_layer_ids, layer) if self.ratio(layer) else None

    def owns_kv(self, layer: int) -> bool:
        """True if `layer` has a compressor, and writes compressed KV and index keys."""
        return layer in self.kv_source_layer_ids

    def owns_index(self, layer: int) -> bool:
        """True if `layer` runs an indexer of its own."""
        return layer in self.index_source_layer_ids

    def is_candidate_user(self, layer: int) -> bool:
        """True if `layer` selects only inside the candidate blocks of the candidate source."""
        return self.owns_index(layer) and 0 <= self.candidate_source_layer_id < layer

    def engram_index(self, layer: int) -> int | None:
        """Position of `layer` in the Engram lists; None if no Engram is injected before it."""
        return self.engram_layer_ids.index(layer) if layer in self.engram_layer_ids else None

    # -- derived sizes -------------------------------------------------------------------------------------------------

    @property
    def engram_num_orders(self) -> int:
        """2-grams up to `engram_max_ngram_size`-grams: 3 orders for the released 4."""
        return max(self.engram_max_ngram_size - 1, 0)

    @property
    def engram_columns(self) -> int:
        """Table rows read per token and Engram layer: orders x heads (3 x 8 = 24 in the release)."""
        return self.engram_num_orders * self.engram_n_heads

    def engram_primes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Bucket counts `[engram layer][order][head]` (model.md 2.3)."""
        return engram_primes(
            len(self.engram_layer_ids), self.engram_num_orders, self.engram_n_heads, self.engram_vocab_size
        )

    def narrowing_obstacle(self) -> str | None:
        """Why the decoder half cannot be narrowed to the last tokens of a prompt (model.md 2.12); None if it can."""
        if not self.kv_source_layer_ids:
            return "kv_source_layer_ids is empty, so there is no decoder half"
        last = max(self.kv_source_layer_ids)
        if self.ratio(last) != 1:
            return f"the last KV source, layer {last}, has ratio {self.ratio(last)}; narrowing needs ratio 1"
        late = [layer for layer in self.engram_layer_ids if layer > last]
        return f"Engram layers {late} stand after the last KV source, layer {last}" if late else None

    # -- the file ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
        """Read the official nested layout. Raises ConfigError listing every unknown, missing, mistyped, unsupported or
        contradictory field; `source` names the file in the message."""
        problems: list[str] = []
        root = Section(mapping, "", problems)
        root.fixed(FIXED_ROOT)
        root.harmless(HARMLESS_ROOT)
        values: dict[str, Any] = {name: root.take(name, "int") for name in TOKEN_FIELDS}
        if (quantization := root.section("quantization_config")) is not None:
            quantization.fixed(FIXED_QUANTIZATION)
            quantization.finish()
        if (text := root.section("text_config")) is not None:
            text.fixed(FIXED_TEXT)
            text.harmless(HARMLESS_TEXT)
            for name in TOKEN_FIELDS:  # some writers repeat them in the text section: then they must agree
                if name in text.values and text.take(name, "int") != values[name]:
                    problems.append(
                        f"text_config.{name} = {text.values[name]!r} differs from the root's {values[name]!r}"
                    )
            if (rope := text.section("rope_scaling")) is not None:
                rope.fixed(FIXED_ROPE)
                values["rope_scaling"] = rope.build(RopeScaling)
            own = [
                f
                for f in dataclasses.fields(cls)
                if f.name not in (*TOKEN_FIELDS, "rope_scaling", "vision", "quantization")
            ]
            values.update(text.take_all(own))
            text.finish()
        if mapping.get("vision_config") is None:
            root.seen.add("vision_config")
        elif (vision := root.section("vision_config")) is not None:
            vision.fixed(FIXED_VISION)
            values["vision"] = vision.build(VisionConfig)
        root.finish()
        # A field that did not parse makes the constraints meaningless; otherwise they join the same list.
        if root.parsed:
            try:
                config = cls(**values)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(source, problems)
        return config

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read `<path>/config.json`. Raises ConfigError, also for a missing file or broken JSON."""
        file = Path(path) / "config.json"
        try:
            mapping = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(str(file), ["no such file; give a directory in the Hugging Face layout"]) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(str(file), [f"cannot be read: {error}"]) from None
        except json.JSONDecodeError as error:
            raise ConfigError(str(file), [f"is not valid JSON: {error}; download the file again"]) from None
        if not isinstance(mapping, dict):
            raise ConfigError(str(file), ["must hold a JSON object"])
        return cls.from_dict(mapping, source=str(file))

    def to_dict(self) -> dict[str, Any]:
        """The official nested layout, JSON-ready; `from_dict` of it gives an equal config."""
        plain = json.loads(json.dumps(dataclasses.asdict(self)))  # tuples become lists
        vision, _ = plain.pop("vision"), plain.pop("quantization")
        tokens = {name: plain.pop(name) for name in TOKEN_FIELDS}
        plain["rope_scaling"] = {**FIXED_ROPE, **plain["rope_scaling"]}
        if self.gate_temp == 1.0:
            del plain["gate_temp"]  # the released file does not carry it
        for prefix, present in (("dspark_", self.num_drafts), ("engram_", self.engram_layer_ids)):
            if not present:
                plain = {k: v for k, v in plain.items() if not k.startswith(prefix) or k == "engram_layer_ids"}
        root = {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": FIXED_ROOT["model_type"],
            "dtype": "bfloat16",
        }
        root |= {**tokens, "quantization_config": dict(FIXED_QUANTIZATION), "text_config": {**FIXED_TEXT, **plain}}
        if vision is not None:
            root["vision_config"] = {**FIXED_VISION, **vision}
        return root


def _last_source(sources: tuple[int, ...], layer: int) -> int | None:
    """The largest source id <= layer."""
    return max((source for source in sources if source <= layer), default=None)
