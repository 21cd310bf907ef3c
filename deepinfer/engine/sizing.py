"""How much memory the cache takes: blocks and slots beside the model, windows and preempted sequences in host memory;
and how long the context may then be."""

from typing import Any, NamedTuple

from deepinfer.config import BLOCK_SIZE, EngineConfig, blocks_for

CPU_SHARE = 0.25  # of the machine's free memory: the rest is the user's, and other programs run beside us
WINDOW_SHARE = 1 / 8  # of the cache's memory on a CPU: a window is small beside the blocks of the prefix it completes
WIDE_SHARE = 1 / 16  # of what is left for the cache of a GPU, for weights that are kept twice
WIDE_ROWS = 96  # from here on steps read them (`triton/grouped_output.py`)
HOST_SHARE = 1 / 16  # of free host memory beside a GPU, for windows and for preempted sequences each


class CacheMemory(NamedTuple):
    """Bytes, before the exact number of blocks is known."""

    blocks: int  # blocks, slots and what a step stages, on the device
    windows: int  # at most, on the host
    offload: int  # at most, on the host


def divide_memory(
    *,
    device_free: int,
    device_total: int,
    host_free: int,
    device_type: str,
    gpu_memory_utilization: float,
    window_store_bytes: int | None,
    offload_bytes: int | None,
) -> CacheMemory:
    """What each part of the cache may take once the weights are loaded; None = a share.

    On a GPU the blocks get what is left up to gpu_memory_utilization of the whole, and the rest of the cache is in host
    memory. On a CPU all of it shares CPU_SHARE of the free memory; there, blocks are worth as much as the memory for
    preempted sequences, which therefore gets none unless asked for. ValueError naming the argument that is too much.
    """
    if device_type == "cpu":
        everything = int(host_free * CPU_SHARE)
        windows = int(everything * WINDOW_SHARE) if window_store_bytes is None else window_store_bytes
        offload = offload_bytes or 0
        limit, blocks = everything, everything - windows - offload
    else:
        windows = int(host_free * HOST_SHARE) if window_store_bytes is None else window_store_bytes
        offload = int(host_free * HOST_SHARE) if offload_bytes is None else offload_bytes
        limit = host_free
        blocks = max(0, int(device_total * gpu_memory_utilization) - (device_total - device_free))
    if windows + offload > limit:
        name = "window_store_bytes" if windows > offload else "offload_bytes"
        other = offload if name == "window_store_bytes" else windows
        raise ValueError(
            f"{name}: {max(windows, offload):,} bytes do not fit into the {limit:,} of host memory that the cache may "
            f"take; use at most {max(0, limit - other):,}"
        )
    return CacheMemory(blocks, windows, offload)


def keeps_wide_outputs(*, wished: bool | None, size: int, free: int, rows: int) -> bool:
    """Whether a second copy of some weights, `size` bytes, is kept (EngineArguments.wide_outputs). free: bytes for the
    cache once all else is loaded; rows: of the largest step of decoding. ValueError where it is wished and does not
    fit."""
    if wished and size > free:
        raise ValueError(
            f"wide_outputs: the copies take {size:,} bytes, and {max(0, free):,} are left beside the weights; leave "
            "wide_outputs out to keep them only where there is room, or raise gpu_memory_utilization"
        )
    return wished if wished is not None else size > 0 and rows >= WIDE_ROWS and size <= free * WIDE_SHARE


def fit(
    *,
    context: int,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    bytes_per_block: int,
    memory: int,
    bytes_per_slot: int = 0,
    bytes_per_step_token: int = 0,
    draft_rows_per_seq: int = 0,
    num_blocks: int | None = None,
    bytes_per_window: int = 0,
    window_memory: int = 0,
    **others: Any,
) -> EngineConfig:
    """An EngineConfig that fits into `memory` bytes for blocks, slots and what a step stages, and `window_memory` bytes
    for windows.

    context: the model's longest sequence. max_model_len None: as long as model and memory allow. num_blocks None: all
    max_num_seqs sequences at full length if that fits, else as many blocks as fit. bytes_per_step_token: what each of
    the max_num_batched_tokens stages, or each of the draft_rows_per_seq of all sequences where that is more.
    bytes_per_window 0: no windows are kept. others: further fields of EngineConfig.
    ValueError with the nearest setting that works.
    """
    if max_model_len is not None and max_model_len > context:
        raise ValueError(f"max_model_len: {max_model_len} is more than the model's {context} positions")
    draft_rows = draft_rows_per_seq * max_num_seqs
    if bytes_per_step_token * draft_rows > memory:
        raise ValueError(
            f"max_num_seqs: {max_num_seqs} sequences need {bytes_per_step_token * draft_rows:,} bytes to stage their "
            f"drafts, {memory:,} are free for the cache; at most "
            f"{memory // (bytes_per_step_token * draft_rows_per_seq)} fit, or use nextn=0"
        )
    staged = bytes_per_step_token * max(max_num_batched_tokens, draft_rows)
    if staged > memory:
        raise ValueError(
            f"max_num_batched_tokens: {max_num_batched_tokens} tokens per step need {staged:,} bytes to stage their "
            f"window records, {memory:,} are free for the cache; at most {memory // bytes_per_step_token} fit"
        )
    memory -= staged
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
    # a window is of use while the block before it is there, so more windows than blocks are never found
    entries = min(window_memory // bytes_per_window, num_blocks) if bytes_per_window else 0
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        window_entries=entries,
        **others,
    )
