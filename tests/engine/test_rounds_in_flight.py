"""Rounds that begin before the one before them has ended: whatever happens meanwhile, tokens are those of a lone run on
the runner's own path, nothing of a sequence that is over is left, and a step that fails takes only its own with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from integrity import assert_all_free
from real_engine import cold, finish, text

pytest.importorskip("triton")

from round_engines import RoundEngine

from deepinfer.cache.host_memory import WindowArena
from deepinfer.config import EngineConfig
from deepinfer.engine.errors import EngineStepError
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model import load_model
from deepinfer.model.backbone import DeepseekV41

CONFIG = EngineConfig(
    max_model_len=420,
    max_num_seqs=3,
    max_num_batched_tokens=160,
    num_blocks=9,
    window_entries=3,
    drafts=2,
    graph_rows=9,
    seed=0,
    overlap=True,
)
GREEDY = SamplingParams(temperature=0, max_tokens=12)

CHECKPOINT: Path
MODEL: DeepseekV41  # loaded once; hypothesis makes many machines


@pytest.fixture(scope="module", autouse=True)
def model(draft_checkpoint: Path):
    global CHECKPOINT, MODEL
    CHECKPOINT, MODEL = draft_checkpoint, load_model(draft_checkpoint, drafts=True)
    yield MODEL
    del CHECKPOINT, MODEL


def expected(prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """Of each completion."""
    return cold(MODEL, prompt, params, max_model_len=CONFIG.max_model_len)


class Machine(RuleBasedStateMachine):
    """Few blocks and windows, prompts and whole conversations that share beginnings, decodes across blocks."""

    changes: ClassVar[dict[str, Any]] = {}
    behind: ClassVar[list[bool]]

    def __init__(self) -> None:
        super().__init__()
        self.made = RoundEngine(CHECKPOINT, MODEL, dataclasses.replace(CONFIG, **self.changes), right=0.8)
        self.engine = self.made.engine
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.aborted: set[str] = set()
        self.said: list[list[int]] = []  # prompts with their answers
        self.number = 0

    def check(self) -> None:
        self.engine.cache.check_integrity()
        for name in list(self.requests):
            if self.engine.is_unfinished(name):
                continue
            prompt, params = self.requests.pop(name)
            outputs = self.engine.pop_output(name).outputs
            for completion, tokens in zip(outputs, expected(prompt, params), strict=True):
                if completion.finish_reason == "abort":
                    assert name in self.aborted and completion.token_id == tokens[: len(completion.token_id)]
                else:
                    assert completion.token_id == tokens
                    ends = (*params.stop_token_ids, MODEL.config.eos_token_id)
                    assert completion.finish_reason == ("stop" if tokens[-1] in ends else "length")
                    self.said.append(prompt + tokens)

    def start(self, prompt: list[int], params: SamplingParams) -> None:
        expected(prompt, params)  # what is drafted, with mistakes
        self.number += 1
        self.engine.add_request(f"{self.number}", prompt, params)
        self.requests[f"{self.number}"] = prompt, params
        self.check()

    @rule(
        shared=st.sampled_from([0, 120, 128, 250]),
        own=st.integers(1, 20),
        seed=st.integers(0, 2),
        most=st.integers(1, 30),
        drawn=st.sampled_from([False] * 5 + [True]),  # noise takes the interpreter long
        penalty=st.sampled_from([1.0] * 7 + [1.3]),
        stops=st.booleans(),
        n=st.sampled_from([1, 1, 1, 2]),
    )
    def add(self, shared, own, seed, most, drawn, penalty, stops, n) -> None:
        params = SamplingParams(
            n=n,
            max_tokens=most,
            temperature=0.8 if drawn else 0.0,
            seq_seed=seed,
            repetition_penalty=penalty,  # no round serves it
            stop_token_ids=list(range(seed, 512, 17)) if stops else [],
        )
        self.start(list(text(0)[:shared] + text(10 + seed)[:own]), params)

    @precondition(lambda self: self.said)
    @rule(pick=st.integers(0, 99), more=st.integers(1, 5), most=st.integers(1, 12))
    def go_on(self, pick, more, most) -> None:
        """A conversation whose last answer is in the cache."""
        prompt = self.said[pick % len(self.said)] + list(text(30)[:more])
        if len(prompt) + most <= CONFIG.max_model_len and MODEL.config.image_token_id not in prompt:
            self.start(prompt, SamplingParams(temperature=0, max_tokens=most))

    @rule(steps=st.integers(1, 12))
    def step(self, steps) -> None:
        for _ in range(steps):
            self.engine.step()
            self.check()

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick) -> None:
        name = sorted(self.requests)[pick % len(self.requests)]
        self.aborted.add(name)
        self.engine.abort(name)
        self.check()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(pick=st.integers(0, 99))
    def preempt(self, pick) -> None:
        running = self.engine.scheduler.running
        self.engine.scheduler._preempt(running[pick % len(running)])
        self.check()

    def teardown(self) -> None:
        finish(self.engine)
        self.check()
        assert not self.requests
        assert_all_free(self.engine.cache)
        self.behind.extend(self.made.behind)
        self.engine.close()


VARIANTS = {
    "no drafts": {"drafts": 0, "graph_rows": 3},
    "drafts": {},
    "drafts with offload": {"offload_bytes": 1 << 30, "offload_tokens": 1},
}


def search(changes: dict[str, Any], examples: int, derandomize: bool) -> None:
    behind: list[bool] = []
    machine = type("Machine", (Machine,), {"changes": changes, "behind": behind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=16,
            deadline=None,
            derandomize=derandomize,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert behind.count(True) > 2 * examples, "they began before the one before them had ended"


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_tokens_are_those_of_a_lone_run_on_the_runners_own_path_whatever_happens(changes) -> None:
    search(changes, examples=5, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_same_at_length(changes) -> None:
    search(changes, examples=15, derandomize=False)


def test_a_conversation_goes_on_from_the_window_that_a_round_left() -> None:
    """Its answer passed a multiple of 128 in rounds, with drafts accepted around it. The next turn computes nothing
    below it again; what it finds there are the bits that the runner's own path leaves."""
    prompt, params = list(text(4)[:236]), SamplingParams(temperature=0, max_tokens=40)
    (answer,) = expected(prompt, params)
    again = prompt + answer + list(text(5)[:136])
    left: list[list[tuple[int, torch.Tensor]]] = []
    for rounds in (True, False):
        made = RoundEngine(CHECKPOINT, MODEL, CONFIG, right=0.9)
        windows = made.runner.storage.stored_windows
        left.append(_saved(windows))
        if not rounds:
            made.runner.rounds = None
        made.engine.add_request("first", prompt, params)
        finish(made.engine)
        assert made.engine.pop_output("first").outputs[0].token_id == answer
        made.engine.add_request("second", again, GREEDY)
        finish(made.engine)
        output = made.engine.pop_output("second")
        assert [output.outputs[0].token_id] == expected(again, GREEDY)
        assert output.cached_tokens == 256 and output.metrics.replay_tokens == 0
        assert made.behind.count(True) > 4 or not rounds
        made.engine.close()
    (boundary, rows), *_ = left[0]
    assert boundary == left[1][0][0] == 256
    assert torch.equal(rows, left[1][0][1])


