"""An engine process must outlive whatever its clients do, and end as it is told to. A real core, and raw messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import process_cores as cores
import pytest
import zmq

from deepinfer.engine import wire
from deepinfer.engine.messages import EngineRequest
from deepinfer.engine.pulse import Pulse
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step_output import FINISH_CODES
from deepinfer.metrics import EngineStats

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
MANY = 60
LONG = SamplingParams(temperature=0.0, max_tokens=MANY, ignore_eos=True)


class RawClient:
    """Says exactly what a test wants said, and keeps what comes."""

    def __init__(self, endpoint: str, hello: bool = True) -> None:
        self._identity = os.urandom(4)
        self._pulse = Pulse(endpoint, self._identity)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, self._identity)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.messages: list[wire.ToClient] = []
        if hello:
            self.say(wire.Hello(client="test"))
            first = self.wait(wire.Heartbeat | wire.Ready, seconds=120)  # a process starts, on a busy machine perhaps
            self._pulse.start()
            if not isinstance(first, wire.Ready):
                self.wait(wire.Ready, seconds=120)

    def say(self, message: wire.ToEngine) -> None:
        self.socket.send_multipart(wire.encode(message))

    def add(self, number: int, prompt: list[int], params: SamplingParams = GREEDY) -> None:
        self.socket.send_multipart(add_frames(number, prompt, params))

    def read(self, seconds: float) -> wire.ToClient | None:
        if not self.socket.poll(int(seconds * 1000)):
            return None
        message = wire.decode_to_client(self.socket.recv_multipart())
        self.messages.append(message)
        if isinstance(message, wire.Outputs):
            output = message.output
            for number, token, finish in zip(output.numbers, output.token_ids, output.finish, strict=True):
                self.tokens.setdefault(int(number), []).extend([int(token)] if token >= 0 else [])
                if finish:
                    self.ends[int(number)] = str(FINISH_CODES[finish])
        return message

    def wait(self, kind: Any, seconds: float = 30.0) -> Any:
        """The next message of a kind."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            message = self.read(0.2)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind} within {seconds} s")

    def finish(self, *numbers: int, seconds: float = 60.0) -> None:
        """Reads until these requests have ended."""
        until = time.monotonic() + seconds
        while not self.ends.keys() >= set(numbers):
            assert time.monotonic() < until, f"only {sorted(self.ends)} ended"
            message = self.read(0.2)
            assert not (isinstance(message, wire.Refused) and message.number in numbers), message

    def stats(self) -> EngineStats:
        self.say(wire.StatsRequest(tag=1))
        stats: EngineStats = self.wait(wire.Stats).stats
        return stats

    def silence(self) -> None:
        self._pulse.stop()

    def close(self) -> None:
        self._pulse.stop()
        self._context.destroy(linger=200)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.say(wire.Bye())
        self.close()


def add_frames(number: int, prompt: list[int], params: SamplingParams) -> tuple[bytes, bytes]:
    request = EngineRequest(
        number=number,
        request_id=str(number),
        prompt_token_ids=np.array(prompt, np.int32),
        params=params,
        max_tokens=params.max_tokens or 1,
    )
    return wire.encode_add(number, request)


def wait_until(condition: Any, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, BaseProcess]]:
    with cores.running(cores.faulty(tiny_checkpoint), tmp_path_factory.mktemp("engine")) as started:
        yield started
        assert started[1].is_alive()  # whatever the tests did to it


@pytest.fixture
def endpoint(engine: tuple[str, BaseProcess]) -> Iterator[str]:
    """The shared engine; a test must leave it empty."""
    yield engine[0]
    with RawClient(engine[0]) as client:
        wait_until(lambda: is_empty(client.stats()))


def is_empty(stats: EngineStats) -> bool:
    now = stats.totals
    return now.running == now.waiting == now.blocks_used == now.slots_used == 0


def prompt(seed: int, length: int = 20) -> list[int]:
    return np.random.default_rng(seed).integers(5, 500, length).tolist()


