"""Flags that several subcommands share. The underscore spellings of all of them work too (cli/__init__.py)."""

from typing import Annotated, Any

import typer

from deepinfer.config import PREFIX_MODES

ENGINE = "Engine"
SAMPLING = "Sampling"
STOPPING = "Stopping"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "--model-name",
        help="Directory in the Hugging Face layout, hub id, or nano. Default: DEEPINFER_HF_MODEL_DIR, or nano.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Key of the server; other users of this machine can read it here, so rather set DEEPINFER_API_KEY."
    ),
]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.", rich_help_panel=ENGINE)]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32: exact. bfloat16: the release's own rounding. auto: float32 on a CPU, else bfloat16.",
        rich_help_panel=ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Longest prompt plus output in tokens; default: what the model and memory allow.",
                 rich_help_panel=ENGINE),
]  # fmt: skip
MaxNumSeqs = Annotated[
    int, typer.Option(help="Sequences computed at once; more need more cache.", rich_help_panel=ENGINE)
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(help="Tokens computed per step; longer prompts are cut into chunks of this size.",
                 rich_help_panel=ENGINE),
]  # fmt: skip
GpuMemoryUtilization = Annotated[
    float, typer.Option(help="Share of a GPU's memory for weights and cache together.", rich_help_panel=ENGINE)
]
WideOutputs = Annotated[
    bool | None,
    typer.Option(
        "--wide-outputs/--no-wide-outputs",
        help="Keep the first output projection in bfloat16 beside FP8 on a GPU: 64 MiB a layer of the released model, "
        "for faster steps of 96 rows and more. Default: where such steps may come and there is room.",
        rich_help_panel=ENGINE,
    ),
]
ExpertCache = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Keep the experts in the order of the GPU kernels in this directory, as many bytes as they have: later "
        "loads read them there and need not lay them out.",
        rich_help_panel=ENGINE,
    ),
]
PrefixMode = Annotated[
    str,
    typer.Option(
        help="How what prompts have in common is computed once. exact: the tokens of a cold run. bounded: less is "
        "computed again after a hit, not exact. off: every prompt is computed whole.",
        rich_help_panel=ENGINE,
    ),
]
KvFormat = Annotated[
    str,
    typer.Option(
        help="How the cache stores its records: float32, bfloat16, packed (a tenth of float32; only with dtype "
        "bfloat16, whose values it holds without loss), or hopper (the same for the kernels of a Hopper GPU). auto: "
        "with bfloat16 hopper on such a GPU and packed elsewhere, else float32.",
        rich_help_panel=ENGINE,
    ),
]
Truncation = Annotated[
    str | None,
    typer.Option(
        "--yoco-truncation",
        help="compact runs the second half of the model on the last tokens of a prompt only: faster, not exact. off: "
        "on all of them. Default: DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE, or off.",
        rich_help_panel=ENGINE,
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="Prepare the next step while one runs; same tokens. Default: on a GPU.",
        rich_help_panel=ENGINE,
    ),
]
Nextn = Annotated[
    int | None,
    typer.Option(
        "--nextn",
        help="Tokens drafted and verified per step at most, 0 to 5; 0 = no drafting. More tokens per second, the same "
        "tokens for a given seed. Default: DEEPINFER_USE_NEXTN_DECODE, or 5 where the checkpoint has draft stages.",
        rich_help_panel=ENGINE,
    ),
]
MtpVarlen = Annotated[
    bool | None,
    typer.Option(
        "--mtp-varlen/--no-mtp-varlen",
        help="Verify as many drafts as their confidence and the measured cost of a step let pay off, or always all. "
        "Changes speed only. Default: DEEPINFER_ENABLE_MTP_VARLEN, or on.",
        rich_help_panel=ENGINE,
    ),
]
BatchInvariant = Annotated[
    bool | None,
    typer.Option(
        "--batch-invariant/--no-batch-invariant",
        help="Promise the same bits for a request alone and in any company; refused where an operator cannot keep it. "
        "Default: DEEPINFER_BATCH_INVARIANT, or off.",
        rich_help_panel=ENGINE,
    ),
]
Ep = Annotated[int, typer.Option(help="Ranks that share the experts; only 1 is built.", rich_help_panel=ENGINE)]
Dp = Annotated[int | None, typer.Option(help="Data-parallel ranks; only 1 is built.", rich_help_panel=ENGINE)]
Cp = Annotated[int, typer.Option(help="Ranks that split a long prompt; only 1 is built.", rich_help_panel=ENGINE)]
DisableEplb = Annotated[
    bool,
    typer.Option("--disable-eplb", help="No re-balancing of experts; with one rank there is none anyway.",
                 rich_help_panel=ENGINE),
]  # fmt: skip
Temperature = Annotated[
    float,
    typer.Option(help="0 takes the most likely token; higher values spread the choice.", rich_help_panel=SAMPLING),
]
TopK = Annotated[int, typer.Option(help="Choose among the k most likely tokens; 0 = all.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float,
    typer.Option(help="Choose among the fewest tokens whose probabilities sum to this; 1 = all.",
                 rich_help_panel=SAMPLING),
]  # fmt: skip
MinP = Annotated[
    float,
    typer.Option(help="Drop tokens less likely than this fraction of the most likely one; 0 = none.",
                 rich_help_panel=SAMPLING),
]  # fmt: skip
Seed = Annotated[
    int | None,
    typer.Option("--seed", "--seq-seed", help="Seed of every prompt's random stream; the same seed repeats its tokens.",
                 rich_help_panel=SAMPLING),
]  # fmt: skip
MaxTokens = Annotated[int, typer.Option(help="Longest output in tokens.", rich_help_panel=STOPPING)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


def prefix_caching(mode: str) -> dict[str, Any]:
    """The arguments of LLM for a value of --prefix-mode. ValueError for an unknown word."""
    if mode not in PREFIX_MODES:
        raise ValueError(f"prefix_mode: {mode!r} is not one of {', '.join(PREFIX_MODES)}")
    return {"enable_prefix_caching": mode != "off"} | ({} if mode == "off" else {"prefix_mode": mode})
