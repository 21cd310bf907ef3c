"""The client as asyncio code uses it, on real engine processes with the tiny model."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import process_cores as cores
import pytest

from deepinfer import LLM
from deepinfer.cache.events import CacheEvent
from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.engine.arguments import EngineArguments
from deepinfer.engine.client import AsyncEngineClient, EngineDeadError, EngineDrainingError
from deepinfer.engine.errors import EngineStepError, InvalidRequestError
from deepinfer.engine.model_core import ModelCore
from deepinfer.engine.outputs import SequenceDelta
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.settings import resolve_settings
from deepinfer.engine.stop import FinishReason
from deepinfer.engine.wire import ProtocolMismatchError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
MANY = 60
LONG = SamplingParams(temperature=0.0, max_tokens=MANY, ignore_eos=True)
SETTINGS = resolve_settings(
    EngineArguments(device="cpu", dtype="float32", max_model_len=512, max_num_seqs=8, max_num_batched_tokens=128),
    environ={},
)
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], seconds: float = 120.0) -> T:
    return asyncio.run(asyncio.wait_for(work, seconds))


def prompt(seed: int, length: int = 20) -> list[int]:
    return np.random.default_rng(seed).integers(5, 500, length).tolist()


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, BaseProcess]]:
    with cores.running(cores.faulty(tiny_checkpoint), tmp_path_factory.mktemp("engine")) as started:
        yield started
        assert started[1].is_alive()


@pytest.fixture
def endpoint(engine: tuple[str, BaseProcess]) -> Iterator[str]:
    """The shared engine; a test must leave it empty."""
    yield engine[0]

    async def check() -> None:
        async with await AsyncEngineClient.connect(engine[0], timeout=60) as client:
            await until_empty(client)

    run(check())


async def until_empty(client: AsyncEngineClient, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while True:
        now = (await client.stats()).totals
        if now.running == now.waiting == now.blocks_used == now.slots_used == 0:
            return
        assert time.monotonic() < until, now
        await asyncio.sleep(0.02)


async def until_running(client: AsyncEngineClient, count: int) -> None:
    while (await client.stats()).totals.running != count:
        await asyncio.sleep(0.02)


def together(deltas: list[SequenceDelta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


# -- answers ----------------------------------------------------------------------------------------------------------


def test_answers_through_the_process_equal_those_of_llm(endpoint: str, llm: LLM, tiny_checkpoint: Path) -> None:
    work = [
        (prompt(1), GREEDY),
        (prompt(2, 300), GREEDY.with_changes(max_tokens=20, logprobs=2)),
        (prompt(3), SamplingParams(max_tokens=12, seq_seed=7, n=3)),
        (prompt(4, 40), SamplingParams(max_tokens=12, seq_seed=8, top_p=0.9, prompt_logprobs=1)),
        (prompt(5), SamplingParams(max_tokens=12, temperature=0.0, presence_penalty=1.0, stop_token_ids=[7, 9])),
        (prompt(6), SamplingParams(max_tokens=30, temperature=0.0, stop=["e", "a"])),
    ]
    expected = llm.generate(
        prompt_token_ids=[ids for ids, _ in work], sampling_params=[params for _, params in work], use_tqdm=False
    )

    async def ask() -> list:
        tokenizer = Tokenizer.from_directory(tiny_checkpoint)
        async with await AsyncEngineClient.connect(endpoint, detokenizer=tokenizer.text_stream, timeout=60) as client:
            return await asyncio.gather(*(client.complete(ids, params) for ids, params in work))

    for theirs, ours in zip(run(ask()), expected, strict=True):
        assert theirs.outputs == ours.outputs
        assert theirs.prompt_logprobs == ours.prompt_logprobs
        assert theirs.prompt_token_ids == ours.prompt_token_ids
    assert any(completion.text for output in expected for completion in output.outputs)


def test_a_stream_adds_up_to_the_answer(endpoint: str, tiny_checkpoint: Path) -> None:
    async def ask() -> None:
        tokenizer = Tokenizer.from_directory(tiny_checkpoint)
        async with await AsyncEngineClient.connect(endpoint, detokenizer=tokenizer.text_stream) as client:
            params = SamplingParams(max_tokens=20, seq_seed=3, n=2, ignore_eos=True)
            outputs: list[Any] = []
            deltas = [d async for d in client.generate(prompt(1), params, on_output=outputs.append)]
            (output,) = outputs
            assert len(deltas) > 20  # it was streamed
            for completion in output.outputs:
                mine = [delta for delta in deltas if delta.index == completion.index]
                assert together(mine, completion.index) == completion.token_id
                assert "".join(delta.text for delta in mine) == completion.text
                assert [delta.finish_reason for delta in mine if delta.finish_reason] == ["length"]

    run(ask())


def test_a_reader_that_comes_late_gets_its_tokens_in_turns(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once they would keep the event loop from everybody else: 100,000 tokens are seconds of rendering."""
    monkeypatch.setattr("deepinfer.engine.client.MOST_AT_ONCE", 7)

    async def ask() -> None:
        async with await AsyncEngineClient.connect(endpoint, keep_outputs=False) as client:
            params = SamplingParams(max_tokens=MANY, seq_seed=3, n=2, ignore_eos=True, logprobs=2)
            others = 0

            async def other() -> None:
                nonlocal others
                while True:
                    others += 1
                    await asyncio.sleep(0)

            whole: list[SequenceDelta] = [delta async for delta in client.generate(prompt(1), params)]
            stream = client.generate(prompt(1), params)
            deltas = [await anext(stream)]
            await until_empty(client)  # the rest has come
            beside = asyncio.create_task(other())
            await asyncio.sleep(0)
            before = others
            deltas += [delta async for delta in stream]
            assert others - before >= 2 * MANY // 7 - 4
            beside.cancel()
            assert max(len(delta.token_ids) for delta in deltas) == 7
            for index in range(2):
                mine, theirs = ([d for d in some if d.index == index] for some in (deltas, whole))
                assert together(mine, index) == together(theirs, index)
                assert [x for d in mine for x in d.token_logprobs] == [x for d in theirs for x in d.token_logprobs]
                assert [x for d in mine for x in d.logprobs or ()] == [x for d in theirs for x in d.logprobs or ()]
                assert [d.finish_reason for d in mine][-1] == "length"

    run(ask())


