"""The sums behind every published limit: no matrix is forgotten, no position is counted wrongly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from shapes import Shape, cpu_shapes
from step_cost import expected_experts, step_cost

from deepinfer.cache import Cache
from deepinfer.model import Chunk, load_model
from deepinfer.model.config import ModelConfig
from deepinfer.model.presets import preset
from deepinfer.model.tensors import tensor_specs

by_shape = pytest.mark.parametrize("shape", cpu_shapes(), ids=str)


def matrix_elements(config: ModelConfig) -> int:
    """Elements of every matrix of the checkpoint that is multiplied with, by the official inventory."""
    found = 0
    for name, spec in tensor_specs(config).items():
        looked_up = spec.kind == "engram_table" or name == "embed.weight"
        product = (name.endswith(".weight") and len(spec.shape) == 2) or name.endswith("_fn")
        if spec.group == "text" and product and not looked_up:
            found += math.prod(spec.shape) * (2 if spec.dtype == "I8" else 1)  # two FP4 codes a byte
    return found


@pytest.mark.parametrize("name", ["tiny", "flash"])
def test_the_sum_holds_every_matrix_of_the_checkpoint_once(name: str) -> None:
    config = preset(name)
    cost = step_cost(config, Shape("decode", 1, 500, 1), experts_hit=config.n_routed_experts)
    assert sum(product.weights for product in cost.products) == matrix_elements(config)


@by_shape
def test_context_work_equals_a_count_position_by_position(shape: Shape) -> None:
    config = preset("tiny")
    cost = step_cost(config, shape)
    got = sum(product.flops for product in cost.products if not product.is_weight)
    expected = 0
    for layer in range(config.num_hidden_layers):
        for position in range(shape.context, shape.context + shape.new):
            visible = (position + 1) // config.ratio(layer) if config.ratio(layer) else 0
            keys = min(position + 1, config.sliding_window) + min(visible, config.index_topk)
            expected += 4 * config.num_attention_heads * config.head_dim * keys
            if config.owns_index(layer):
                if config.is_candidate_user(layer):
                    visible = min(visible, config.candidate_topk_blocks * config.candidate_block_size)
                expected += 2 * config.index_n_heads * config.index_head_dim * visible
    assert got == pytest.approx(expected * shape.batch, rel=0.01)  # means are rounded up to whole keys


@by_shape
def test_a_step_hits_no_more_experts_than_there_are_or_than_it_chooses(shape: Shape) -> None:
    config = preset("tiny")
    hit = expected_experts(config, shape.rows)
    assert config.num_experts_per_tok <= hit <= min(config.n_routed_experts, shape.rows * config.num_experts_per_tok)
    routed = next(product for product in step_cost(config, shape).products if product.name == "routed experts, up")
    assert routed.batch == hit
    assert routed.m * hit == pytest.approx(shape.rows * config.num_experts_per_tok, rel=0.3)  # whole rows per expert


def test_bytes_follow_the_form_of_the_weights_and_the_context() -> None:
    config = preset("tiny")
    short, far = (step_cost(config, Shape("decode", 1, context, 1)) for context in (64, 4096))
    assert short.bytes(4) > 1.8 * short.bytes(2)
    assert far.kv_bytes > short.kv_bytes
    assert step_cost(config, Shape("decode", 8, 64, 1)).kv_bytes == 8 * short.kv_bytes


@pytest.mark.parametrize("shape", cpu_shapes(prefill=600, context=200), ids=str)
def test_logits_at_the_timed_shapes_are_those_of_each_sequence_alone(tiny_checkpoint: Path, shape: Shape) -> None:
    model = load_model(tiny_checkpoint)
    total = shape.context + shape.new
    cache = Cache.for_model(model, max_num_seqs=shape.batch, num_blocks=shape.batch * Cache.blocks_for(total))
    chunks = []
    for number in range(shape.batch):
        ids = [3 + (position * (2 * number + 3)) % 400 for position in range(total)]
        slot = cache.open()
        cache.reserve(slot, total)
        if shape.context:
            model.forward([Chunk(slot, 0, ids[: shape.context], 0)], cache)
        chunks.append(Chunk(slot, shape.context, ids[shape.context :]))
    logits = model.forward(chunks, cache)
    for number in {0, shape.batch - 1}:
        alone = Cache.for_model(model, max_num_seqs=1, num_blocks=Cache.blocks_for(total))
        slot = alone.open()
        alone.reserve(slot, total)
        step = 3 * 67
        ids = [3 + (position * (2 * number + 3)) % 400 for position in range(total)]
        for start in range(0, total, step):
            (last,) = model.forward([Chunk(slot, start, ids[start : start + step])], alone)
        assert (last - logits[number]).abs().max() <= 1e-5 * logits.abs().max()