# -- strangers and mistakes -------------------------------------------------------------------------------------------


def test_a_bad_message_does_not_hurt_others(endpoint: str) -> None:
    with RawClient(endpoint) as good:
        good.add(0, prompt(1))
        good.finish(0)
        expected = good.tokens[0]
        stranger = RawClient(endpoint, hello=False)
        good.add(1, prompt(1))
        nested = b"\x91" * 100_000 + b"\xc0"
        for frames in ([b""], [b"", b""], [b"x" * 1000] * 5, [wire.VERSION, b"\xc1"], [wire.VERSION, nested]):
            stranger.socket.send_multipart(frames)
            good.socket.send_multipart(frames)  # also from one that is known
        for kind in ("add", "abort", "drain", "statsrequest", "nothing"):  # right names, wrong contents
            payload = msgspec.msgpack.encode({"type": kind, "number": "one", "request": [1, 2, 3], "tag": None})
            stranger.socket.send_multipart([wire.VERSION, payload])
            good.socket.send_multipart([wire.VERSION, payload])
        good.finish(1)
        assert good.tokens[1] == expected
        refusals = [message for message in good.messages if isinstance(message, wire.Refused)]
        assert len(refusals) >= 10 and all(refusal.number is None for refusal in refusals)
        stranger.close()


def test_another_release_is_refused_with_both_versions_named(endpoint: str) -> None:
    stranger = RawClient(endpoint, hello=False)
    stranger.socket.send_multipart([b"deepinfer-engine/999", b"whatever it says"])
    refusal = stranger.wait(wire.Refused)
    assert refusal.field == "protocol"
    assert "deepinfer-engine/999" in refusal.message and wire.VERSION.decode() in refusal.message
    stranger.close()


def test_nobody_is_served_without_a_hello(endpoint: str) -> None:
    stranger = RawClient(endpoint, hello=False)
    stranger.add(0, prompt(1))
    refusal = stranger.wait(wire.Refused)
    assert (refusal.number, refusal.field) == (None, "hello")
    stranger.close()


