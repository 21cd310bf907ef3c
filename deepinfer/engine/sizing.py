"""How many cache blocks an engine takes, and how long its context may then be."""

import torch

from deepinfer.config import BLOCK_SIZE, EngineConfig, blocks_for
from deepinfer.model.config import ModelConfig

CPU_SHARE = 0.25  # of the machine's free memory: the rest is the user's, and other programs run beside us


def block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one cache block: per KV source, 128 / ratio entries of compressed KV and index key in `dtype`."""
    per_entry = (config.head_dim + config.index_head_dim) * dtype.itemsize
    return sum(BLOCK_SIZE // config.ratio(layer) * per_entry for layer in config.kv_source_layer_ids)


def slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that a sequence takes whatever its length: the window rings of all layers, and the open rows (a value and a
    gate in float32) of the ratio-2 sources."""
    rings = config.num_hidden_layers * config.sliding_window * config.head_dim * dtype.itemsize
    pairs = sum(config.ratio(layer) == 2 for layer in config.kv_source_layer_ids)
    return rings + pairs * 2 * config.head_dim * torch.float32.itemsize


def memory_for_blocks(free: int, total: int, device_type: str, gpu_memory_utilization: float) -> int:
    """Bytes that the block pool may take, after the weights are loaded.

    On a GPU: what is left up to gpu_memory_utilization of the whole. On a CPU: a fixed share of what is free.
    """
    if device_type == "cpu":
        return int(free * CPU_SHARE)
    return max(0, int(total * gpu_memory_utilization) - (total - free))


def fit(
    *,
    context: int,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    bytes_per_block: int,
    memory: int,
    bytes_per_slot: int = 0,
    num_blocks: int | None = None,
    seed: int | None = None,
) -> EngineConfig:
    """An EngineConfig that fits into `memory` bytes.

    context: the model's longest sequence. max_model_len None: as long as model and memory allow. num_blocks None: all
    max_num_seqs sequences at full length if that fits, else as many blocks as fit. ValueError with the nearest setting
    that works.
    """
    if max_model_len is not None and max_model_len > context:
        raise ValueError(f"max_model_len: {max_model_len} is more than the model's {context} positions")
    if bytes_per_slot * max_num_seqs > memory:
        raise ValueError(
            f"max_num_seqs: {max_num_seqs} sequences need {bytes_per_slot * max_num_seqs:,} bytes for their windows, "
            f"{memory:,} are free for the cache; at most {memory // bytes_per_slot} fit"
        )
    most = (memory - bytes_per_slot * max_num_seqs) // max(bytes_per_block, 1)
    if num_blocks is not None and num_blocks > most:
        raise ValueError(
            f"num_blocks: {num_blocks} blocks of {bytes_per_block:,} bytes do not fit into the memory for the cache; "
            f"at most {most} do"
        )
    if num_blocks is None:
        if most < 1:
            raise ValueError(f"no memory for the cache: {memory} bytes are left and one block takes {bytes_per_block}")
        wished = max_num_seqs * blocks_for(max_model_len or context)
        num_blocks = min(wished, most)
    if max_model_len is None:
        max_model_len = min(context, num_blocks * BLOCK_SIZE)
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        seed=seed,
    )