def test_clients_at_the_same_time_get_their_own_answers(endpoint: str) -> None:
    async def ask() -> None:
        clients = [await AsyncEngineClient.connect(endpoint) for _ in range(3)]
        alone = [await clients[0].complete(prompt(seed), GREEDY) for seed in range(3)]
        jobs = [client.complete(prompt(seed), GREEDY) for seed in range(3) for client in clients]
        answers = await asyncio.gather(*jobs)
        for at, answer in enumerate(answers):
            assert answer.outputs == alone[at // 3].outputs
        for client in clients:
            await client.close()

    run(ask())


# -- leaving ----------------------------------------------------------------------------------------------------------


def test_cancelling_the_reader_frees_the_blocks(endpoint: str) -> None:
    async def leave() -> None:
        async with await AsyncEngineClient.connect(endpoint) as client:
            task = asyncio.create_task(client.complete([cores.SLOW, *prompt(1)], LONG))
            await until_running(client, 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until_empty(client)
            stream = client.generate(prompt(1), LONG)
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            await until_empty(client)

    run(leave())


def test_an_aborted_answer_ends_with_what_it_has(endpoint: str) -> None:
    async def abort() -> None:
        async with await AsyncEngineClient.connect(endpoint) as client:
            deltas = []
            async for delta in client.generate(prompt(1), LONG, request_id="mine"):
                deltas.append(delta)
                if len(deltas) == 3:
                    assert await client.abort("mine")
            assert deltas[-1].finish_reason == "abort" and 3 <= len(together(deltas)) < MANY
            assert not await client.abort("mine")
            await until_empty(client)
            assert (await client.complete(prompt(2), GREEDY, request_id="mine")).outputs[0].token_id  # free again

    run(abort())


def test_one_of_several_answers_can_be_ended_and_the_others_go_on(endpoint: str) -> None:
    async def ask() -> None:
        async with await AsyncEngineClient.connect(endpoint) as client:
            params = SamplingParams(max_tokens=MANY, seq_seed=3, n=3, ignore_eos=True)
            whole = await client.complete(prompt(1), params)
            outputs: list[Any] = []
            ended = False
            async for delta in client.generate(prompt(1), params, request_id="mine", on_output=outputs.append):
                if delta.index == 1 and not ended:
                    ended = await client.abort("mine", 1, FinishReason.STOP)
                    assert ended and not await client.abort("mine", 1)
            first, second, third = outputs[0].outputs
            assert second.finish_reason == "stop" and 1 <= len(second.token_id) < MANY
            for mine, expected in ((first, whole.outputs[0]), (third, whole.outputs[2])):
                assert mine.token_id == expected.token_id and mine.finish_reason == "length"
            await until_empty(client)

    run(ask())


def test_a_reader_that_comes_late_gets_everything_in_one_piece(endpoint: str) -> None:
    async def ask() -> None:
        async with await AsyncEngineClient.connect(endpoint) as client:
            expected = await client.complete(prompt(1), LONG.with_changes(logprobs=1))
            stream = client.generate(prompt(1), LONG.with_changes(logprobs=1))
            deltas = [await anext(stream)]
            await until_empty(client)  # it went on without us
            deltas += [delta async for delta in stream]
            assert len(deltas) == 2
            assert together(deltas) == expected.outputs[0].token_id
            assert [p for d in deltas for p in d.token_logprobs] == expected.outputs[0].token_logprobs
            assert [p for d in deltas for p in d.logprobs or []] == expected.outputs[0].logprobs
            assert deltas[-1].finish_reason == "length"

    run(ask())


def test_the_first_token_says_what_the_prefix_cache_spared(endpoint: str) -> None:
    async def ask() -> None:
        async with await AsyncEngineClient.connect(endpoint) as client:
            ids = prompt(78, 400)
            await client.complete(ids, GREEDY)
            outputs: list[Any] = []
            deltas = [delta async for delta in client.generate(ids, GREEDY, on_output=outputs.append)]
            assert deltas[0].cached_tokens == outputs[0].cached_tokens > 0

    run(ask())


def test_aborts_at_random_moments_leave_no_block_in_use(endpoint: str) -> None:
    chance = random.Random(5)

    async def one(client: AsyncEngineClient, number: int) -> None:
        await asyncio.sleep(chance.uniform(0, 2))
        params = LONG.with_changes(n=chance.choice((1, 1, 2)))
        job = asyncio.create_task(client.complete(prompt(number % 7, chance.randrange(1, 300)), params))
        await asyncio.sleep(chance.choice((0, 0, 0.001, 0.02, 0.3)) * chance.random())
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)

    async def storm() -> None:
        async with (
            await AsyncEngineClient.connect(endpoint) as first,
            await AsyncEngineClient.connect(endpoint) as second,
        ):
            steady = asyncio.create_task(first.complete(prompt(1), GREEDY))
            await asyncio.gather(*(one(chance.choice((first, second)), number) for number in range(250)))
            await until_empty(second, seconds=5)  # aborts do not queue behind new requests
            assert len((await steady).outputs[0].token_id) == 8

    run(storm())


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "params", "field"),
    [
        ([], GREEDY, "prompt_token_ids"),
        ([5, 512], GREEDY, "prompt_token_ids"),
        ([5, -1], GREEDY, "prompt_token_ids"),
        ([5, 2.5], GREEDY, "prompt_token_ids"),
        ([[5]], GREEDY, "prompt_token_ids"),
        ("text", GREEDY, "prompt_token_ids"),
        ([5, True], GREEDY, "prompt_token_ids"),
        ([5, 1 << 40], GREEDY, "prompt_token_ids"),
        ([5] * 512, GREEDY, "prompt"),
        ([5], {"n": 1}, "sampling_params"),
        ([5], {}, "sampling_params"),
        ([5], SamplingParams(stop="x"), "stop"),
        ([5], SamplingParams(min_tokens=600, max_tokens=None), "min_tokens"),
        ([5], SamplingParams(stop_token_ids=[512]), "stop_token_ids"),
        ([5], SamplingParams(logprobs=513), "logprobs"),
    ],
)
def test_a_refusal_travels_with_field_and_reason(endpoint: str, ids: Any, params: Any, field: str) -> None:
    async def ask() -> None:
        async with await AsyncEngineClient.connect(endpoint) as client:
            with pytest.raises(InvalidRequestError) as caught:
                await client.complete(ids, params)
            assert caught.value.field == field and caught.value.message
            assert len((await client.complete(prompt(1), GREEDY)).outputs[0].token_id) == 8

    run(ask())