def _saved(windows: WindowArena) -> list[tuple[int, torch.Tensor]]:
    """Boundary and rows of every window that will be stored."""
    saved, save = [], windows.save

    def kept(slot: int, boundary: int, entry: int) -> None:
        save(slot, boundary, entry)
        saved.append((boundary, windows.rows[entry].clone()))

    windows.save = kept  # type: ignore[method-assign]
    return saved


def test_a_sequence_that_gives_its_blocks_up_while_its_round_is_in_flight_goes_on_where_it_stood() -> None:
    """Its state goes to host memory with what the round wrote, and the round's tokens are drawn again."""
    made = RoundEngine(
        CHECKPOINT, MODEL, dataclasses.replace(CONFIG, offload_bytes=1 << 30, offload_tokens=1), right=0.9
    )
    engine, params = made.engine, dataclasses.replace(GREEDY, max_tokens=60)
    prompts = [list(text(20 + i)[:30]) for i in range(2)]
    for i, prompt in enumerate(prompts):
        expected(prompt, params)
        engine.add_request(f"{i}", prompt, params)
    for turn in range(4):
        for _ in range(4):
            engine.step()
        assert made.behind[-1]
        scheduler = engine.scheduler
        scheduler._preempt(scheduler.running[turn % 2])
    finish(engine)
    assert scheduler.num_offloaded >= 3
    for i, prompt in enumerate(prompts):
        assert [engine.pop_output(f"{i}").outputs[0].token_id] == expected(prompt, params)
    assert_all_free(engine.cache)
    engine.close()


@pytest.mark.parametrize("where", ["begin", "end"])
def test_a_round_that_fails_ends_what_is_under_way_and_the_next_request_is_answered(monkeypatch, where) -> None:
    """Also where the round behind it is with the device already."""
    made = RoundEngine(CHECKPOINT, MODEL, CONFIG, right=0.9)
    rounds = made.runner.rounds
    assert rounds is not None
    name = {"begin": "fill", "end": "collect"}[where]
    call, calls = getattr(rounds._rounds, name), []

    def failing(*arguments: Any) -> Any:
        calls.append(None)
        if where == "begin" and len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        pending = call(*arguments)
        if where == "end" and len(calls) == 4:
            monkeypatch.setattr(pending, "result", _broken)
        return pending

    monkeypatch.setattr(rounds._rounds, name, failing)
    prompts = [list(text(6 + i)[:40]) for i in range(3)]
    for i, prompt in enumerate(prompts):
        made.engine.add_request(f"lost {i}", prompt, dataclasses.replace(GREEDY, max_tokens=60))
    with pytest.raises(EngineStepError, match="out of memory" if where == "begin" else "the report is lost"):
        finish(made.engine)
    assert_all_free(made.engine.cache)
    assert made.behind[3], "it was in flight behind another one"
    for i, prompt in enumerate(prompts):
        made.engine.add_request(f"{i}", prompt, GREEDY)
    finish(made.engine)
    for i, prompt in enumerate(prompts):
        assert [made.engine.pop_output(f"{i}").outputs[0].token_id] == expected(prompt, GREEDY)
    assert_all_free(made.engine.cache)
    made.engine.close()


def _broken() -> Any:
    raise RuntimeError("the report is lost")
