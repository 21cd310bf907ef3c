"""Picks the implementation of an operation by device, dtype and shape. The reference is always there and always right.

The CPU twins (`kernels/cpu`) serve float32 on a CPU where a C++ compiler is found, the GPU twins (`kernels/triton`)
bfloat16 on a Hopper GPU with weights in the form "gpu"; everything else runs the reference, shapes that a kernel does
not take among it.
"""

from __future__ import annotations

from deepinfer.kernels.select.attention import (
    MOST_UNPACKED,
    PagedKeys,
    attention_over_unpacked,
    candidate_mask,
    choose_entries,
    index_scores,
    sparse_attention,
    top_entries,
    unpack_entries,
    unpacks_keys,
    will_unpack,
)
from deepinfer.kernels.select.backends import (
    cpu_twins,
    explain,
    gpu_twins,
    interpreted_gpu,
    reference_only,
    step_threads,
)
from deepinfer.kernels.select.mixture import (
    expert_sum,
    moe,
)
from deepinfer.kernels.select.places import (
    block_rows,
    commit_windows,
    copy_rows,
    entry_rows,
    pages_keys,
    put_compressed,
    put_key_pages,
    put_windows,
    token_history,
    window_rows,
)
from deepinfer.kernels.select.projections import (
    apply_rope,
    folds_rows,
    grouped_output,
    in_split_order,
    project,
    project_groups,
    project_memory,
    project_wide,
    query_and_window,
    rms_norm,
    window_latents,
)
from deepinfer.kernels.select.shapes import (
    attends,
    mixes,
    rounds_records,
    shuffles_experts,
    splits_heads,
)
from deepinfer.kernels.select.streams import (
    compress_pairs,
    engram_inject,
    hyper_collapse,
    hyper_collapse_norm,
    hyper_expand,
    hyper_step,
    ngram_rows,
    table_rows,
)
from deepinfer.kernels.select.tokens import (
    constrain_rows,
    log_probabilities,
    markov_chain,
)

__all__ = [
    "MOST_UNPACKED",
    "PagedKeys",
    "apply_rope",
    "attends",
    "attention_over_unpacked",
    "block_rows",
    "candidate_mask",
    "choose_entries",
    "commit_windows",
    "compress_pairs",
    "constrain_rows",
    "copy_rows",
    "cpu_twins",
    "engram_inject",
    "entry_rows",
    "expert_sum",
    "explain",
    "folds_rows",
    "gpu_twins",
    "grouped_output",
    "hyper_collapse",
    "hyper_collapse_norm",
    "hyper_expand",
    "hyper_step",
    "in_split_order",
    "index_scores",
    "interpreted_gpu",
    "log_probabilities",
    "markov_chain",
    "mixes",
    "moe",
    "ngram_rows",
    "pages_keys",
    "project",
    "project_groups",
    "project_memory",
    "project_wide",
    "put_compressed",
    "put_key_pages",
    "put_windows",
    "query_and_window",
    "reference_only",
    "rms_norm",
    "rounds_records",
    "shuffles_experts",
    "sparse_attention",
    "splits_heads",
    "step_threads",
    "table_rows",
    "token_history",
    "top_entries",
    "unpack_entries",
    "unpacks_keys",
    "will_unpack",
    "window_latents",
    "window_rows",
]