def test_a_name_in_use_is_refused(endpoint: str) -> None:
    async def ask() -> None:
        async with await AsyncEngineClient.connect(endpoint) as client:
            first = asyncio.create_task(client.complete(prompt(1), LONG, request_id="mine"))
            await until_running(client, 1)
            with pytest.raises(InvalidRequestError, match="request_id: 'mine' is already in use"):
                await client.complete(prompt(2), GREEDY, request_id="mine")
            assert len((await first).outputs[0].token_id) == MANY

    run(ask())


def test_a_failed_step_is_an_error_of_its_requests_and_the_next_ones_work(endpoint: str) -> None:
    async def ask() -> None:
        async with await AsyncEngineClient.connect(endpoint) as client:
            first = asyncio.create_task(client.complete(prompt(1), LONG))
            await until_running(client, 1)
            with pytest.raises(EngineStepError, match="on fire"):
                await client.complete([cores.FAILS], GREEDY)
            with pytest.raises(EngineStepError, match="on fire"):
                await first
            assert len((await client.complete(prompt(1), GREEDY)).outputs[0].token_id) == 8

    run(ask())


# -- life and death ---------------------------------------------------------------------------------------------------


def test_a_busy_event_loop_is_not_taken_for_a_dead_client_nor_for_a_dead_engine(endpoint: str) -> None:
    async def ask() -> None:
        async with await AsyncEngineClient.connect(endpoint) as client:
            job = asyncio.create_task(client.complete([cores.SLOW, *prompt(1)], LONG))
            await until_running(client, 1)
            time.sleep(2.5)  # tokenising something huge, say
            assert len((await job).outputs[0].token_id) == MANY

    run(ask())


