"""From the command line to the last signal."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from servers import ProcessServer, children, is_running, process_server

from deepinfer.cli import main

LONG = {"model": "nano", "prompt": "Once", "max_tokens": 600, "ignore_eos": True, "stream": True, "seed": 1}

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
SILENT = (b"", b"POST /v1", HEAD + b"content-length: 50\r\n\r\n{", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")


class Stream(threading.Thread):
    """Reads an answer to its end, however that comes."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.text = ""
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=LONG, timeout=60) as answer:
                for piece in answer.iter_text():
                    self.text += piece
        except httpx.TransportError:
            self.text += "(cut off)"


def started(server: ProcessServer) -> Stream:
    stream = Stream(server.base_url)
    until = time.monotonic() + 30
    while not stream.text:
        assert time.monotonic() < until
        time.sleep(0.02)
    return stream


def assert_gone(pids: list[int]) -> None:
    """No process of the server stays behind: its engine, its grammar workers, their helpers."""
    until = time.monotonic() + 15
    while any(map(is_running, pids)):
        assert time.monotonic() < until, [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids if is_running(pid)]
        time.sleep(0.05)


def test_sigterm_finishes_what_is_open_and_refuses_what_is_new(tmp_path: Path) -> None:
    with process_server(tmp_path / "log", "--model", "nano") as server:
        helpers = children(server.process.pid)
        assert helpers
        stream = started(server)
        port = int(server.base_url.rsplit(":", 1)[1])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in SILENT]  # nobody waits for these
        for connection, sent in zip(silent, SILENT, strict=True):
            connection.sendall(sent)
        server.process.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=server.base_url, timeout=30) as client:
            while client.get("/ready").status_code != 503:  # at once, but for the signal's way
                assert stream.is_alive()
            assert client.get("/ready").json()["reasons"] == ["draining"]
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert client.get("/health").status_code == 200
        stream.join(60)
        assert stream.text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in stream.text
        assert server.process.wait(30) == 0
        assert "SIGTERM, 1 answers to finish" in server.output
        assert "Traceback" not in server.output
        assert_gone(helpers)
        for connection in silent:
            connection.close()


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with process_server(tmp_path / "log", "--nextn", "0") as server:
        helpers = children(server.process.pid)
        stream = started(server)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 128 + signal.SIGINT
        stream.join(10)
        assert "[DONE]" not in stream.text
        assert "Traceback" not in server.output
        assert_gone(helpers)


def test_a_log_that_nobody_reads_stops_neither_the_server_nor_a_drain_that_takes_too_long() -> None:
    command = [sys.executable, "-m", "deepinfer", "serve", "--port", "0", "--nextn", "0", "--drain-timeout", "0.5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        log = b""
        while b"deepinfer: ready" not in log:
            log += os.read(process.stderr.fileno(), 65536)
            assert process.poll() is None
        found = re.search(r"listening on (http://\S+)", log.decode())
        assert found is not None
        with httpx.Client(base_url=found[1], timeout=30) as client:
            for number in range(1000):  # some 200 bytes of log each: the pipe holds a third of it
                client.get(f"/nothing/{number}")
            stream = Stream(found[1])
            while not stream.text:
                assert stream.is_alive()
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            stream.join(20)  # ends with the drain, which says so in the log
            assert not stream.is_alive() and not stream.text.endswith("[DONE]")
        log += process.stderr.read()
        assert process.wait(30) == 0
    lines = log.decode().splitlines()
    assert any("SIGTERM, 1 answers to finish" in line for line in lines)
    assert any(re.match(r"[0-9-]{10} [0-9:,]+ WARNING .* were not finished in 0.5 s", line) for line in lines)
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert sum("/nothing/" in line.get("path", "") for line in told) == 1000  # nothing was lost: it waited


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "no such directory"),
        (["--host", "0.0.0.0"], "keys"),
        (["--keys", "/nowhere/keys.json"], "keys add"),
        (["--dtype", "float64"], "dtype"),
        (["--port", "TAKEN"], "cannot listen"),
        (["--store", "/proc/nowhere/responses"], "cannot keep responses"),
        (["--trace-endpoint", "nonsense"], "endpoint"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_an_exit_code(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = [str(taken.getsockname()[1]) if a == "TAKEN" else a for a in arguments]
        with pytest.raises(SystemExit) as left:
            main(["serve", *([] if "--port" in arguments else ["--port", "0"]), *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and line.startswith("error: ") and message in line


def test_a_model_that_cannot_be_loaded_ends_the_server_and_says_why() -> None:
    command = [sys.executable, "-m", "deepinfer", "serve", "--port", "0", "--max-model-len", "100000000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "max_model_len" in done.stderr.splitlines()[-1]
