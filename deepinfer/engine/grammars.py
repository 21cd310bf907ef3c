"""The grammars of requests: compiled outside the step loop, waited for by their sequences, counted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from deepinfer.engine.blocked import FutureCondition
from deepinfer.engine.errors import InvalidRequestError
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.structured_output import asked_field
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.structure import Structure
from deepinfer.speculation.constraint import Prototype


class GrammarCompiler(Protocol):
    def compile(self, structure: Structure) -> Future[Prototype]:
        """Never waits. The future fails with GrammarError for what cannot be enforced; one that is done already was in
        the cache."""


class CompileCounts(NamedTuple):
    seconds: list[float]  # of each compilation that ended, a failed one too
    hits: int
    misses: int


class Grammar(NamedTuple):
    """What a request asks for, on its way. field: of its parameters, for errors."""

    field: str
    prototype: Future[Prototype]

    def wait(self) -> None:
        """Until it is compiled. InvalidRequestError for what cannot be enforced."""
        try:
            self.prototype.result()
        except GrammarError as error:
            raise InvalidRequestError(self.field, error.message) from None


class GrammarCondition(FutureCondition):
    """Ready when a grammar is compiled; InvalidRequestError for one that cannot be."""

    def __init__(self, grammar: Grammar) -> None:
        super().__init__("grammar", grammar.prototype)
        self._grammar = grammar

    def ready(self) -> bool:
        if not self._grammar.prototype.done():
            return False
        self._grammar.wait()
        return True


class Grammars:
    """compiler: None = this engine enforces nothing, for the reason given. clock: seconds."""

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        reason: str = "this engine has no tokenizer",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._compiler, self._reason, self._clock = compiler, reason, clock
        self._seconds: deque[float] = deque()  # filled by whatever thread compiles
        self._hits = self._misses = 0

    def check(self, params: SamplingParams) -> None:
        """InvalidRequestError if the parameters ask for what this engine cannot do."""
        if self._compiler is None and params.enforced is not None:
            raise InvalidRequestError(asked_field(params) or "structure", f"cannot be enforced: {self._reason}")

    def begin(self, params: SamplingParams) -> Grammar | None:
        """Begins to compile what a request asks for, None if it asks for nothing. InvalidRequestError as `check`."""
        structure = params.enforced
        if structure is None:
            return None
        self.check(params)
        assert self._compiler is not None
        began = self._clock()
        try:
            future = self._compiler.compile(structure)
        except GrammarError as error:
            raise InvalidRequestError(asked_field(params) or "structure", error.message) from None
        if future.done():
            self._hits += 1
        else:
            self._misses += 1
            future.add_done_callback(lambda _: self._seconds.append(self._clock() - began))
        return Grammar(asked_field(params) or "structure", future)

    def take_counts(self) -> CompileCounts:
        """What happened since the last call."""
        seconds = [self._seconds.popleft() for _ in range(len(self._seconds))]
        hits, misses = self._hits, self._misses
        self._hits = self._misses = 0
        return CompileCounts(seconds, hits, misses)
