"""What the HTTP server costs: 64 streams from an engine that invents tokens, through parser, writer and socket.

The engine process is the real one (core, scheduler, wire); its runner gives words by chance and takes as long as it is
told to. The client is a process of its own on plain sockets. Figures: tokens delivered per second when nothing waits
for the model (the server then sends what has come meanwhile in one frame), and where the engine makes 25,000 a second
(as near to a frame per token as the cores allow); the time to the first token beside that of the engine's own client,
without HTTP, under the same load at a human pace; the time that `deepinfer serve` takes to start; and the memory of
server and engine over time (--soak).

    python benchmarks/serving.py [--streams 64] [--soak MINUTES] [--output FILE]

On two cores engine, server and client share them; on an idle machine with more, each has its own.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from report import commit, machine

from deepinfer.cache.manager import CacheManager
from deepinfer.config import EngineConfig, blocks_for
from deepinfer.engine.client import AsyncEngineClient
from deepinfer.engine.core import EngineCore
from deepinfer.engine.core_process import Startup
from deepinfer.engine.model_core import ModelCore
from deepinfer.engine.plan import StepPlan, StepResult
from deepinfer.engine.runner import Runner
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.server.app import whole_app
from deepinfer.server.models import ServedModel
from deepinfer.server.run import Server, listen, make_state
from deepinfer.server.settings import ServerSettings

CONTEXT = 4096
RATE = 25_000  # tokens per second of all streams together
PACE = 0.02  # seconds a step: 50 tokens per second and stream
ANSWER = 100  # tokens at that pace, so that requests come and go
PROMPT = "Tell me something about lighthouses, please: who lived there, and what did they do all day?"


# -- the engine that invents ------------------------------------------------------------------------------------------


class Inventor(Runner):
    """Gives words by chance; a step ends `pace` seconds after the one before."""

    def __init__(self, words: np.ndarray, pace: float) -> None:
        self._words = words
        self._pace = pace
        self._next = 0.0
        self._random = np.random.default_rng(0)

    def run(self, plan: StepPlan) -> StepResult:
        if self._pace:
            now = time.monotonic()
            self._next = max(self._next + self._pace, now)
            time.sleep(self._next - now)
        draws = len(plan.draw_slots)
        return StepResult(
            token_ids=self._random.choice(self._words, draws),
            logprobs=np.zeros(draws, np.float32),
            valid=np.ones(draws, bool),
            device_seconds=self._pace,
        )


def inventing_core(path: Path, streams: int, pace: float, startup: Startup) -> EngineCore:
    """A core on the tokenizer of a checkpoint, without its weights."""
    model = ServedModel.load(path, ModelCore.of(path).settings)
    words = [
        token
        for token in range(model.tokenizer.vocab_size)
        if model.tokenizer.token_bytes(token).decode("utf-8", "ignore").strip().isalpha()
    ]
    config = EngineConfig(
        max_model_len=CONTEXT,
        max_num_seqs=streams,
        max_num_batched_tokens=max(4096, streams),
        num_blocks=streams * blocks_for(CONTEXT) + 64,
        prefix_caching="off",
    )
    manager = CacheManager(
        max_num_seqs=streams,
        num_blocks=config.num_blocks,
        table_width=blocks_for(CONTEXT),
        window=128,
        num_layers=40,
        prefix_caching="off",
    )
    return EngineCore(Inventor(np.array(words), pace), manager, config, vocab_size=model.vocab_size, eos_token_ids=(1,))


def run_server(path: Path, streams: int, pace: float, port: int, endpoint_file: Path) -> None:
    """The server's process. Writes where its engine listens, for a client without HTTP."""
    core = ModelCore.of(path)
    settings = ServerSettings(port=port, access_log=False)
    model = ServedModel.load(path, core.settings)
    state = make_state(core, settings, model, make_core=partial(inventing_core, path, streams, pace))
    server = Server(whole_app(state), state)
    notify = server._watch_start

    async def watch_start() -> None:
        await notify()
        client = state.host.current
        if client is not None:
            endpoint_file.write_text(client.endpoint, encoding="utf-8")

    server._watch_start = watch_start  # type: ignore[method-assign]
    server.run([listen("127.0.0.1", port)])


# -- the load ---------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What a load has seen."""

    tokens: int = 0
    frames: int = 0
    answers: int = 0
    failures: int = 0
    first: list[float] | None = None  # seconds to the first token, of every answer


