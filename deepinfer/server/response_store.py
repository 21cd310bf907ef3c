"""Answers of /v1/responses that later requests refer to by `previous_response_id`: a bounded SQLite table.

    store = ResponseStore(path, StoreLimits(max_bytes=...))      # path None: in memory, gone with the server
    await store.put(tenant, response_id, {"response": ..., "items": [...]})
    value = await store.get(tenant, response_id)                 # None: unknown, forgotten, or of another tenant
    await store.delete(tenant, response_id)                      # False: there was none
    await store.close()

One process at a time has a file: it is locked. All work with it is done in one thread, so the event loop never waits
for a disk. What a call awaits is in the file as far as WAL with synchronous=NORMAL goes: a killed server loses nothing,
a machine without power may lose the last answers but never the file.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    used REAL NOT NULL,  -- Unix seconds of the last put or get
    size INTEGER NOT NULL,
    value BLOB NOT NULL,  -- JSON, by zlib
    UNIQUE (tenant, id)
);
CREATE INDEX by_use ON responses (used);
"""
_FEW = 64  # rows that are looked at together when room is made


class StoreError(RuntimeError):
    """The file cannot be opened, read or written; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """What was not used for longest goes first. max_bytes: of values as they are stored, which is less than JSON."""

    max_count: int = 100_000
    max_bytes: int = 256 << 20
    max_value: int = 32 << 20
    """Bytes of one value as JSON."""
    max_age: float = 30 * 86400.0
    """Seconds since the last use."""

    def __post_init__(self) -> None:
        for name in ("max_count", "max_bytes", "max_value", "max_age"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0, is {getattr(self, name)}")


DEFAULT_LIMITS = StoreLimits()


class StoreStats(NamedTuple):
    responses: int
    size: int  # bytes
    evicted: int  # responses, since the start, for want of room or for age


def _can_be_ours(response_id: str) -> bool:
    """Whether to look for it at all: clients may send any text, also such as no database takes."""
    return len(response_id) <= 256 and response_id.isascii()


class ResponseStore:
    """now: Unix seconds. Raises StoreError for a path that cannot be used: missing rights, another program's file."""

    def __init__(
        self, path: Path | None = None, limits: StoreLimits = DEFAULT_LIMITS, now: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._limits = limits
        self._now = now
        self._evicted = 0
        self._thread = ThreadPoolExecutor(1, "response-store")
        try:
            self._database = self._thread.submit(self._open).result()
        except BaseException:
            self._thread.shutdown()
            raise

    async def put(self, tenant: str, response_id: str, value: dict[str, Any]) -> bool:
        """Keeps `value` (what JSON can say), instead of what had the id. False: it is too large, and was not kept."""

        def work() -> bool:
            text = msgspec.json.encode(value)
            if len(text) > self._limits.max_value:
                return False
            packed = zlib.compress(text, 1)
            if len(packed) > self._limits.max_bytes:
                return False
            now = self._now()
            with self._database:  # a transaction
                self._remove(tenant, response_id)
                self._database.execute(
                    "INSERT INTO responses (tenant, id, used, size, value) VALUES (?, ?, ?, ?, ?)",
                    (tenant, response_id, now, len(packed), packed),
                )
                self._count += 1
                self._size += len(packed)
                self._make_room(now)
            return True

        return await self._do(work)

    async def get(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        """The value; it counts as used now."""

        if not _can_be_ours(response_id):
            return None

        def work() -> dict[str, Any] | None:
            now = self._now()
            row = self._database.execute(
                "SELECT number, used, value FROM responses WHERE tenant = ? AND id = ?", (tenant, response_id)
            ).fetchone()
            if row is None or row[1] < now - self._limits.max_age:
                return None
            with self._database:
                self._database.execute("UPDATE responses SET used = ? WHERE number = ?", (now, row[0]))
            value: dict[str, Any] = msgspec.json.decode(zlib.decompress(row[2]))
            return value

        return await self._do(work)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """False: there was none."""

        if not _can_be_ours(response_id):
            return False

        def work() -> bool:
            with self._database:
                return self._remove(tenant, response_id)

        return await self._do(work)

    async def stats(self) -> StoreStats:
        return await self._do(lambda: StoreStats(self._count, self._size, self._evicted))

    async def close(self) -> None:
        """After what was asked for; a second call does nothing."""
        try:
            await self._do(self._database.close)
        except StoreError:
            return
        self._thread.shutdown()

    async def _do(self, work: Callable[[], T]) -> T:
        def guarded() -> T:
            try:
                return work()
            except (sqlite3.Error, zlib.error, msgspec.MsgspecError, ValueError, TypeError) as error:
                self._recount()
                raise StoreError(f"stored responses in {self._path or 'memory'}: {error}") from error

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)
        except RuntimeError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError("the store of responses is closed") from error

    # What follows runs in the thread.

    def _open(self) -> sqlite3.Connection:
        try:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.touch(mode=0o600)
            database = sqlite3.connect(":memory:" if self._path is None else self._path, timeout=0.5)
            try:
                self._prepare(database)
            except BaseException:
                database.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{self._path}: cannot keep responses there ({error})") from error
        return database

    def _prepare(self, database: sqlite3.Connection) -> None:
        version = database.execute("PRAGMA user_version").fetchone()[0]
        tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version != SCHEMA_VERSION and (version or tables):
            raise StoreError(f"{self._path}: holds something else, or responses of another version of the server")
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA journal_size_limit = 16777216")
        if version != SCHEMA_VERSION:
            database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        self._database = database
        self._recount()
        with database:
            self._make_room(self._now())

    def _recount(self) -> None:
        try:
            row = self._database.execute("SELECT count(*), coalesce(sum(size), 0) FROM responses").fetchone()
        except sqlite3.Error:
            return  # it was for an error that counting stumbles over as well; that one is reported
        self._count, self._size = row

    def _remove(self, tenant: str, response_id: str) -> bool:
        row = self._database.execute(
            "DELETE FROM responses WHERE tenant = ? AND id = ? RETURNING size", (tenant, response_id)
        ).fetchone()
        if row is not None:
            self._count -= 1
            self._size -= row[0]
        return row is not None

    def _make_room(self, now: float) -> None:
        """Forgets what is too old, and of the rest what was not used for longest while there is too much."""
        limits = self._limits
        while True:
            rows = self._database.execute(
                "SELECT number, used, size FROM responses ORDER BY used, number LIMIT ?", (_FEW,)
            ).fetchall()
            forgotten = []
            for number, used, size in rows:
                too_much = self._count > limits.max_count or self._size > limits.max_bytes
                if used >= now - limits.max_age and not too_much:
                    break
                forgotten.append((number,))
                self._count -= 1
                self._size -= size
            self._database.executemany("DELETE FROM responses WHERE number = ?", forgotten)
            self._evicted += len(forgotten)
            if len(forgotten) < _FEW:
                break
