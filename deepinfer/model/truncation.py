"""Decoder truncation: what a model and a keep set must be like (spec/engine.md 3.8).

In prefill, layers after the last KV source and the asking part of that layer run on the last rows of a prompt only: all
that later tokens read of the others are keys, and those come from the layers before. The windows of the last layers
then begin at the first kept row, which is what makes it an approximation.
"""

from __future__ import annotations

from deepinfer.config import VERIFY_ROWS
from deepinfer.model.config import ModelConfig


def least_keep_tokens(config: ModelConfig) -> int:
    """Rows to keep at least: a whole window and what one verify step may take back are valid when decoding begins."""
    return config.sliding_window + VERIFY_ROWS


def truncation_problem(config: ModelConfig, keep_tokens: int | None = None) -> str | None:
    """Why prefill of this model cannot be truncated to `keep_tokens` rows (None: whatever their number), with the
    nearest setting that works; None if it can."""
    problem = config.narrowing_obstacle()
    last = max(config.kv_source_layer_ids, default=-1)
    if problem is None and last in config.engram_layer_ids:
        problem = f"an Engram layer stands at the last KV source, layer {last}"
    if problem is not None:
        return f"truncation: {problem}; use truncation off"
    least = least_keep_tokens(config)
    if keep_tokens is not None and keep_tokens < least:
        return (
            f"keep_tokens: {keep_tokens} rows are fewer than the window of {config.sliding_window} and the "
            f"{VERIFY_ROWS} rows of a verify step; use keep_tokens >= {least}"
        )
    return None
