"""`deepinfer bench`: load on a running server."""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer.cli import options

if TYPE_CHECKING:
    from rich.progress import Progress

    from deepinfer.bench.load import Load, Record
    from deepinfer.bench.workload import Prompt
    from deepinfer.client import Connection, Exposition

LOAD = "Load"
REQUESTS = "Requests"
BOUNDS = "Bounds"
ADVICE = (
    "server: bench measures a server that runs, and starts none. Start one with `deepinfer serve --model nano`, "
    "then say `deepinfer bench --server http://127.0.0.1:8000`"
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
) -> None:
    """Measures TTFT, TBT and throughput as clients see them. Exit code 1 if a request was not answered."""
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
