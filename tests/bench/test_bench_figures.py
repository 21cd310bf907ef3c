"""Figures of a run: percentiles, what counts and what does not, and the prompts that make it repeatable."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deepinfer.bench.figures import Drafts, Figures, Spread
from deepinfer.bench.load import Load, Record, run
from deepinfer.bench.report import as_json, table
from deepinfer.bench.workload import builtin, drawn, read
from deepinfer.client import Address, Exposition


def record(number: int = 0, **values: object) -> Record:
    """A request that was due at 1 s, got 10 tokens from 1.5 s to 2.4 s, and ended at 2.5 s."""
    fields = {"due": 1.0, "first": 1.5, "last": 2.4, "end": 2.5, "gaps": [(0.3, 3), (0.6, 6)], "prompt_tokens": 100}
    return Record(number, **{**fields, "cached_tokens": 25, "output_tokens": 10, "finish": "stop", **values})  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 20)), min_size=1, max_size=50))
def test_percentiles_weigh_every_token_and_are_values_that_occurred(values: list[tuple[float, int]]) -> None:
    spread = Spread.of(values)
    flat = sorted(value for value, weight in values for _ in range(weight))
    for q, got in ((50, spread.p50), (95, spread.p95), (99, spread.p99)):
        assert got == flat[max(1, math.ceil(q * len(flat) / 100)) - 1]
    assert spread.max == flat[-1] and spread.count == len(flat)
    assert spread.mean == pytest.approx(sum(flat) / len(flat))


def test_first_tokens_count_from_the_moment_when_they_were_due() -> None:
    figures = Figures.of([record(due=0.2)], 3.0, None)
    assert figures.ttft.p50 == pytest.approx(1.3) and figures.latency.p50 == pytest.approx(2.3)


def test_tokens_that_come_together_share_their_gap_and_arrivals_do_not() -> None:
    figures = Figures.of([record()], 3.0, None)
    assert figures.tbt.count == 9 and figures.tbt.p99 == pytest.approx(0.1)
    assert (figures.gap.count, figures.gap.max) == (2, 0.6)
    assert figures.user_speed.p50 == pytest.approx(9 / 0.9)


def test_a_failed_request_is_an_error_and_makes_no_percentile_better() -> None:
    records = [record(0), record(1, error="429 rate_limit", first=None, last=None, end=1.001, gaps=[], output_tokens=0)]
    figures = Figures.of(records, 2.0, None)
    assert (figures.requests, figures.answered, figures.errors) == (2, 1, {"429 rate_limit": 1})
    assert figures.latency.count == 1 and figures.ttft.count == 1
    assert figures.output_rate == 5.0 and figures.cached_share == 0.25


def test_drafts_come_from_the_growth_of_the_servers_counters() -> None:
    def counters(*values: int) -> Exposition:
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return Exposition({f"spec_decode_{n}_total": float(v) for n, v in zip(names, values, strict=True)}, {})

    drafts = Drafts.between(counters(10, 50, 20), counters(110, 350, 170))
    assert drafts is not None
    assert (drafts.accepted_per_round, drafts.accepted_share) == (1.5, 0.5)
    assert Drafts.between(counters(1, 0, 0), counters(9, 0, 0)) is None, "nothing is drafted there"
    assert Drafts.between(None, counters(9, 9, 9)) is None


def test_a_run_without_an_answer_still_has_a_report() -> None:
    figures = Figures.of([record(error="unreachable", first=None, end=None, gaps=[])], 0.0, None)
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(figures, "title"))
    assert "0 of 1; 1 x unreachable" in console.export_text()
    content = json.dumps(as_json(figures, [], {}, {}), allow_nan=False)
    assert json.loads(content)["figures"]["ttft"]["p50"] is None


def test_the_same_seed_asks_the_same_and_every_prompt_comes_before_one_comes_twice() -> None:
    prompts = builtin()
    order = drawn(prompts, 60, 7)
    assert order == drawn(prompts, 60, 7) and order != drawn(prompts, 60, 8)
    assert len(order) == 60
    assert all(order[:24].count(prompt) == 1 for prompt in prompts)
    systems = {prompt.messages[0]["content"] for prompt in prompts if prompt.messages[0]["role"] == "system"}
    assert len(systems) == 1, "a third of the prompts share their beginning, or the prefix cache has nothing to do"


def test_prompts_come_from_lines_and_from_objects(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("\ufeffone\n\ntwo\r\n", encoding="utf-8", newline="")
    assert [prompt.messages[0]["content"] for prompt in read(str(file))] == ["one", "two"]
    file.write_text('{"prompt": "a", "max_tokens": 5}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    first, second = read(str(file))
    assert (first.messages, first.max_tokens) == ([{"role": "user", "content": "a"}], 5)
    assert (second.messages[0]["content"], second.max_tokens) == ("b", None)


@pytest.mark.parametrize(
    "text, words",
    [
        ("\n \n", "holds no prompt"),
        ('{"prompt": 5}', "line 1: prompt must be a text"),
        ('{"prompt": "a"}\n[]', "line 2: not a JSON object"),
        ('{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
        ('{"messages": []}', "messages must be a list"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens must be a whole number"),
        ('{"prompt": "a", "max_token": 1}', "unknown fields: max_token"),
        ('{"prompt": ', "line 1"),
    ],
)
def test_a_file_that_is_no_list_of_prompts_is_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        read(str(file))


def test_a_server_that_is_gone_is_an_error_of_every_request() -> None:
    load = Load(address=Address.parse("http://127.0.0.1:1"), users=2)
    told: list[Record] = []
    records, _ = asyncio.run(run(load, builtin()[:4], told.append))
    assert [record.error for record in records] == ["unreachable"] * 4 and len(told) == 4