def test_nobody_at_the_endpoint_is_an_error_in_time(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match="no engine answers"):
        run(AsyncEngineClient.connect(f"ipc://{tmp_path}/nothing", timeout=0.5))
    assert time.monotonic() - begin < 5


def test_another_release_is_not_talked_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.engine.wire.VERSION", b"deepinfer-engine/0")
    with pytest.raises(ProtocolMismatchError, match="deepinfer-engine/0"):
        run(AsyncEngineClient.connect(endpoint))
    monkeypatch.undo()


def test_a_killed_engine_is_noticed_within_two_seconds_by_all_its_clients(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    async def watch() -> None:
        progress: list[str] = []
        owner = await AsyncEngineClient.start(
            ModelCore(path=tiny_checkpoint, settings=SETTINGS),
            on_progress=lambda stage, fraction: progress.append(stage),
        )
        assert {"weights", "cache"}.intersection(progress)
        assert owner.endpoint.startswith("ipc://") and owner.process is not None and owner.process.pid is not None
        directory = Path(owner.endpoint.removeprefix("ipc://")).parent
        assert directory.stat().st_mode & 0o077 == 0  # nobody else's
        guest = await AsyncEngineClient.connect(owner.endpoint)
        longest = LONG.with_changes(max_tokens=480)
        jobs = [asyncio.create_task(each.complete(prompt(1), longest)) for each in (owner, guest)]
        await until_running(guest, 2)
        asked = asyncio.create_task(guest.drain())
        os.kill(owner.process.pid, signal.SIGKILL)
        died = time.monotonic()
        for job in (*jobs, asked):
            with pytest.raises(EngineDeadError):
                await job
        assert time.monotonic() - died < 2.0
        assert not owner.is_alive and not guest.is_alive and owner.state == "dead"
        for client in (owner, guest):
            with pytest.raises(EngineDeadError):
                await client.complete(prompt(1), GREEDY)
            with pytest.raises(EngineDeadError):
                await client.stats()
            await client.close()
        assert not directory.exists()

    run(watch())


def test_a_model_that_cannot_be_loaded_says_why_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineDeadError, match="num_hidden_layers: must be at least 1"):
        run(AsyncEngineClient.start(cores.failing_core))
    (line,) = capfd.readouterr().err.splitlines()  # no traceback, though its owner ends it in its last moments
    assert "num_hidden_layers: must be at least 1" in line


