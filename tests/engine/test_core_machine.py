"""Whatever happens to requests and in whatever order, each finished one has the tokens of a lone run with a cold cache,
and the cache accounts for every block after every operation."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from integrity import assert_all_free
from real_engine import cold, finish, make_real_engine, text

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sequence import Status
from deepinfer.model import load_model

MODEL = None  # loaded once; hypothesis makes many machines


@pytest.fixture(scope="module", autouse=True)
def model(tiny_checkpoint: Path):
    global MODEL
    MODEL = load_model(tiny_checkpoint)
    yield MODEL
    MODEL = None


class CoreMachine(RuleBasedStateMachine):
    """Few blocks, few windows, prompts that share beginnings: hits, replays, evictions and preemptions all happen."""

    options: ClassVar[dict] = {}

    def __init__(self):
        super().__init__()
        tight = {"num_blocks": 9, "max_num_seqs": 3, "window_entries": 2, "max_num_batched_tokens": 200}
        self.engine = make_real_engine(MODEL, **tight | self.options)
        self.prompts: dict[str, tuple[list[int], SamplingParams]] = {}
        self.aborted: set[str] = set()

    def check(self):
        self.engine.cache.check_integrity()
        for name in list(self.prompts):
            if self.engine.is_unfinished(name):
                continue
            prompt, params = self.prompts.pop(name)
            output = self.engine.pop_output(name)
            expected = self.expected(prompt, params)
            for completion, tokens in zip(output.outputs, expected, strict=True):
                if completion.finish_reason == "abort":
                    assert name in self.aborted and completion.token_id == tokens[: len(completion.token_id)]
                else:
                    assert completion.finish_reason == "length" and completion.token_id == tokens

    def expected(self, prompt, params):
        return cold(MODEL, prompt, params, truncation=self.options.get("truncation", False), keep_tokens=28)

    @rule(
        base=st.integers(0, 1),
        shared=st.sampled_from([0, 1, 127, 128, 129, 250, 256, 300, 384, 400]),
        own=st.integers(1, 140),
        seed=st.integers(0, 2),
        n=st.sampled_from([1, 1, 1, 2]),
        most=st.integers(1, 30),
        warm=st.booleans(),
        priority=st.integers(0, 1),
        structured=st.sampled_from([False, False, True]),
    )
    def add(self, base, shared, own, seed, n, most, warm, priority, structured):
        prompt = list(text(base)[:shared] + text(10 + seed)[:own])
        params = SamplingParams(
            n=n,
            max_tokens=most,
            temperature=0.8 if warm else 0.0,
            seq_seed=seed,
            priority=priority,
            regex="the automaton's" if structured else None,
        )
        name = f"r{len(self.prompts)}-{self.engine.core.scheduler._num_steps}-{seed}-{own}-{shared}-{most}-{base}"
        name += structured * "-structured"
        if name in self.prompts:
            return
        if self.engine.core.config.drafts:
            self.expected(prompt, params)  # what is drafted, with mistakes
        self.engine.add_request(name, prompt, params)
        self.prompts[name] = (prompt, params)
        self.check()

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step()
            self.check()

    @precondition(lambda self: self.prompts)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick):
        name = sorted(self.prompts)[pick % len(self.prompts)]
        self.aborted.add(name)
        self.engine.abort(name)
        self.check()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(pick=st.integers(0, 99))
    def preempt(self, pick):
        running = self.engine.scheduler.running
        self.engine.scheduler._preempt(running[pick % len(running)])
        self.check()

    @rule()
    def forget_everything_cached(self):
        self.engine.cache.clear_prefix_cache()
        self.check()

    def teardown(self):
        finish(self.engine)
        self.check()
        assert not self.prompts
        assert_all_free(self.engine.cache)
        assert all(s is None or s.status is Status.FINISHED for s in self.engine.scheduler.by_slot)
        self.engine.core.shutdown()


VARIANTS = {
    "plain": {},
    "overlapped": {"overlap": True},
    "offload": {"offload_bytes": 12_000, "offload_tokens": 100},
    "overlapped with offload": {"overlap": True, "offload_bytes": 12_000, "offload_tokens": 1},
    "no windows kept": {"window_entries": 0},
    "truncated": {"truncation": True, "keep_tokens": 28},
    "fair": {"queue_policy": "fair", "long_prefill_tokens": 64, "prefill_interval": 2},
    "no prefix cache": {"prefix_caching": "off"},
    "drafts": {"drafts": 5},
    "drafts, overlapped with offload": {
        "drafts": 3,
        "varlen": True,
        "overlap": True,
        "offload_bytes": 12_000,
        "offload_tokens": 1,
    },
    # Not truncated: a preempted sequence then keeps other rows than a lone run does, and its logits differ a little.
    "drafts, overlapped, no windows kept": {"drafts": 2, "overlap": True, "window_entries": 0},
}


def check(options: dict, examples: int, search: bool = False) -> None:
    machine = type("Machine", (CoreMachine,), {"options": options})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            derandomize=not search,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_tokens_are_those_of_a_lone_cold_run_whatever_happens(options) -> None:
    check(options, examples=4)  # always the same ones; the slow test looks for new ones


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_same_at_length(options) -> None:
    check(options, examples=15, search=True)
