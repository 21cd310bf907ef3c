"""`deepinfer bench`: load on a running server, or one rank of a deployment alone on its device."""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.bench.output import unwritable
from deepinfer.cli import options

if TYPE_CHECKING:
    from rich.progress import Progress

    from deepinfer.bench.load import Load, Record
    from deepinfer.bench.rank_share import RankShare
    from deepinfer.bench.workload import Prompt
    from deepinfer.client import Connection, Exposition

LOAD = "Load"
REQUESTS = "Requests"
BOUNDS = "Bounds"
RANK = "One rank, without a server (--rank-share)"
ADVICE = (
    "server: bench measures a server that runs, and starts none. Start one with `deepinfer serve --model nano`, "
    "then say `deepinfer bench --server http://127.0.0.1:8000`. Or measure one rank of a deployment, without a server "
    "and without weights: `deepinfer bench --preset flash --rank-share ep=8`"
)
FAILED = 1  # exit code: some requests were not answered


def bench(
    server: Annotated[str | None, typer.Option(help="Address, as http://127.0.0.1:8000.")] = None,
    api_key: options.ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Name that requests use; default: the server's first.")] = None,
    users: Annotated[
        int, typer.Option(min=1, max=4096, help="Closed loop: users who ask again when answered.", rich_help_panel=LOAD)
    ] = 8,
    rate: Annotated[
        float | None,
        typer.Option(help="Open loop instead: arrivals per second, at random (Poisson).", rich_help_panel=LOAD),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="How many, all users together.", rich_help_panel=LOAD)
    ] = 64,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, which do not count.", rich_help_panel=LOAD)] = 2,
    prompts: Annotated[
        str,
        typer.Option(
            metavar="FILE|builtin",
            help='A prompt per line, or JSON objects with "prompt" or "messages", and "max_tokens"; builtin: ours.',
            rich_help_panel=REQUESTS,
        ),
    ] = "builtin",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest output in tokens.", rich_help_panel=REQUESTS)] = 128,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Every output has its longest length.", rich_help_panel=REQUESTS),
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="0 = greedy; default: the server's own.", rich_help_panel=REQUESTS)
    ] = None,
    effort: Annotated[
        str | None,
        typer.Option(help="Reasoning: none, low, high, max or 1 to 100; default: high.", rich_help_panel=REQUESTS),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the prompts' order, the arrivals and the sampling.", rich_help_panel=REQUESTS)
    ] = 0,
    max_seconds: Annotated[
        float, typer.Option(min=1, help="The run ends after so long, whatever is left.", rich_help_panel=BOUNDS)
    ] = 600.0,
    request_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that one request may take.", rich_help_panel=BOUNDS)
    ] = 300.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write figures and every request to this file.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    debug: options.Debug = False,
    rank_share: Annotated[
        str | None,
        typer.Option(metavar="ep=N", help="One of N expert-parallel ranks, random weights.", rich_help_panel=RANK),
    ] = None,
    preset: Annotated[str, typer.Option(help="`flash`: the released shapes; `tiny`.", rich_help_panel=RANK)] = "flash",
    layers: Annotated[
        int | None, typer.Option(min=1, help="The first N layers only. Default: all.", rich_help_panel=RANK)
    ] = None,
    seqs: Annotated[int, typer.Option(min=1, help="Sequences that decode.", rich_help_panel=RANK)] = 64,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each of them.", rich_help_panel=RANK)] = 32_768,
    nextn: Annotated[int, typer.Option(min=0, help="Drafts of a step and sequence.", rich_help_panel=RANK)] = 5,
    prefill_chunk: Annotated[
        int, typer.Option(min=0, help="Tokens of the prompt that is timed; 0: none.", rich_help_panel=RANK)
    ] = 32_768,
    steps: Annotated[
        int, typer.Option(min=1, help="Decode steps; the figure is the median.", rich_help_panel=RANK)
    ] = 20,
    engram_rows: Annotated[
        int | None,
        typer.Option(
            min=2, help="Rows per column of the Engram tables. Default: 100000 for flash.", rich_help_panel=RANK
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=RANK)] = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.", rich_help_panel=RANK)] = "bfloat16",
) -> None:
    """Measures TTFT, TBT and throughput as clients see them. Exit code 1 if a request was not answered.

    With --rank-share instead: how long a decode step and a prefill of one rank take, beside what they could take.
    """
    if json_file is not None and (reason := unwritable(json_file)):
        raise ValueError(f"json: {reason}")
    if rank_share is not None:
        if server is not None:
            raise ValueError("rank_share: measures this machine's device, not a server; leave out --server")
        from deepinfer.bench.rank_share import RankShare

        share = RankShare(
            preset=preset,
            ep=parse_ranks(rank_share),
            layers=layers,
            sequences=seqs,
            context=context,
            nextn=nextn,
            prefill_chunk=prefill_chunk,
            steps=steps,
            engram_rows=engram_rows,
            dtype=dtype,
            seed=seed,
        )
        _measure_rank(share, device, json_file, quiet)
        return
    if server is None:
        raise ValueError(ADVICE)
    if rate is not None and not 0 < rate <= 100_000:
        raise ValueError(f"rate: must be a number of requests per second above 0, got {rate}")
    from deepinfer.bench.load import Load
    from deepinfer.bench.workload import drawn, read
    from deepinfer.chat.session import parse_effort
    from deepinfer.client import Address
    from deepinfer.env import read_environment

    level = None if effort in (None, "none") else parse_effort(str(effort))
    if level is None and effort not in (None, "none"):
        raise ValueError(f"effort: must be none, low, high, max, or a number from 1 to 100, got {effort!r}")
    given = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": ignore_eos or None}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if effort is not None:
        fields |= {"reasoning_effort": level} if level is not None else {"thinking": {"type": "disabled"}}
    load = Load(
        address=Address.parse(server),
        api_key=api_key or read_environment().api_key,
        users=users,
        rate=rate,
        max_seconds=max_seconds,
        request_seconds=request_timeout,
        seed=seed,
        fields=fields,
    )
    setting = {
        "prompts": prompts,
        "requests": requests,
        "users": None if rate else users,
        "rate": rate,
        "warmup": warmup,
        "seed": seed,
        **fields,
    }
    chosen = drawn(read(prompts), requests, seed)
    raise typer.Exit(asyncio.run(_measure(load, model, chosen, warmup, setting, json_file, quiet)))