def bad_request(**changes: Any) -> bytes:
    """A request as it travels, with fields that a sender of ours would never let pass."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.decode(add_frames(0, [5, 6], GREEDY)[1], type=wire.Add).request)
    params = changes.pop("params", {})
    return msgspec.msgpack.encode({**fields, **changes, "params": {**fields["params"], **params}})


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"params": {"temperature": -1.0}}, "temperature", "finite number >= 0"),
        ({"params": {"n": 0}}, "n", "whole number"),
        ({"params": {"temperature": "hot"}}, "request", "temperature"),
        ({"prompt_token_ids": ["<i4", b""]}, "prompt_token_ids", "n >= 1"),
        ({"prompt_token_ids": ["<i4", b"abc"]}, "request", "prompt_token_ids"),
        ({"prompt_token_ids": ["<i8", b"12345678"]}, "prompt_token_ids", "int32"),
        ({"prompt_token_ids": ["|O", b"12345678"]}, "request", "only arrays of numbers"),
        ({"prompt_token_ids": ["<i4", (9999).to_bytes(4, "little")]}, "prompt_token_ids", "entry 0"),
        ({"prompt_token_ids": ["<i4", bytes(4 * 512)]}, "prompt", "512"),
        ({"prompt_token_ids": 7}, "request", "prompt_token_ids"),
        ({"params": {"regex": "a", "ebnf": 'root ::= "b"', "ignore_eos": False}}, "ebnf", "together with regex"),
        ({"params": {"regex": "a" * 10_000, "ignore_eos": False}}, "regex", "longer than"),
        ({"params": {"structure": {"content": {"kind": "regex", "source": 5}}}}, "request", "structure"),
        ({"params": {"structure": {"tool_mode": "always"}}}, "request", "structure"),
    ],
)
def test_a_bad_request_is_refused_under_its_number(endpoint: str, changes: dict, field: str, words: str) -> None:
    with RawClient(endpoint) as client:
        client.say(wire.Add(number=77, request=msgspec.Raw(bad_request(**changes))))
        refusal = client.wait(wire.Refused)
        assert (refusal.number, refusal.field) == (77, field), refusal.message
        assert words in refusal.message
        client.add(77, prompt(2))  # nothing of it is left, its number is free
        client.finish(77)


def test_a_grammar_that_makes_no_sense_is_refused_under_its_number_and_the_others_go_on(endpoint: str) -> None:
    """That shows only when it is compiled, after the request was let in."""
    good = SamplingParams(temperature=0.0, max_tokens=20, regex="[a-f]{9}")
    with RawClient(endpoint) as client:
        before = client.stats()
        client.add(1, prompt(1), LONG)
        for number, fields in ((2, {"regex": "("}), (3, {"json_schema": "{"}), (4, {"ebnf": "x", "n": 3})):
            client.add(number, prompt(2), SamplingParams(max_tokens=8, **fields))
        client.add(5, prompt(3), good)
        client.finish(1, 5)
        assert len(client.tokens[1]) == MANY and client.ends[5] == "stop"
        refused = {m.number: m.field for m in client.messages if isinstance(m, wire.Refused)}
        assert refused == {2: "regex", 3: "json_schema", 4: "ebnf"}
        assert not client.tokens.keys() & refused.keys() and not client.ends.keys() & refused.keys()
        client.add(2, prompt(2))  # nothing of it is left, its number is free
        client.finish(2)
        stats = client.stats()
        for name in ("regex", "json_schema", "ebnf"):
            assert stats.rejections[name] == before.rejections.get(name, 0) + 1
        assert stats.grammar_cache["error"] == before.grammar_cache["error"] + 3
        assert stats.grammar_cache["miss"] == before.grammar_cache["miss"] + 1


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_leaves_nothing(endpoint: str) -> None:
    with RawClient(endpoint) as client:
        for number in range(20):
            client.add(number, prompt(1), SamplingParams(max_tokens=50, n=2, regex=f"[a-z]{{{number + 1},400}}"))
            client.say(wire.Abort(number=number))
        client.add(100, prompt(1))
        client.finish(100)
        wait_until(lambda: is_empty(client.stats()))
        assert set(client.ends) == {100}


def test_a_number_in_use_is_refused_and_its_first_owner_goes_on(endpoint: str) -> None:
    with RawClient(endpoint) as client:
        client.add(5, prompt(3), LONG)
        client.add(5, prompt(4))
        refusal = client.wait(wire.Refused)
        assert (refusal.number, refusal.field) == (5, "number")
        client.finish(5)
        assert len(client.tokens[5]) == MANY


def test_refusals_are_counted_by_reason(endpoint: str) -> None:
    with RawClient(endpoint) as client:
        before = client.stats().rejections.get("n", 0)
        client.say(wire.Add(number=0, request=msgspec.Raw(bad_request(params={"n": -3}))))
        client.wait(wire.Refused)
        assert client.stats().rejections["n"] == before + 1


# -- several clients --------------------------------------------------------------------------------------------------


def test_clients_may_use_the_same_numbers(endpoint: str) -> None:
    with RawClient(endpoint) as first, RawClient(endpoint) as second:
        alone: list[list[int]] = []
        for seed in (10, 11):
            first.add(seed, prompt(seed))
            first.finish(seed)
            alone.append(first.tokens[seed])
        first.add(0, prompt(10))
        second.add(0, prompt(11))
        first.finish(0)
        second.finish(0)
        assert [first.tokens[0], second.tokens[0]] == alone
        assert alone[0] != alone[1]


def test_what_a_step_brings_comes_in_one_message(endpoint: str) -> None:
    with RawClient(endpoint) as client:
        before = client.stats().steps
        for number in range(4):
            client.add(number, prompt(number))
        client.finish(0, 1, 2, 3)
        outputs = [message for message in client.messages if isinstance(message, wire.Outputs)]
        assert len(outputs) <= client.stats().steps - before
        assert max(len(message.output) for message in outputs) == 4
        assert all(len(client.tokens[number]) == 8 for number in range(4))


def test_an_aborted_request_says_nothing_more_and_frees_its_blocks(endpoint: str) -> None:
    with RawClient(endpoint) as client:
        client.add(0, prompt(5), SamplingParams(temperature=0.0, max_tokens=MANY, n=3, ignore_eos=True))
        wait_until(lambda: client.stats().totals.running == 3)
        client.say(wire.Abort(number=0, index=1))
        wait_until(lambda: client.stats().totals.running == 2)
        client.say(wire.Abort(number=0))
        client.say(wire.Abort(number=0))
        client.say(wire.Abort(number=123456))
        wait_until(lambda: is_empty(client.stats()))


DOOMED = """
import sys, time, zmq
endpoint, *frames = sys.argv[1], *(bytes.fromhex(text) for text in sys.argv[2:])
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(endpoint)
for at in range(0, len(frames), 2):
    socket.send_multipart(frames[at : at + 2])
