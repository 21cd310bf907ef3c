"""The grammars of requests: compiled outside the step loop, waited for by their sequences, counted."""

from __future__ import annotations

from collections import deque
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
        """Never waits. The future fails with GrammarError for what cannot be enforced."""

    def close(self) -> None:
        """Compiles nothing more."""


class CompileLog:
    """What came of structures that were asked for. Threads that compile write, one other reads."""

    def __init__(self) -> None:
        self._entries: deque[tuple[str, float]] = deque()

    def observe(self, result: str, seconds: float) -> None:
        """result: "hit" (it was there, or on its way), "miss" or "error". seconds: from being asked to the answer."""
        self._entries.append((result, seconds))

    def take(self) -> list[tuple[str, float]]:
        """(result, seconds) of each since the last call."""
        return [self._entries.popleft() for _ in range(len(self._entries))]


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
    """compiler: None = this engine enforces nothing, for the reason given. log: what the compiler writes."""

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        log: CompileLog | None = None,
        *,
        reason: str = "this engine has no tokenizer",
    ) -> None:
        self.log = log or CompileLog()
        self._compiler, self._reason = compiler, reason

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
        try:
            future = self._compiler.compile(structure)
        except GrammarError as error:
            raise InvalidRequestError(asked_field(params) or "structure", error.message) from None
        return Grammar(asked_field(params) or "structure", future)

    def close(self) -> None:
        """Idempotent."""
        if self._compiler is not None:
            self._compiler.close()
