"""`deepinfer chat`: talk with the model in the terminal, streamed."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.cli import options

if TYPE_CHECKING:
    from deepinfer.chat.source import AnswerSource

SERVER = "A server that runs already"


def chat(
    model: options.Model = None,
    server: Annotated[
        str | None,
        typer.Option(help="Ask this server, as http://127.0.0.1:8000, instead of loading.", rich_help_panel=SERVER),
    ] = None,
    api_key: options.ApiKey = None,
    system: Annotated[str | None, typer.Option(help="System message that leads the conversation.")] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking/--no-thinking", help="Let the model reason before it answers.")
    ] = True,
    effort: Annotated[str, typer.Option(help="How much it reasons: low, high, max, or 1 to 100.")] = "high",
    tools: Annotated[
        Path | None,
        typer.Option(help="JSON file with a list of functions that it may call; you are asked for their results."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest output in tokens; default: what the context has room for.",
                     rich_help_panel=options.STOPPING),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the most likely token; default: the checkpoint's own.",
                     rich_help_panel=options.SAMPLING),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="Choose among the k most likely tokens; 0 = all.", rich_help_panel=options.SAMPLING),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Choose among the fewest tokens whose probabilities sum to this; default: the checkpoint's.",
                     rich_help_panel=options.SAMPLING),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens less likely than this fraction of the most likely one.",
                     rich_help_panel=options.SAMPLING),
    ] = None,
    seed: options.Seed = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    prefix_mode: options.PrefixMode = "exact",
    kv_format: options.KvFormat = "auto",
    yoco_truncation: options.Truncation = None,
    overlap: options.Overlap = None,
    nextn: options.Nextn = None,
    mtp_varlen: options.MtpVarlen = None,
    batch_invariant: options.BatchInvariant = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No settings on stderr, warnings alone.")] = False,
    debug: options.Debug = False,
) -> None:  # fmt: skip
    """Reads lines, streams answers: answers on stdout, all else on stderr."""
    from deepinfer.chat.screen import Screen
    from deepinfer.chat.session import Session, parse_effort, read_tools

    level = parse_effort(effort)
    if level is None:
        raise ValueError(f"effort: must be low, high, max, or a number from 1 to 100, got {effort!r}")
    declared = None if tools is None else read_tools(tools)
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }
    if server is not None:
        source = _remote(server, api_key, model)
    else:
        source = _local(
            model,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=1,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_format=kv_format,
            yoco_truncation=yoco_truncation,
            overlap=overlap,
            nextn=nextn,
            mtp_varlen=mtp_varlen,
            batch_invariant=batch_invariant,
            verbose=not quiet,
            **options.prefix_caching(prefix_mode),
        )
    try:
        Session(
            source,
            Screen(),
            _read,
            system=system,
            thinking=thinking,
            effort=level,
            tools=declared,
            options={name: value for name, value in given.items() if value is not None},
        ).run()
    finally:
        source.close()


def _remote(server: str, api_key: str | None, model: str | None) -> "AnswerSource":
    from deepinfer.chat.remote import RemoteModel
    from deepinfer.env import read_environment

    return RemoteModel(server, api_key or read_environment().api_key, model)


def _local(model: str | None, **arguments: Any) -> "AnswerSource":
    from deepinfer.chat.local import LocalModel
    from deepinfer.llm import LLM

    return LocalModel(LLM(model, **arguments))


def _read(prompt: str) -> str | None:
    """A line of the person's; the prompt is shown to people only."""
    try:
        if sys.stdin.isatty():
            import readline  # noqa: F401  (arrow keys and history)
        return input(prompt if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
