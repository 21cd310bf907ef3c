"""Masks of a whole step, filled in threads beside the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.llguidance_automaton import LLAutomaton, fill_all
from deepinfer.grammar.matcher import Matcher, close_gaps, write_known
from deepinfer.grammar.vocabulary import Vocabulary

Row = tuple[Matcher, Sequence[int]]
Job = tuple[Automaton, int, list[int]]


class MaskFiller:
    """One background thread; llguidance fills in `threads` of its own, without the GIL."""

    def __init__(self, vocabulary: Vocabulary, *, threads: int = 1) -> None:
        self._words = vocabulary.words
        self._threads = threads
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def begin(self, rows: Sequence[Row]) -> Future[np.ndarray]:
        """rows: (matcher, path) each, no matcher twice. The result is int32 [sum of len(path) + 1, words], the rows of
        Matcher.masks in order. Until it is there nobody else touches these matchers."""
        return self._pool.submit(self.fill, rows)

    def fill(self, rows: Sequence[Row]) -> np.ndarray:
        """The same, in this thread."""
        out = np.empty((sum(len(path) + 1 for _, path in rows), self._words), np.int32)
        jobs: list[Job] = []
        extra: list[Job] = []  # further automata of matchers that have several: they write apart and are joined
        drafted: list[slice] = []
        end = 0
        for matcher, path in rows:
            begin, end = end, end + len(path) + 1
            walk = matcher.walk(path)
            first = write_known(walk, out[:end], begin)
            if walk.automata:
                out[first:end] = 0
                jobs.append((walk.automata[0], first, walk.path))
                extra += [(automaton, first, walk.path) for automaton in walk.automata[1:]]
                drafted.append(slice(first + 1, end))
        self._run(jobs, out)
        for job in extra:
            part = slice(job[1], job[1] + len(job[2]) + 1)
            apart = np.zeros_like(out[part])
            self._run([(job[0], 0, job[2])], apart)
            out[part] |= apart
        for part in drafted:
            close_gaps(out[part])
        return out

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, jobs: list[Job], rows: np.ndarray) -> None:
        ours = [(automaton, first, path) for automaton, first, path in jobs if isinstance(automaton, LLAutomaton)]
        if ours:
            fill_all(ours, rows, self._threads)
        for automaton, first, path in jobs:
            if not isinstance(automaton, LLAutomaton):
                automaton.fill(rows, first, path)