class StreamReader(asyncio.Protocol):
    """Sends a request and notes what comes, at little cost: the client shares the cores with what it measures."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._began = time.perf_counter()
        self.first: float | None = None  # seconds to the first token
        self.frames = 0
        self.tail = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.first is None and b'"content":"' in data:
            self.first = time.perf_counter() - self._began
        self.frames += data.count(b"data: ")
        self.tail = data if len(data) > 400 else self.tail[-400:] + data
        if b"[DONE]" in data:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def http_stream(port: int, tokens: int, tally: Tally) -> None:
    """One answer over a connection of its own."""
    body = json.dumps(
        {
            "model": "nano",
            "messages": [{"role": "user", "content": PROMPT}],
            "stream": True,
            "max_tokens": tokens,
            "ignore_eos": True,
            "reasoning_effort": "none",
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    reader = StreamReader(head.encode() + body)
    await asyncio.get_running_loop().create_connection(lambda: reader, "127.0.0.1", port)
    await reader.ended
    tally.frames += reader.frames
    usage = reader.tail.rfind(b'"completion_tokens":')
    if reader.first is None or usage < 0:
        tally.failures += 1
        return
    tally.tokens += int(reader.tail[usage + 20 :].split(b",", 1)[0])
    tally.answers += 1
    if tally.first is not None:
        tally.first.append(reader.first)


async def direct_stream(client: AsyncEngineClient, prompt: list[int], tokens: int, tally: Tally) -> None:
    """One answer from the engine itself."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    first = None
    deltas = client.generate(prompt, params)
    async with aclosing(deltas):  # type: ignore[type-var]
        async for delta in deltas:
            if first is None:
                first = time.perf_counter() - began
            tally.tokens += len(delta.token_ids)
            tally.frames += 1
    tally.answers += 1
    if tally.first is not None and first is not None:
        tally.first.append(first)


async def load(streams: int, seconds: float, tokens: int, one: Any, jitter: float) -> dict[str, Any]:
    """`streams` at a time, one after the other, each after a pause of up to `jitter` seconds; after a short one each
    that is not counted."""
    await asyncio.gather(*(one(10, Tally()) for _ in range(streams)))
    tally = Tally(first=[])
    until = time.perf_counter() + seconds
    chance = random.Random(0)

    async def user() -> None:
        await asyncio.sleep(chance.uniform(0, jitter))
        while time.perf_counter() < until:
            await one(tokens, tally)
            await asyncio.sleep(chance.uniform(0, jitter))

    began = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(streams)))
    elapsed = time.perf_counter() - began
    first = tally.first or [0.0]
    return {
        "tokens_per_second": round(tally.tokens / elapsed),
        "tokens_per_frame": round(tally.tokens / max(tally.frames, 1), 2),
        "answers": tally.answers,
        "failures": tally.failures,
        "first_token_ms": {
            "p50": round(statistics.median(first) * 1e3, 2),
            "p99": round(float(np.percentile(first, 99)) * 1e3, 2),
        },
    }


def run_client(options: argparse.Namespace) -> None:
    """The client's process: prints its result as JSON."""

    async def http() -> dict[str, Any]:
        one = partial(http_stream, options.port)
        return await load(options.streams, options.seconds, options.tokens, one, options.jitter)

    async def direct() -> dict[str, Any]:
        async with await AsyncEngineClient.connect(options.endpoint) as client:
            one = partial(direct_stream, client, list(range(100, 140)))
            return await load(options.streams, options.seconds, options.tokens, one, options.jitter)

    uvloop.install()
    print(json.dumps(asyncio.run(direct() if options.endpoint else http())))


# -- the measurement --------------------------------------------------------------------------------------------------


