"""Hostile grammars at a server's door: each ends as an error or as a matcher that works, and the door stays open."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from grammar_cases import SCHEMAS
from hostile import MAKERS, hostile
from walks import EOS, ids_of, nano, prototype

from deepinfer.grammar import checker_worker
from deepinfer.grammar.checker import Checker
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.structure import Grammar, Structure, ToolGrammar

PERSON = Structure(content=Grammar("json_schema", json.dumps(SCHEMAS["person"])))
# Three thousand parameters of two types each: seconds of work.
SLOW = Structure(
    tools=(
        ToolGrammar(
            "f", json.dumps({"properties": {f"p{n}": {"type": ["string", "null"]} for n in range(3000)}}), True
        ),
    ),
    tool_mode="required",
)


def run(work: Coroutine[Any, Any, Any], seconds: float = 120) -> Any:
    return asyncio.run(asyncio.wait_for(work, seconds))


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    checker = Checker(nano(), workers=1, wait_limit=100)  # a busy machine starts workers slowly
    yield checker
    checker.close()


async def verdict(checker: Checker, structure: Structure) -> str:
    try:
        await checker.check(structure)
    except GrammarError as error:
        assert error.message
        return error.kind
    return "ok"


def follows(structure: Structure) -> None:
    """A matcher of an accepted structure works here, as it would in an engine."""
    matcher = prototype(structure).start()
    for _ in range(12):
        allowed = ids_of(matcher.masks([])[0])
        assert allowed
        if matcher.error is not None:
            return  # a limit, which ends this sequence alone
        matcher.accept([allowed[len(allowed) // 2]])
        if allowed == [EOS]:
            return


def judge(checker: Checker, seeds: range) -> Counter[str]:
    verdicts: Counter[str] = Counter()
    for seed in seeds:
        structure = hostile(seed)
        result = run(verdict(checker, structure))
        assert result != "busy", f"seed {seed}: {structure}"
        verdicts[result] += 1
        if result == "ok":
            follows(structure)
    assert run(verdict(checker, PERSON)) == "ok"
    return verdicts


def test_hostile_grammars_end_as_errors_or_as_matchers_and_the_next_one_is_served(checker: Checker) -> None:
    verdicts = judge(checker, range(10 * len(MAKERS)))
    assert verdicts["invalid"] and verdicts["ok"] and verdicts["too_large"]


@pytest.mark.slow
def test_a_thousand_hostile_grammars(checker: Checker) -> None:
    verdicts = judge(checker, range(1000))
    assert sum(verdicts.values()) == 1000


def test_a_grammar_that_takes_too_long_is_killed_and_the_next_one_is_served() -> None:
    checker = Checker(nano(), workers=1, time_limit=0.1, wait_limit=100)

    async def three() -> list[str]:
        return [await verdict(checker, SLOW), await verdict(checker, PERSON), await verdict(checker, SLOW)]

    try:
        assert run(three()) == ["too_slow", "ok", "too_slow"]
    finally:
        checker.close()


def test_a_grammar_that_takes_too_much_memory_is_refused_and_the_next_one_is_served() -> None:
    checker = Checker(nano(), workers=1, time_limit=60, wait_limit=100, memory_bytes=4 << 20)

    async def two() -> list[str]:
        long = Structure(content=Grammar("regex", "(?s:.*)a(?s:.{1000})b(?s:.*)"))
        return [await verdict(checker, long), await verdict(checker, Structure(content=Grammar("regex", "abc")))]

    try:
        assert run(two()) == ["too_large", "ok"]
    finally:
        checker.close()


def test_a_verdict_is_found_once_however_many_ask_for_it(checker: Checker) -> None:
    structure = Structure(content=Grammar("regex", "asked by many"))

    async def many() -> list[str]:
        return await asyncio.gather(*(verdict(checker, structure) for _ in range(200)))

    assert run(many()) == ["ok"] * 200  # more than may wait: they share one place


def test_a_client_that_leaves_takes_the_verdict_from_nobody(checker: Checker) -> None:
    structure = Structure(content=Grammar("regex", "asked and left"))

    async def leave() -> str:
        leaver = asyncio.create_task(checker.check(structure))
        stayer = asyncio.create_task(verdict(checker, structure))
        await asyncio.sleep(0)
        leaver.cancel()
        return await stayer

    assert run(leave()) == "ok"


def test_more_grammars_than_may_wait_are_told_to_come_back() -> None:
    checker = Checker(nano(), workers=1, max_waiting=3, wait_limit=100)

    async def flood() -> list[str]:
        patterns = (Structure(content=Grammar("regex", f"flood {n}")) for n in range(8))
        return await asyncio.gather(*(verdict(checker, pattern) for pattern in patterns))

    try:
        assert Counter(run(flood())) == {"ok": 3, "busy": 5}
        assert run(verdict(checker, Structure(content=Grammar("regex", "flood 7")))) == "ok"
    finally:
        checker.close()


def test_a_closed_door_says_so() -> None:
    checker = Checker(nano(), workers=1)
    checker.close()
    assert run(verdict(checker, PERSON)) == "busy"


def test_the_worker_imports_no_torch(checker: Checker) -> None:
    """It would take seconds to come back after one was killed."""
    loaded = checker._pool.schedule(_loaded).result()
    assert "deepinfer.grammar.compiler" in loaded
    if "torch" in loaded:  # through this test's own main module; not through what the worker itself needs
        import subprocess
        import sys

        code = "import sys, deepinfer.grammar.checker_worker; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _loaded() -> list[str]:
    import sys

    return list(sys.modules)


def test_the_worker_gives_way_to_streams(checker: Checker) -> None:
    assert checker._pool.schedule(os.getpriority, args=(os.PRIO_PROCESS, 0)).result() >= 10


def test_a_walk_ends_at_the_end_of_the_answer() -> None:
    import random

    checker_worker.follow(prototype(Structure(content=Grammar("choice", '["a"]'))).content, nano(), random.Random(0))
