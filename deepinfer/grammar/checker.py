"""A server's door for grammars: each is tried out in a process that may be killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections import OrderedDict
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimeLimit

import msgspec
from pebble import ProcessExpired, ProcessPool

from deepinfer.grammar import checker_worker
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.limits import check_limits
from deepinfer.grammar.structure import Structure
from deepinfer.grammar.vocabulary import Vocabulary

MEMORY_BYTES = 1 << 30  # what a grammar may take beyond the worker itself
Verdict = GrammarError | None


class Checker:
    """Says whether an engine with this vocabulary can enforce a structure, without risk for the server.

    A grammar can take for ever, or all memory, or crash a parser: it is compiled, and followed for some tokens, in a
    worker process that is killed after `time_limit` seconds. Verdicts are kept, so a hostile text costs once. Close it
    at the end: the workers are processes of ours.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        workers: int = 2,
        time_limit: float = 2.0,
        wait_limit: float = 10.0,
        max_waiting: int = 64,
        memory_bytes: int = MEMORY_BYTES,
        cache_size: int = 4096,
    ) -> None:
        """Refused as "busy": a structure whose verdict is not there after wait_limit seconds, and one that comes when
        max_waiting others are without a verdict. The workers start now; whoever asks before they are ready waits."""
        self._time_limit = time_limit
        self._wait_limit = wait_limit
        self._max_waiting = max_waiting
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[Structure, Future[Verdict]] = OrderedDict()  # the oldest use first
        self._waiting = 0
        self._pool = ProcessPool(
            max_workers=workers,
            initializer=checker_worker.prepare,
            initargs=(vocabulary.definition, vocabulary.vocab_size, vocabulary.eos_token_id, memory_bytes),
            context=multiprocessing.get_context("spawn"),  # a server has threads, which a fork would cut off
        )
        self._pool.schedule(checker_worker.ready)

    async def check(self, structure: Structure) -> None:
        """GrammarError for a structure that cannot be enforced; its kind is "busy" if that could not be found out."""
        check_limits(structure)
        # What costs nothing is left out, so that more requests share a verdict.
        shared = self._verdict(msgspec.structs.replace(structure, thinking=False, thinking_budget=None))
        try:  # a client that leaves, or does not wait, takes the verdict from nobody else
            verdict = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(shared)), self._wait_limit)
        except TimeoutError:
            raise GrammarError("too many grammars are being checked; try again later", "busy") from None
        if verdict is not None:
            raise GrammarError(verdict.message, verdict.kind, verdict.part)

    def close(self) -> None:
        """Ends the workers, whatever they do."""
        self._pool.stop()
        self._pool.join()

    def _verdict(self, structure: Structure) -> Future[Verdict]:
        with self._lock:
            if (known := self._verdicts.get(structure)) is not None:
                self._verdicts.move_to_end(structure)
                return known
            if self._waiting >= self._max_waiting:
                raise GrammarError("too many grammars are being checked; try again later", "busy")
            self._waiting += 1
            verdict: Future[Verdict] = Future()
            self._verdicts[structure] = verdict
            while len(self._verdicts) > self._cache_size:
                self._verdicts.popitem(last=False)
        try:
            task = self._pool.schedule(checker_worker.check, args=(structure,), timeout=self._time_limit)
        except RuntimeError as error:  # the pool was closed
            self._settle(structure, verdict, GrammarError(f"grammars are not checked any more: {error}", "busy"))
        else:
            task.add_done_callback(lambda done: self._settle(structure, verdict, self._outcome(done)))
        return verdict

    def _settle(self, structure: Structure, verdict: Future[Verdict], outcome: Verdict) -> None:
        with self._lock:
            self._waiting -= 1
            if outcome is not None and outcome.kind == "busy" and self._verdicts.get(structure) is verdict:
                del self._verdicts[structure]
        verdict.set_result(outcome)

    def _outcome(self, task: Future[None]) -> Verdict:
        if task.cancelled():
            return GrammarError("grammars are not checked any more", "busy")
        match task.exception():
            case None:
                return None
            case GrammarError() as error:
                return error
            case TimeLimit():
                return GrammarError(f"the grammar took more than {self._time_limit:g} s", "too_slow")
            case ProcessExpired():
                return GrammarError("the grammar exhausts memory, or the parser", "too_large")
            case error:
                return GrammarError(f"the grammar could not be checked: {error!r}", "busy")