def test_loading_takes_its_time_and_can_be_stopped(tmp_path: Path) -> None:
    async def wait(endpoint: str, process: BaseProcess) -> None:
        progress: list[tuple[str, float | None]] = []
        job = asyncio.create_task(
            AsyncEngineClient.connect(endpoint, on_progress=lambda *news: progress.append(news), timeout=60)
        )
        while ("weights", 0.25) not in progress:
            await asyncio.sleep(0.05)
        await asyncio.sleep(2.5)  # longer than the silence of a dead engine
        assert not job.done()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        with pytest.raises(EngineDeadError, match="stopped by SIGTERM while the model was loading"):
            await job
        process.join(10)
        assert process.exitcode == 128 + signal.SIGTERM

    with cores.running(cores.loading_core, tmp_path) as (endpoint, process):
        run(wait(endpoint, process))


def test_an_engine_can_be_reached_over_tcp(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def ask(endpoint: str) -> None:
        async with await AsyncEngineClient.connect(endpoint, timeout=60) as client:
            answer = await client.complete(prompt(1), GREEDY.with_changes(max_tokens=2))
            assert len(answer.outputs[0].token_id) == 2

    with cores.running(cores.tiny(tiny_checkpoint), tmp_path, endpoint=f"tcp://127.0.0.1:{port}") as (endpoint, _):
        run(ask(endpoint))


def test_a_core_is_described_by_the_arguments_of_llm(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = inspect.signature(LLM.__init__).parameters
    for name, ours in inspect.signature(ModelCore.of).parameters.items():
        assert name == "verbose" or ours.default == theirs[name].default, name
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tiny_checkpoint))
    for core in (ModelCore.of(num_blocks=9, prefix_mode="bounded"), ModelCore.of(tiny_checkpoint, num_blocks=9)):
        assert (core.path, core.settings.num_blocks, core.settings.max_num_seqs) == (tiny_checkpoint, 9, 32)
    assert ModelCore.of(prefix_mode="bounded").settings.prefix_caching == "bounded"
    with pytest.raises(TypeError, match="max_seqs"):
        ModelCore.of(tiny_checkpoint, max_seqs=3)  # type: ignore[call-arg]
    for wrong in ({"num_blocks": 0}, {"max_num_seqs": 2.5}, {"overlap": "yes"}, {"device": "abacus"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ModelCore.of(tiny_checkpoint, **wrong)


def test_the_example_runs(tiny_checkpoint: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "async_client.py"
    command = [sys.executable, str(script), "--model", str(tiny_checkpoint)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    *stream, cancelled, stats = done.stdout.splitlines()
    assert {line[:5] for line in stream} == {"'The ", "'def "}
    assert cancelled == "cancelled: True" and stats.endswith(" 0 requests running")


ORPHAN_MAKER = """
import asyncio, sys, time
import process_cores as cores
from deepinfer.engine.client import AsyncEngineClient

async def main():
    client = await AsyncEngineClient.start(cores.tiny(sys.argv[1]))
    print(client.process.pid, flush=True)
    time.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_an_engine_whose_owner_is_killed_does_not_stay_behind(tiny_checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(ORPHAN_MAKER)
    command = [sys.executable, str(script), str(tiny_checkpoint)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        engine = int(owner.stdout.readline())
        os.kill(engine, 0)  # it runs
        owner.kill()
    until = time.monotonic() + 10
    while is_running(engine):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """False for a process that is gone, and for one that nobody has waited for."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_drain_finishes_what_runs_and_then_the_engine_is_gone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    async def drain(endpoint: str, process: BaseProcess) -> None:
        client = await AsyncEngineClient.connect(endpoint, timeout=60)
        other = await AsyncEngineClient.connect(endpoint)
        job = asyncio.create_task(client.complete([cores.SLOW, *prompt(1)], LONG))
        await until_running(client, 1)
        drained = asyncio.create_task(client.drain())
        while other.state != "draining":
            await asyncio.sleep(0.02)
        for each in (client, other):  # told here already, and told by the engine
            with pytest.raises(EngineDrainingError):
                await each.complete(prompt(1), GREEDY)
        assert len((await job).outputs[0].token_id) == MANY
        await drained
        process.join(10)
        assert process.exitcode == 0
        with pytest.raises(EngineDrainingError):
            await client.complete(prompt(1), GREEDY)
        await client.close()
        await other.close()

    with cores.running(cores.faulty(tiny_checkpoint), tmp_path) as (endpoint, process):
        run(drain(endpoint, process))


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_metrics_join_the_engines_numbers_and_this_clients_requests(endpoint: str) -> None:
    async def read() -> None:
        async with await AsyncEngineClient.connect(endpoint, model="tiny") as client:
            before = (await client.stats()).totals.generated_tokens
            await client.complete(prompt(1), GREEDY)
            text = (await client.render_metrics()).decode()
            values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            labels = 'dp_rank="0",instance="0",model="tiny",role="mixed"'
            assert float(values[f"dsv_generation_tokens_total{{{labels}}}"]) == before + 8
            assert float(values[f"dsv_request_generation_tokens_sum{{{labels}}}"]) == 8
            assert float(values[f"dsv_inter_token_latency_seconds_count{{{labels}}}"]) == 7
            assert float(values[f"dsv_time_to_first_token_seconds_count{{{labels}}}"]) == 1
            assert 'finished_reason="length"' in text
            assert 'num_blocks="64"' in text and 'max_num_seqs="8"' in text

    run(read())


def test_a_step_that_hangs_shows_at_the_client(endpoint: str) -> None:
    async def watch() -> None:
        async with await AsyncEngineClient.connect(endpoint) as client:
            job = asyncio.create_task(client.complete([cores.HANGS, *prompt(1)], GREEDY))
            oldest = 0.0
            while not job.done():
                oldest = max(oldest, client.last_step_age)
                await asyncio.sleep(0.05)
            assert cores.HANG_SECONDS - 1 < oldest < cores.HANG_SECONDS + 1
            assert client.state == "ready"

    run(watch())


def test_events_tell_what_the_prefix_cache_holds(endpoint: str) -> None:
    ids = prompt(77, 300)

    async def listen() -> None:
        async with await AsyncEngineClient.connect(endpoint) as client:
            stored: list[CacheEvent] = []

            async def collect() -> None:
                async for events in client.events():
                    stored.extend(event for event in events if (event.kind, event.tier) == ("stored", "device"))

            listener = asyncio.create_task(collect())
            await client.stats()  # the subscription came before it
            answer = await client.complete(ids, GREEDY, salt="one")
            assert answer.cached_tokens == 0
            while sum(len(event.hashes) for event in stored) < 2:  # 300 tokens fill two blocks of 128
                await asyncio.sleep(0.02)
            listener.cancel()
            again = await client.complete(ids, GREEDY, salt="one")
            other = await client.complete(ids, GREEDY, salt="two")
            assert again.outputs == answer.outputs == other.outputs
            assert other.cached_tokens == 0

    run(listen())