class ServerUnderTest:
    """A server's process as a context manager."""

    def __init__(self, path: Path, streams: int, pace: float) -> None:
        self.port = _free_port()
        self._directory = tempfile.TemporaryDirectory()
        endpoint = Path(self._directory.name) / "endpoint"
        command = [sys.executable, __file__, "--role", "server", "--model", str(path), "--streams", str(streams)]
        self.process = subprocess.Popen([*command, "--pace", str(pace), "--port", str(self.port), "--file", endpoint])
        while not endpoint.exists():
            if self.process.poll() is not None:
                raise RuntimeError("the server ended before it was ready")
            time.sleep(0.05)
        self.endpoint = endpoint.read_text(encoding="utf-8")

    def __enter__(self) -> ServerUnderTest:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        self._directory.cleanup()

    def client(self, streams: int, seconds: float, tokens: int, *, jitter: float = 0.0, direct: bool = False) -> Any:
        command = [sys.executable, __file__, "--role", "client", "--streams", str(streams), "--seconds", str(seconds)]
        command += ["--tokens", str(tokens), "--jitter", str(jitter)]
        command += ["--endpoint", self.endpoint] if direct else ["--port", str(self.port)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout)

    @property
    def resident_mib(self) -> dict[str, float]:
        """Of the server, and of its largest helper, the engine."""
        helpers = max(map(_resident_mib, _children(self.process.pid)))
        return {"server": round(_resident_mib(self.process.pid), 1), "engine": round(helpers, 1)}

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    result: dict[str, Any] = {"commit": commit(), "date": datetime.now(UTC).isoformat(), "streams": options.streams}
    with ServerUnderTest(options.model, options.streams, 0.0) as server:
        server.client(options.streams, 2, 500)  # warm-up
        cpu, began = server.cpu_seconds, time.perf_counter()
        result["saturated"] = server.client(options.streams, options.seconds, 1000)
        busy = (server.cpu_seconds - cpu) / (time.perf_counter() - began)
        result["saturated"]["server_cores"] = round(busy, 2)
    with ServerUnderTest(options.model, options.streams, options.streams / RATE) as server:
        cpu, began = server.cpu_seconds, time.perf_counter()
        result["token_by_token"] = server.client(options.streams, options.seconds, 1000)
        busy = (server.cpu_seconds - cpu) / (time.perf_counter() - began)
        result["token_by_token"]["server_cores"] = round(busy, 2)
    with ServerUnderTest(options.model, options.streams, PACE) as server:
        server.client(options.streams, 2, ANSWER)
        for name, direct in (("paced", False), ("paced_direct", True)):
            cpu, began = server.cpu_seconds, time.perf_counter()
            result[name] = server.client(options.streams, options.seconds, ANSWER, jitter=0.2, direct=direct)
            result[name]["server_cores"] = round((server.cpu_seconds - cpu) / (time.perf_counter() - began), 2)
    over = {
        p: round(result["paced"]["first_token_ms"][p] - result["paced_direct"]["first_token_ms"][p], 2)
        for p in ("p50", "p99")
    }
    result["first_token_overhead_ms"] = over
    result["start_seconds"] = start_seconds(options.model)
    if options.soak:
        result["soak"] = soak(options)
    result["machine"] = machine(load_before)
    return result


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """The server's memory, once a minute under load."""
    samples = []
    with ServerUnderTest(options.model, options.streams, 0.005) as server:
        for _ in range(options.soak):
            server.client(options.streams, 60, ANSWER, jitter=0.05)
            samples.append(server.resident_mib)
            print(f"after {len(samples)} min: {samples[-1]} MiB", file=sys.stderr)
    return {"minutes": options.soak, "resident_mib": samples}


def start_seconds(path: Path) -> dict[str, float]:
    """From `deepinfer serve` to /ready, and to the end of a first short answer, with the model itself."""
    port = _free_port()
    command = [sys.executable, "-m", "deepinfer", "serve", "--model", str(path), "--port", str(port)]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            while _status(port, "/ready") != 200:
                if process.poll() is not None:
                    raise RuntimeError("the server ended before it was ready")
                time.sleep(0.02)
            ready = time.perf_counter() - began
            body = {"model": "nano", "prompt": "Once", "max_tokens": 1}
            assert _status(port, "/v1/completions", body) == 200
            return {"ready": round(ready, 2), "first_answer": round(time.perf_counter() - began, 2)}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _status(port: int, path: str, body: Any = None) -> int:
    """Of an answer; 0 if nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, {"content-type": "application/json"})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _free_port() -> int:
    with listen("127.0.0.1", 0) as probe:
        port: int = probe.getsockname()[1]
    return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).resolve().parents[1] / "models" / "nano")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--soak", type=int, default=0, metavar="MINUTES")
    parser.add_argument("--output", type=Path)
    hidden = ("role", "file", "endpoint")
    for name in hidden:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name, kind in (("port", int), ("tokens", int), ("pace", float), ("jitter", float)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "server":
        return run_server(options.model, options.streams, options.pace, options.port, Path(options.file))
    if options.role == "client":
        return run_client(options)
    result = measure(options)
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
