"""Servers for tests: `deepinfer serve` as a process of its own, and one in a thread whose engine fails on command."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from faulty_core import faulty

from deepinfer.engine.arguments import EngineArguments
from deepinfer.engine.model_core import ModelCore
from deepinfer.engine.settings import resolve_settings
from deepinfer.server.app import whole_app
from deepinfer.server.keys import KeyRing
from deepinfer.server.models import ServedModel
from deepinfer.server.run import Server, listen, make_state
from deepinfer.server.settings import ServerSettings
from deepinfer.server.state import ServerState

START_SECONDS = 90.0  # on a machine that does much else


class ProcessServer:
    """`deepinfer serve` on a free port; stderr in `log`."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "deepinfer", "serve", "--port", "0", *arguments]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stderr=file, stdout=file, stdin=subprocess.DEVNULL)
        self.base_url = ""

    def wait_ready(self) -> None:
        until = time.monotonic() + START_SECONDS
        while "deepinfer: ready" not in self.output:
            assert self.process.poll() is None and time.monotonic() < until, self.output
            time.sleep(0.05)
        match = re.search(r"listening on (http://\S+)", self.output)
        assert match is not None
        self.base_url = match[1]

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def process_server(log: Path, *arguments: str) -> Iterator[ProcessServer]:
    server = ProcessServer(log, *arguments)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


class ThreadServer:
    """A server in a thread of this process, whose engine is the tiny model and fails on command: a prompt that holds
    FAILS, HANGS or SLOW (faulty_core.py) makes it do so.
    """

    def __init__(self, checkpoint: Path, settings: ServerSettings, keys: KeyRing | None = None) -> None:
        engine = resolve_settings(EngineArguments(device="cpu", dtype="float32"), environ={})
        core = ModelCore(path=checkpoint, settings=engine)
        model = ServedModel.load(checkpoint, engine, ("tiny",))
        self.lines: list[bytes] = []
        self.state: ServerState = make_state(core, settings, model, keys, make_core=faulty(checkpoint))
        self._socket = listen("127.0.0.1", 0)
        self.port: int = self._socket.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.server = Server(whole_app(self.state, write_log=self.lines.append), self.state)
        self.thread = threading.Thread(target=self.server.run, args=([self._socket],), daemon=True)
        self.thread.start()
        self.wait(lambda: self.status("/ready") == 200)

    def status(self, path: str) -> int:
        try:
            return httpx.get(self.base_url + path, timeout=5).status_code
        except httpx.TransportError:
            return 0

    def wait(self, condition: Callable[[], object], seconds: float = START_SECONDS) -> float:
        """Until it holds -> how long that took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, "it never came to be"
            assert self.thread.is_alive()
            time.sleep(0.02)
        return time.monotonic() - began

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = httpx.get(f"{self.base_url}/metrics", timeout=10).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}[{{ ]", line))

    def is_empty(self) -> bool:
        """The engine has no request, and no block of one."""
        names = ("dsv_requests_running", "dsv_requests_waiting", "dsv_kv_cache_usage_ratio", "dsv_http_open_answers")
        return all(self.metric(name) == 0 for name in names)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def thread_server(checkpoint: Path, keys: KeyRing | None = None, **settings: Any) -> Iterator[ThreadServer]:
    server = ThreadServer(checkpoint, ServerSettings(**settings), keys)
    try:
        yield server
    finally:
        server.stop()


def raw_request(port: int, path: str, body: bytes) -> socket.socket:
    """Sends a request and leaves the answer to the caller, who may vanish."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def is_running(pid: int) -> bool:
    """False for a process that is gone, and for one that nobody has waited for."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found