print("sent", flush=True)
while True:
    time.sleep(0.2)
    socket.send_multipart(frames[:2])
"""


@pytest.mark.parametrize("death", ["kill -9", "silence"])
def test_a_client_that_dies_has_its_requests_aborted_and_its_blocks_freed(endpoint: str, death: str) -> None:
    slow = add_frames(0, [cores.SLOW, *prompt(6)], LONG)
    script = [sys.executable, "-c", DOOMED, endpoint, *(f.hex() for f in (*wire.encode(wire.Hello()), *slow))]
    with RawClient(endpoint) as watcher, subprocess.Popen(script, stdout=subprocess.PIPE) as doomed:
        try:
            assert doomed.stdout is not None and doomed.stdout.readline() == b"sent\n"
            wait_until(lambda: watcher.stats().totals.running == 1)
            died = time.monotonic()
            os.kill(doomed.pid, signal.SIGKILL if death == "kill -9" else signal.SIGSTOP)
            wait_until(lambda: is_empty(watcher.stats()))
            assert time.monotonic() - died < 2.0
        finally:
            doomed.kill()


def test_a_client_that_was_taken_for_dead_is_told_so_when_it_comes_back(endpoint: str) -> None:
    client = RawClient(endpoint)
    client.silence()
    time.sleep(2.2)  # not a word
    client.add(0, prompt(1))
    assert client.wait(wire.Refused).field == "hello"
    client.close()


# -- steps that fail or hang ------------------------------------------------------------------------------------------


def test_a_step_error_reaches_its_requests_and_the_engine_goes_on(endpoint: str) -> None:
    with RawClient(endpoint) as first, RawClient(endpoint) as second:
        first.add(0, prompt(7), LONG)
        second.add(9, prompt(8), LONG)
        wait_until(lambda: second.stats().totals.running == 2)
        first.add(1, [cores.FAILS, *prompt(9)])
        failed = first.wait(wire.Failed)
        assert sorted(failed.numbers) == [0, 1] and "on fire" in failed.message
        assert second.wait(wire.Failed).numbers == [9]
        second.add(10, prompt(8))
        second.finish(10)
        assert len(second.tokens[10]) == 8


def test_a_hung_step_shows_in_the_heartbeat_and_is_not_taken_for_death(endpoint: str) -> None:
    with RawClient(endpoint) as client:
        client.add(0, [cores.HANGS, *prompt(1)])
        ages, until = [0.0], time.monotonic() + 2 * cores.HANG_SECONDS
        while 0 not in client.ends and time.monotonic() < until:
            ages.append(client.wait(wire.Heartbeat).last_step_age)
        client.finish(0)
        assert cores.HANG_SECONDS - 1 < max(ages) < cores.HANG_SECONDS + 1
        assert len(client.tokens[0]) == 8
        time.sleep(0.5)
        while client.read(0) is not None:
            pass
        assert client.wait(wire.Heartbeat).last_step_age == 0.0  # without work no step is late


# -- the end ----------------------------------------------------------------------------------------------------------


def test_steps_that_all_fail_end_the_process_with_the_reason(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with cores.running(cores.faulty(tiny_checkpoint), tmp_path) as (endpoint, process):
        client = RawClient(endpoint)
        for number in range(3):
            client.add(number, [cores.FAILS])
            client.wait(wire.Failed)
        fatal = client.wait(wire.Fatal)
        assert "3 steps failed in a row" in fatal.message and "on fire" in fatal.message
        process.join(10)
        assert process.exitcode == 1
        client.close()


def test_sigterm_finishes_what_runs_and_refuses_what_comes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with cores.running(cores.tiny(tiny_checkpoint), tmp_path) as (endpoint, process):
        client = RawClient(endpoint)
        client.add(0, prompt(1), LONG)
        wait_until(lambda: client.stats().totals.running == 1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        wait_until(lambda: client.wait(wire.Heartbeat).state == "draining")
        client.add(1, prompt(2))
        refusal = client.wait(wire.Refused)
        assert refusal.number == 1 and refusal.draining and "draining" in refusal.message
        client.finish(0)
        assert client.ends[0] == "length" and len(client.tokens[0]) == MANY
        client.wait(wire.Drained)
        process.join(10)
        assert process.exitcode == 0
        client.close()


def test_sigterm_refuses_nothing_that_was_sent_before_it(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with cores.running(cores.tiny(tiny_checkpoint), tmp_path) as (endpoint, process):
        client = RawClient(endpoint)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        for number in range(20):
            client.add(number, prompt(number))
        time.sleep(0.3)  # they lie in the socket
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        client.finish(*range(20))
        assert all(len(client.tokens[number]) == 8 for number in range(20))
        client.wait(wire.Drained)
        process.join(10)
        assert process.exitcode == 0
        client.close()


def test_a_failed_start_is_told_at_once_and_a_signal_cuts_the_wait_short(tmp_path: Path) -> None:
    with cores.running(cores.failing_late_core, tmp_path) as (endpoint, process):
        client = RawClient(endpoint, hello=False)
        client.say(wire.Hello(client="test"))
        assert "no such layer" in client.wait(wire.Fatal).message
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        process.join(10)
        assert process.exitcode == 1
        client.close()


def test_a_drain_that_takes_too_long_ends_the_rest(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with cores.running(cores.faulty(tiny_checkpoint), tmp_path, drain_timeout=0.5) as (endpoint, process):
        client = RawClient(endpoint)
        client.add(0, [cores.SLOW, *prompt(1)], LONG)
        wait_until(lambda: client.stats().totals.running == 1)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        client.finish(0)
        assert client.ends[0] == "abort" and 0 < len(client.tokens[0]) < MANY
        process.join(10)
        assert process.exitcode == 0
        client.close()


@pytest.mark.parametrize(
    "signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)], ids=["SIGTERM twice", "SIGINT"]
)
def test_who_is_in_a_hurry_ends_it_at_once(tiny_checkpoint: Path, tmp_path: Path, signals: tuple[int, ...]) -> None:
    with cores.running(cores.faulty(tiny_checkpoint), tmp_path) as (endpoint, process):
        client = RawClient(endpoint)
        client.add(0, [cores.SLOW, *prompt(1)], LONG)
        wait_until(lambda: client.stats().totals.running == 1)
        assert process.pid is not None
        for number in signals:
            os.kill(process.pid, number)
            time.sleep(0.3)
        client.finish(0, seconds=5)
        assert client.ends[0] == "abort"
        process.join(10)
        assert process.exitcode == 128 + signals[-1]
        client.close()


def test_two_engines_cannot_share_an_endpoint(engine: tuple[str, BaseProcess], tiny_checkpoint: Path) -> None:
    directory = Path(engine[0].removeprefix("ipc://")).parent
    with cores.running(cores.tiny(tiny_checkpoint), directory) as (_, second):
        second.join(20)
        assert second.exitcode == 1
    with RawClient(engine[0]) as client:
        client.add(0, prompt(1))
        client.finish(0)
