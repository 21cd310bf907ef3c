"""Requests on their way: a closed loop of users, or an open one of arrivals.

A closed loop waits for answers before it asks again, so a slow server is asked less: good for peaks. In an open loop
requests come when they come (Poisson), and what a request waited for its turn to be sent counts as its waiting.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from deepinfer.bench.workload import Prompt
from deepinfer.client import Address, Connection, ServerRefusal, ServerUnreachable, stream_chat

MOST_OPEN = 1024
"""Requests under way in an open loop; who would be one more is not sent, and counts as an error."""


@dataclass(slots=True)
class Record:
    """One request. Moments are seconds since the run's start, on the client's clock."""

    number: int
    due: float
    """When it should be sent: in a closed loop, when it was."""
    first: float | None = None
    """First piece of reasoning, content or a call."""
    last: float | None = None
    end: float | None = None
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds between two arrivals, and the tokens that the later one brought."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    finish: str | None = None
    error: str | None = None
    """A short name of what went wrong: "429 rate_limit_exceeded", "unreachable", "timeout", "cut"."""
    message: str | None = None
    """In words."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """How to ask. Times in seconds."""

    address: Address
    api_key: str | None = None
    users: int = 8
    rate: float | None = None
    """Arrivals per second; None = a closed loop."""
    max_seconds: float = 600.0
    """Then nothing more is sent, and what is under way is cut off."""
    request_seconds: float = 300.0
    """That one request may take."""
    seed: int = 0
    """Of the arrivals, and, plus its number, of each request."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Of every request's body."""


Tell = Callable[[Record], None]


async def run(load: Load, prompts: list[Prompt], tell: Tell) -> tuple[list[Record], float]:
    """Sends one request per prompt. Returns the records of those that were due, in order, and the seconds from the
    start to the end of the last one. tell: called with each that is over."""
    start = time.perf_counter()
    records: list[Record] = []
    work = _open(load, prompts, records, start, tell) if load.rate else _closed(load, prompts, records, start, tell)
    try:
        async with asyncio.timeout(load.max_seconds):
            await work
    except TimeoutError:
        pass  # those under way say "cut"
    ended = [record.end for record in records if record.end is not None]
    return sorted(records, key=lambda record: record.number), max(ended, default=0.0)


async def _closed(load: Load, prompts: list[Prompt], records: list[Record], start: float, tell: Tell) -> None:
    left = iter(enumerate(prompts))

    async def user() -> None:
        async with Connection(load.address, api_key=load.api_key) as connection:
            for number, prompt in left:
                record = Record(number, time.perf_counter() - start)
                records.append(record)
                await _one(load, connection, prompt, record, start)
                tell(record)
                if record.error == "unreachable":
                    await asyncio.sleep(0.1)  # a server that is gone must not be hammered

    await _all(user() for _ in range(min(load.users, len(prompts))))


async def _open(load: Load, prompts: list[Prompt], records: list[Record], start: float, tell: Tell) -> None:
    idle: list[Connection] = []
    pick = random.Random(load.seed)

    async def arrive(prompt: Prompt, record: Record) -> None:
        connection = idle.pop() if idle else Connection(load.address, api_key=load.api_key)
        try:
            await _one(load, connection, prompt, record, start)
        finally:
            idle.append(connection)
        tell(record)

    tasks: set[asyncio.Task[None]] = set()
    due = 0.0
    try:
        async with asyncio.TaskGroup() as group:
            for number, prompt in enumerate(prompts):
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
                record = Record(number, due)
                records.append(record)
                if len(tasks) >= MOST_OPEN:
                    record.error, record.message = "not sent", f"{MOST_OPEN} requests were under way"
                    record.end = time.perf_counter() - start
                    tell(record)
                else:
                    task = group.create_task(arrive(prompt, record))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                assert load.rate is not None
                due += pick.expovariate(load.rate)
    finally:
        for connection in idle:
            connection.close()


async def _all(work: Iterator[Any]) -> None:
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)


async def _one(load: Load, connection: Connection, prompt: Prompt, record: Record, start: float) -> None:
    """Fills the record. Nothing but a cancellation comes out of it."""
    body = {
        **load.fields,
        "messages": prompt.messages,
        "seed": load.seed + record.number,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if prompt.max_tokens is not None:
        body["max_tokens"] = prompt.max_tokens
    try:
        async with asyncio.timeout(load.request_seconds):
            await _follow(connection, body, record, start)
        if record.finish == "error":
            record.error, record.message = "broken", "the model gave no finite numbers"
    except TimeoutError:
        record.error, record.message = "timeout", f"no end in {load.request_seconds:g} s"
    except ServerRefusal as error:
        record.error, record.message = f"{error.status} {error.code or ''}".strip(), error.message
    except ServerUnreachable as error:
        record.error, record.message = "unreachable", str(error)
    except asyncio.CancelledError:
        record.error, record.message = "cut", f"the run's {load.max_seconds:g} s were over"
        raise
    finally:
        record.end = time.perf_counter() - start
        if record.error is not None:
            connection.close()


async def _follow(connection: Connection, body: dict[str, Any], record: Record, start: float) -> None:
    known = 0  # tokens that have arrived
    chunks = stream_chat(connection, body)
    async with aclosing(chunks):  # type: ignore[type-var]
        async for chunk in chunks:
            record.finish = chunk.finish or record.finish
            if chunk.usage is not None:
                record.prompt_tokens, record.cached_tokens = chunk.usage.prompt_tokens, chunk.usage.cached_tokens
                record.output_tokens = chunk.usage.completion_tokens
                record.reasoning_tokens = chunk.usage.reasoning_tokens
            if not chunk.events:
                continue
            at = chunk.at - start
            new = max(0, record.output_tokens - known)
            known += new
            if record.first is None:
                record.first = at
            elif at == record.last and record.gaps:
                seconds, tokens = record.gaps[-1]
                record.gaps[-1] = (seconds, tokens + new)  # of the same piece
            elif at != record.last:
                assert record.last is not None
                record.gaps.append((at - record.last, new))
            record.last = at