def parse_ranks(text: str) -> int:
    """8 of "ep=8". ValueError for anything else."""
    name, _, number = text.partition("=")
    if name != "ep" or not number.isascii() or not number.isdigit() or int(number) < 1:
        raise ValueError(f"rank_share: must be ep=N with a number of ranks, as ep=8, got {text!r}")
    return int(number)


def _measure_rank(share: "RankShare", device: str, json_file: Path | None, quiet: bool) -> None:
    from deepinfer.bench.rank_share_run import measure, report
    from deepinfer.kernels.device import resolve_device

    def tell(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    def keep(result: dict[str, Any]) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    print(report(measure(share, resolve_device(device), tell, keep)))


async def _measure(
    load: "Load",
    model: str | None,
    prompts: "list[Prompt]",
    warmup: int,
    setting: dict[str, Any],
    json_file: Path | None,
    quiet: bool,
) -> int:
    from dataclasses import replace

    from rich.console import Console

    from deepinfer.bench.figures import Drafts, Figures
    from deepinfer.bench.load import run
    from deepinfer.bench.report import as_json, table
    from deepinfer.client import Connection, model_names

    async with Connection(load.address, api_key=load.api_key) as connection:
        names = await model_names(connection)
        if model is not None and model not in names:
            raise ValueError(f"model: {model!r} is not served at {load.address}; there is {', '.join(names)}")
        load = replace(load, fields={**load.fields, "model": model or names[0]})
        if warmup:
            await run(replace(load, rate=None), prompts[:warmup], lambda _: None)
        before = await _metrics(connection)
        with _progress(quiet) as progress:
            task = progress.add_task("", total=len(prompts), tokens=0, errors=0)

            def tell(record: "Record") -> None:
                fields = progress.tasks[task].fields
                tokens, errors = fields["tokens"] + record.output_tokens, fields["errors"] + (record.error is not None)
                progress.update(task, advance=1, tokens=tokens, errors=errors)

            records, seconds = await run(load, prompts, tell)
        after = await _metrics(connection)
    figures = Figures.of(records, seconds, Drafts.between(before, after))
    loop = f"open loop, {load.rate:g} arrivals/s" if load.rate else f"closed loop, {load.users} users"
    Console().print(table(figures, f"{load.fields['model']} at {load.address}: {loop}"))
    for error in {record.error: record for record in records if record.error is not None}.values():
        print(f"{error.error}: {error.message}", file=sys.stderr)
    if figures.requests < len(prompts):
        left = len(prompts) - figures.requests
        print(f"{left} requests were not sent: the run's {load.max_seconds:g} s were over", file=sys.stderr)
    if json_file is not None:
        server = {"address": str(load.address), "model": load.fields["model"], **(after.build if after else {})}
        content = as_json(figures, records, setting, server)
        json_file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if figures.answered == len(prompts) else FAILED


async def _metrics(connection: "Connection") -> "Exposition | None":
    """None, and a word about it, where they are not to be had."""
    from deepinfer.client import ServerRefusal, ServerUnreachable, scrape

    try:
        return await scrape(connection)
    except (ServerRefusal, ServerUnreachable) as error:
        print(f"no figures of the server: {error}", file=sys.stderr)
        return None


def _progress(quiet: bool) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens, {task.fields[errors]} errors"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=quiet or not sys.stderr.isatty(),
        transient=True,
    )
