"""Stored responses: whose they are, how many are kept, and what survives."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from asgi_calls import run
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.server.response_store import ResponseStore, StoreError, StoreLimits


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def with_store(
    work: Callable[[ResponseStore], Coroutine[Any, Any, None]], path: Path | None = None, **more: Any
) -> None:
    async def whole() -> None:
        store = ResponseStore(path, **more)
        try:
            await work(store)
        finally:
            await store.close()

    run(whole())


def text_of(number: int) -> str:
    """About 1,000 characters that no packing makes much smaller."""
    return os.urandom(500).hex() + str(number)


@pytest.fixture(params=["memory", "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "state" / "responses.db" if request.param == "file" else None


def test_what_was_put_comes_back_as_it_was(path: Path | None) -> None:
    value = {"items": [{"text": "héllo 你好 🙂 \0", "n": 1.5, "none": None}], "big": 2**53, "deep": [[[[{}]]]]}

    async def work(store: ResponseStore) -> None:
        assert await store.put("team", "resp_1", value)
        assert await store.get("team", "resp_1") == value
        assert await store.get("team", "resp_2") is None

    with_store(work, path)


def test_no_tenant_sees_or_deletes_anothers(path: Path | None) -> None:
    async def work(store: ResponseStore) -> None:
        await store.put("a", "resp_1", {"of": "a"})
        assert await store.get("b", "resp_1") is None
        assert not await store.delete("b", "resp_1")
        await store.put("b", "resp_1", {"of": "b"})
        assert await store.get("a", "resp_1") == {"of": "a"}

    with_store(work, path)


def test_what_was_deleted_is_gone(path: Path | None) -> None:
    async def work(store: ResponseStore) -> None:
        await store.put("a", "resp_1", {"x": 1})
        assert await store.delete("a", "resp_1")
        assert not await store.delete("a", "resp_1")
        assert await store.get("a", "resp_1") is None
        assert await store.stats() == (0, 0, 0)

    with_store(work, path)


def test_a_second_put_replaces_the_first(path: Path | None) -> None:
    async def work(store: ResponseStore) -> None:
        await store.put("a", "resp_1", {"x": text_of(1)})
        await store.put("a", "resp_1", {"x": 2})
        assert await store.get("a", "resp_1") == {"x": 2}
        assert (await store.stats()).responses == 1 and (await store.stats()).size < 100

    with_store(work, path)


@pytest.mark.parametrize("response_id", ["", "\ud800", "x" * 10_000, "'; DROP TABLE responses; --", "\0", "é"])
def test_any_text_of_a_client_is_just_an_id_that_is_not_there(path: Path | None, response_id: str) -> None:
    async def work(store: ResponseStore) -> None:
        await store.put("a", "resp_1", {"x": 1})
        assert await store.get("a", response_id) is None
        assert not await store.delete("a", response_id)
        assert await store.get("a", "resp_1") == {"x": 1}

    with_store(work, path)


def test_the_one_not_used_for_longest_goes_when_there_are_too_many(path: Path | None) -> None:
    clock = Clock()

    async def work(store: ResponseStore) -> None:
        for number in range(3):
            clock.now += 1
            await store.put("a", f"r{number}", {"n": number})
        clock.now += 1
        await store.get("a", "r0")
        clock.now += 1
        await store.put("a", "r3", {"n": 3})
        assert [await store.get("a", f"r{number}") is not None for number in range(4)] == [True, False, True, True]
        assert (await store.stats())[::2] == (3, 1)

    with_store(work, path, limits=StoreLimits(max_count=3), now=clock)


def test_bytes_are_bounded_however_many_are_put(path: Path | None) -> None:
    async def work(store: ResponseStore) -> None:
        for number in range(200):
            assert await store.put("a", f"r{number}", {"text": text_of(number)})
            assert (await store.stats()).size <= 20_000
        assert await store.get("a", "r199") is not None
        assert (await store.stats()).evicted > 150

    with_store(work, path, limits=StoreLimits(max_bytes=20_000))
    if path is not None:
        assert path.stat().st_size < 200_000  # room that was freed is used again


def test_a_value_that_is_too_large_is_not_kept_and_pushes_nothing_out(path: Path | None) -> None:
    async def work(store: ResponseStore) -> None:
        await store.put("a", "small", {"x": 1})
        assert not await store.put("a", "large", {"text": "x" * 5000})
        assert not await store.put("a", "random", {"text": os.urandom(1500).hex()})
        assert await store.get("a", "large") is None and await store.get("a", "small") == {"x": 1}

    with_store(work, path, limits=StoreLimits(max_bytes=1000, max_value=4000))


def test_what_was_not_used_for_long_is_gone(path: Path | None) -> None:
    clock = Clock()

    async def work(store: ResponseStore) -> None:
        await store.put("a", "old", {"x": 1})
        await store.put("a", "used", {"x": 2})
        clock.now += 80
        await store.get("a", "used")
        clock.now += 30
        assert await store.get("a", "old") is None
        assert await store.get("a", "used") == {"x": 2}
        await store.put("a", "new", {"x": 3})
        assert (await store.stats()).responses == 2

    with_store(work, path, limits=StoreLimits(max_age=100), now=clock)


def test_responses_survive_a_restart_within_the_limits_that_hold_then(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"

    async def fill(store: ResponseStore) -> None:
        for number in range(10):
            await store.put("a", f"r{number}", {"n": number})

    async def look(store: ResponseStore) -> None:
        assert (await store.stats()).responses == 4
        assert await store.get("a", "r9") == {"n": 9} and await store.get("a", "r5") is None

    with_store(fill, path)
    with_store(look, path, limits=StoreLimits(max_count=4))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_server_that_is_killed_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    script = """
