"""`deepinfer make-checkpoint`: a random checkpoint in the official layout, for tests and for timing without the
weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer.model.presets import preset as named_preset
from deepinfer.model.random_checkpoint import GIB, write_random_checkpoint

# Prime search start of a flash checkpoint unless asked otherwise: 24 columns x about 100,000 rows x 264 B = 0.6 GiB a
# table, far beyond any cache, where the released 16,000,000 gives 94 GiB.
SMALL_ENGRAM = 100_000


def make_checkpoint(
    out: Annotated[Path, typer.Argument(help="Directory to write; must be new or empty.", show_default=False)],
    preset: Annotated[
        str, typer.Option(help="`tiny`: every mechanism, milliseconds on a CPU. `flash`: the released shapes.")
    ] = "tiny",
    layers: Annotated[
        int | None,
        typer.Option(help="Keep the first N layers, each in its role. Default: all.", show_default=False, min=1),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(help="Keep N routed experts per layer. Default: all (384 in flash).", show_default=False, min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed and shape give the same bytes.", min=0)] = 0,
    drafts: Annotated[bool, typer.Option("--drafts/--no-drafts", help="Include the DSpark stages (mtp.*).")] = False,
    vision: Annotated[bool, typer.Option("--vision/--no-vision", help="Include the picture encoder.")] = False,
    engram_vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Start of the prime search: rows per hash column of the Engram tables. flash uses 100000 unless set; "
            "16000000 is the released value and makes 94 GiB a table.",
            show_default=False,
            min=2,
        ),
    ] = None,
    shard_gib: Annotated[float, typer.Option(help="Largest safetensors file, in GiB.", min=0.001)] = 5.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Write a checkpoint with random weights, a matching tokenizer and config.json in the official layout.

    Tensors are streamed to disk, so memory stays small whatever the size; the free disk space is checked first.
    """
    if engram_vocab_size is None and preset == "flash":
        engram_vocab_size = SMALL_ENGRAM
    config = named_preset(
        preset, layers=layers, experts=experts, drafts=drafts, vision=vision, engram_vocab_size=engram_vocab_size
    )
    size = write_random_checkpoint(out, config, seed=seed, shard_bytes=int(shard_gib * GIB), progress=not quiet)
    rows = [f"layer {n}: {r:,}" for n, r in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)]
    typer.echo(f"{out}: {preset}, {config.num_hidden_layers} layers, {size:,} bytes of weights, seed {seed}")
    typer.echo(f"Engram table rows: {', '.join(rows) or 'no Engram layer'}")
