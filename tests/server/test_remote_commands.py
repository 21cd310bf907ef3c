"""`deepinfer chat --server` and `deepinfer bench --server` on a real server with nano."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import pytest
from asking import ANSWER, QUESTION, WEATHER

from deepinfer.bench.load import Load, Record, run
from deepinfer.bench.workload import Prompt, builtin
from deepinfer.cli import main
from deepinfer.client import Address

PATIENCE = 60.0  # seconds, on a machine that does much else
STORY = Prompt([{"role": "user", "content": "Tell me a very long story."}])
LONG = {"model": "nano", "ignore_eos": True, "max_tokens": 3000}  # takes minutes


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)


def gauge(base_url: str, name: str) -> float:
    """The sum over its labels."""
    text = httpx.get(f"{base_url}/metrics", timeout=10).text
    found = re.findall(rf"^dsv_{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
    assert found
    return sum(map(float, found))


def running(base_url: str) -> float:
    return gauge(base_url, "requests_running")


def wait_until_idle(base_url: str) -> None:
    end = time.monotonic() + PATIENCE
    while running(base_url):
        assert time.monotonic() < end
        time.sleep(0.05)


# -- chat -------------------------------------------------------------------------------------------------------------


class Terminal:
    """`deepinfer chat` in a process of its own."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log.open("wb")
        self._path = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deepinfer", "chat", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            # A shell's job in the background ignores Ctrl-C, and so would every process that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin: IO[str] = self.process.stdin
        self.stdout: IO[str] = self.process.stdout

    def say(self, line: str) -> None:
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def wait_for(self, words: str) -> str:
        """Until stderr holds them."""
        end = time.monotonic() + PATIENCE
        while words not in (shown := self._path.read_text(encoding="utf-8", errors="replace")):
            assert time.monotonic() < end and self.process.poll() is None, shown
            time.sleep(0.02)
        return shown

    def close(self) -> None:
        self.stdin.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self._log.close()
            self.stdout.close()


@pytest.fixture
def terminal(nano_server: str, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path / "err", "--server", nano_server, "--temperature", "0")
    yield terminal
    terminal.close()


def test_chat_over_a_server_answers_stops_at_ctrl_c_and_goes_on(terminal: Terminal, nano_server: str) -> None:
    terminal.say(QUESTION)
    assert terminal.stdout.readline() == ANSWER + "\n"
    shown = terminal.wait_for("prompt 48")
    assert "thinking" in shown and "tokens/s" in shown and "</think>" not in shown
    terminal.say("Write the numbers from 1 to 4000, one after the other, and leave none out. " * 150)  # a second's work
    end = time.monotonic() + PATIENCE
    # Not `running`, which the engine tells when a step ends: the prompt is one step, and the answer may be short.
    while not gauge(nano_server, "http_open_answers") and terminal.process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("stopped")
    wait_until_idle(nano_server)
    terminal.say("/reset")
    terminal.say(QUESTION)
    while (line := terminal.stdout.readline()) and line != ANSWER + "\n":
        pass  # what the interrupted answer had said
    assert line == ANSWER + "\n"
    terminal.say("/exit")
    assert terminal.process.wait(20) == 0


def test_chat_over_a_server_shows_calls_and_sends_results(
    nano_server: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    file = tmp_path / "tools.json"
    tool = {"name": "get_weather", "description": "Get the current weather of a city", "parameters": WEATHER}
    file.write_text(json.dumps(tool), encoding="utf-8")
    typed = iter(["What is the weather in Paris?", '{"temperature": 21, "condition": "sunny"}', "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert command("chat", "--server", nano_server, "--temperature", "0", "--tools", str(file)) == 0
    shown = capsys.readouterr()
    assert "→ get_weather" in shown.err and '  "city": "Paris"' in shown.err
    assert "sunny" in shown.out
    assert command("chat", "--server", nano_server, "--model", "other") == 2
    assert "'other' is not served" in capsys.readouterr().err


# -- bench ------------------------------------------------------------------------------------------------------------


def test_bench_reports_what_its_requests_were(nano_server: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--requests", "6", "--users", "3", "--max-tokens", "24", "--temperature", "0", "--warmup", "1"]
    assert command("bench", "--server", nano_server, *arguments, "--json", str(file)) == 0
    shown = capsys.readouterr().out
    content = json.loads(file.read_text(encoding="utf-8"))
    figures, requests = content["figures"], content["requests"]
    assert [request["number"] for request in requests] == list(range(6))
    assert figures["answered"] == 6 and figures["errors"] == {}
    assert figures["output_tokens"] == sum(request["output_tokens"] for request in requests)
    assert all(1 <= request["output_tokens"] <= 24 for request in requests)
    assert all(request["due"] < request["first"] <= request["last"] <= request["end"] for request in requests)
    for request in requests:  # the gaps lead from the first arrival to the last one
        assert sum(gap for gap, _ in request["gaps"]) == pytest.approx(request["last"] - request["first"], abs=1e-6)
        assert sum(tokens for _, tokens in request["gaps"]) < request["output_tokens"]
    assert 0 < figures["ttft"]["p50"] <= figures["ttft"]["p99"] <= figures["latency"]["max"]
    assert figures["drafts"]["rounds"] > 0 and 0 <= figures["drafts"]["accepted_share"] <= 1
    assert content["server"]["model"] == "nano" and content["setting"]["users"] == 3
    assert "first token (TTFT)" in shown and "6 of 6" in shown and "accepted a round" in shown


def test_bench_counts_what_was_refused_and_says_so_with_its_exit_code(nano_server: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "prompts"
    file.write_text('{"prompt": "Hello", "max_tokens": 3}\n{"prompt": "Hello", "max_tokens": 9999}\n', encoding="utf-8")
    assert command("bench", "--server", nano_server, "--requests", "4", "--prompts", str(file), "--warmup", "0") == 1
    shown = capsys.readouterr()
    assert "2 of 4; 2 x 400 context_length_exceeded" in shown.out
    assert "this adds 9999" in shown.err


def test_an_open_loop_sends_when_its_seed_says_and_not_when_it_is_answered(nano_server: str) -> None:
    load = Load(address=Address.parse(nano_server), rate=50.0, seed=3, fields={"model": "nano", "max_tokens": 2})

    def due(seed_load: Load) -> list[Record]:
        records, _ = asyncio.run(run(seed_load, builtin()[:8], lambda _: None))
        assert all(record.error is None for record in records)
        return records

    first, second = due(load), due(load)
    assert [record.due for record in first] == [record.due for record in second] and first[0].due == 0.0
    assert len({record.due for record in first}) == 8 and first[-1].due < 2.0
    assert all(record.first is not None and record.first > record.due for record in first)


def test_a_run_is_bounded_and_leaves_nothing_on_the_server(nano_server: str) -> None:
    told: list[Record] = []
    address = Address.parse(nano_server)
    for rate in (None, 100.0):
        load = Load(address=address, users=2, rate=rate, max_seconds=1.0, fields=LONG)
        began = time.monotonic()
        records, _ = asyncio.run(run(load, [STORY] * 3, told.append))
        assert time.monotonic() - began < 20
        assert {record.error for record in records} == {"cut"} and told == []
        wait_until_idle(nano_server)
    load = Load(address=address, users=1, request_seconds=0.5, fields=LONG)
    (record,), _ = asyncio.run(run(load, [STORY], told.append))
    assert record.error == "timeout" and told == [record]
    wait_until_idle(nano_server)
