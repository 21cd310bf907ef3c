"""Write a random checkpoint in the official layout: config.json, tokenizer.json, safetensors shards and their index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tqdm import tqdm

from deepinfer.model.config import ModelConfig
from deepinfer.model.random_values import RandomValues
from deepinfer.model.safetensors_writer import plan_shards, write_shards
from deepinfer.model.tensors import tensor_specs
from deepinfer.model.tokenizer_writer import control_tokens, write_tokenizer

GIB = 1 << 30
MARGIN = 64 << 20  # headers, index and tokenizer: 96,085 tensors need about 20 MB of JSON in all


class OutputError(ValueError):
    """The output directory cannot take the checkpoint."""


def write_random_checkpoint(
    directory: str | Path, config: ModelConfig, *, seed: int = 0, shard_bytes: int = 5 * GIB, progress: bool = False
) -> int:
    """Write a checkpoint of `config` with random weights; returns its payload bytes.

    The same config and seed give the same bytes. Memory stays below about 100 MB plus torch, whatever the size.
    Raises OutputError for a non-empty directory or too little free disk, before anything is written; ConfigError if no
    synthetic tokenizer fits the config.
    """
    directory = Path(directory)
    specs = tensor_specs(config)
    total = sum(spec.nbytes for spec in specs.values())
    _check_output(directory, total, config)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.to_dict(), indent=1)
    write_tokenizer(directory, config)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    silent = tuple(sorted({0, 1, 2, *control_tokens(config.vocab_size)}))
    values = RandomValues(config, seed, silent)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Writing", disable=not progress) as bar:
        write_shards(directory, plan_shards(specs.values(), shard_bytes), values.chunks, bar.update)
    return total


def _check_output(directory: Path, total: int, config: ModelConfig) -> None:
    if directory.exists() and not directory.is_dir():
        raise OutputError(f"{directory} is a file; name a new or empty directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise OutputError(f"{directory} is not empty; name a new directory, or delete this one first")
    parent = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if total + MARGIN > free:
        rows = [
            f"layer {n}: {r * (config.engram_head_dim * 33 // 32) / GIB:.1f} GiB"
            for n, r in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
        ]
        tables = f" Engram tables take {', '.join(rows)}; a smaller --engram-vocab-size shrinks them." if rows else ""
        raise OutputError(
            f"the checkpoint needs {(total + MARGIN) / GIB:.1f} GiB, {parent} has {free / GIB:.1f} GiB free.{tables} "
            "Fewer --layers or --experts also make it smaller"
        )