import asyncio, sys
from pathlib import Path
from deepinfer.server.response_store import ResponseStore
async def work():
    store = ResponseStore(Path(sys.argv[1]))
    for number in range(100000):
        await store.put("a", f"r{number}", {"n": number})
        print(number, flush=True)
asyncio.run(work())
"""
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(50):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        for line in process.stdout:  # what it had said when it was killed
            last = int(line) if line.endswith("\n") else last

    async def look(store: ResponseStore) -> None:
        for number in range(last + 1):
            assert await store.get("a", f"r{number}") == {"n": number}

    assert last >= 49
    with_store(look, path)


def test_two_servers_cannot_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"

    async def work(store: ResponseStore) -> None:
        with pytest.raises(StoreError, match=r"responses\.db.*locked"):
            ResponseStore(path)
        assert await store.put("a", "r", {})

    with_store(work, path)


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("important " * 100)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE theirs (x)")
    database.close()
    later = tmp_path / "later.db"
    with sqlite3.connect(later) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    before = [path.read_bytes() for path in (notes, other, later)]
    for path in (notes, other, later, tmp_path):
        with pytest.raises(StoreError) as caught:
            ResponseStore(path)
        assert str(path) in str(caught.value)
    assert [path.read_bytes() for path in (notes, other, later)] == before


def test_a_row_that_is_damaged_is_an_error_and_the_store_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"

    async def fill(store: ResponseStore) -> None:
        await store.put("a", "bad", {"x": 1})
        await store.put("a", "good", {"x": 2})

    async def look(store: ResponseStore) -> None:
        with pytest.raises(StoreError, match=r"responses\.db"):
            await store.get("a", "bad")
        assert await store.get("a", "good") == {"x": 2}
        assert await store.delete("a", "bad")

    with_store(fill, path)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE responses SET value = x'00' WHERE id = 'bad'")
    database.close()
    with_store(look, path)


def test_a_value_that_json_cannot_say_is_an_error_and_the_store_goes_on(path: Path | None) -> None:
    async def work(store: ResponseStore) -> None:
        for value in ({"x": "\ud800"}, {"x": object()}):
            with pytest.raises(StoreError):
                await store.put("a", "r", value)
        assert await store.stats() == (0, 0, 0)
        assert await store.put("a", "r", {})

    with_store(work, path)


def test_a_full_disk_is_an_error_and_what_was_there_stays(path: Path | None) -> None:
    async def work(store: ResponseStore) -> None:
        await store.put("a", "r", {"x": 1})
        before = await store.stats()
        store._thread.submit(store._database.execute, "PRAGMA max_page_count = 1").result()  # no more than it has
        with pytest.raises(StoreError, match="full"):
            await store.put("a", "r", {"text": os.urandom(50_000).hex()})
        assert await store.stats() == before
        assert await store.get("a", "r") == {"x": 1}
        assert await store.delete("a", "r")

    with_store(work, path)


def test_a_store_that_is_closed_says_so(path: Path | None) -> None:
    async def work(store: ResponseStore) -> None:
        await store.close()
        with pytest.raises(StoreError, match="closed"):
            await store.get("a", "r")

    with_store(work, path)


def test_a_limit_of_nothing_is_refused_by_name() -> None:
    for name in ("max_count", "max_bytes", "max_value", "max_age"):
        with pytest.raises(ValueError, match=name):
            StoreLimits(**{name: 0})


operations = st.lists(
    st.tuples(st.sampled_from(["put", "get", "delete", "wait"]), st.integers(0, 5), st.integers(0, 40)), max_size=40
)


@settings(max_examples=40, deadline=None)
@given(operations)
def test_count_and_bytes_are_always_those_of_what_is_kept(steps: list[tuple[str, int, int]]) -> None:
    clock = Clock()

    async def work(store: ResponseStore) -> None:
        for operation, name, size in steps:
            clock.now += 1
            match operation:
                case "put":
                    await store.put("a", f"r{name}", {"text": os.urandom(size).hex()})
                case "get":
                    await store.get("a", f"r{name}")
                case "delete":
                    await store.delete("a", f"r{name}")
                case "wait":
                    clock.now += size
            counted = (await store.stats())[:2]
            store._thread.submit(store._recount).result()
            assert counted == (await store.stats())[:2]
            assert counted[0] <= 3 and counted[1] <= 150

    with_store(work, limits=StoreLimits(max_count=3, max_bytes=150, max_age=50), now=clock)
