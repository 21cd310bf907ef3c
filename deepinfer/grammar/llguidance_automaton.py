"""llguidance as the matcher: byte-level, no compilation to speak of, and it fills masks in threads of its own."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from functools import cache

import llguidance
import numpy as np

from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.vocabulary import Vocabulary

# Fuel is llguidance's unit of lexer work (about 14,000 a millisecond), items are its unit of parser work (20,000 a
# millisecond): a step that needs more than about 10 ms is refused. 50,000 states of a lexer are about 25 MiB.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
TOKENS_PER_TABLE = 256
_TABLES_ARE_FULL = "lexer error: too many"
_TOO_LARGE = re.compile(r"too (large|many|big|long|complex)|fuel|limit|exceed", re.IGNORECASE)


@cache
def executor(threads: int) -> llguidance.LLExecutor:
    return llguidance.LLExecutor(threads)


class _Source:
    """A grammar that can be built again. The tables of llguidance's lexer grow with what was matched, up to a limit,
    and all copies of a matcher share them: when they are full, every copy is in error. Then a new generation of
    matchers, with empty tables, takes over."""

    def __init__(self, lark: str, vocabulary: Vocabulary) -> None:
        """GrammarError with the library's reason."""
        self._lark = lark
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self.generation = 0
        self._first = self._build()

    def matcher(self) -> tuple[llguidance.LLMatcher, int]:
        """One of the newest generation, at the beginning of a text, and the number of the generation."""
        with self._lock:
            return self._first.deep_copy(), self.generation

    def retire(self, generation: int) -> None:
        """The tables of this generation are full."""
        with self._lock:
            if self.generation == generation:
                self._first = self._build()
                self.generation += 1

    def _build(self) -> llguidance.LLMatcher:
        try:
            text = llguidance.LLMatcher.grammar_from_lark(self._lark)
            matcher = llguidance.LLMatcher(self._vocabulary.tokenizer, text, log_level=0, limits=LIMITS)
        except ValueError as error:
            raise _grammar_error(str(error), self._lark) from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a failed assertion in Rust; its class has no module
                raise
            raise GrammarError(f"the grammar is beyond the parser: {error}", "too_large") from None
        if matcher.is_error():
            raise _grammar_error(matcher.get_error(), self._lark)
        return matcher


class LLAutomaton:
    """An Automaton over llguidance's matcher."""

    def __init__(self, source: _Source, token_ids: Sequence[int] = ()) -> None:
        """Behind these tokens, which the grammar allows."""
        self._source = source
        self._consumed = list(token_ids)
        self._renewed_at = -TOKENS_PER_TABLE  # it got new tables behind so many tokens
        self.matcher, self._generation = source.matcher()
        if self._consumed:
            self.matcher.consume_tokens(self._consumed)

    @property
    def accepting(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def error(self) -> str | None:
        return self.matcher.get_error() or None

    def consume(self, token_ids: Sequence[int]) -> bool:
        ids = list(token_ids)
        consumed = self.matcher.consume_tokens(ids) or (self.renew() and self.matcher.consume_tokens(ids))
        self._consumed += ids
        return consumed

    def fill(self, rows: np.ndarray, first: int, path: Sequence[int]) -> None:
        fill_all([(self, first, path)], rows, threads=1)

    def copy(self) -> LLAutomaton:
        if self._generation != self._source.generation and self.error is None:
            return LLAutomaton(self._source, self._consumed)
        other = LLAutomaton.__new__(LLAutomaton)
        other.__dict__.update(self.__dict__)
        other._consumed = self._consumed.copy()
        other.matcher = self.matcher.deep_copy()
        return other

    def renew(self) -> bool:
        """Goes on with empty tables, where full ones are the trouble. False if it is not, or if this automaton had new
        ones only just: a text that fills them alone, again and again, keeps the others of its step waiting."""
        behind = len(self._consumed)
        if behind - self._renewed_at < TOKENS_PER_TABLE or not self.matcher.get_error().startswith(_TABLES_ARE_FULL):
            return False
        self._renewed_at = behind
        self._source.retire(self._generation)
        self.matcher, self._generation = self._source.matcher()
        return self.matcher.consume_tokens(self._consumed)


def compile_automaton(lark: str, vocabulary: Vocabulary) -> LLAutomaton:
    """lark: in llguidance's dialect. GrammarError with the library's reason."""
    return LLAutomaton(_Source(lark, vocabulary))


Job = tuple[LLAutomaton, int, Sequence[int]]


def fill_all(jobs: Sequence[Job], rows: np.ndarray, threads: int) -> None:
    """LLAutomaton.fill of (automaton, first, path) for all jobs, in `threads` threads, without the GIL. No automaton
    stands in two jobs."""
    assert rows.dtype == np.int32 and rows.flags.c_contiguous
    _fill(jobs, rows, threads)
    for job in jobs:
        automaton, first, path = job
        if automaton.matcher.is_error() and automaton.renew():
            rows[first : first + len(path) + 1] = 0
            _fill([job], rows, threads)


def _fill(jobs: Sequence[Job], rows: np.ndarray, threads: int) -> None:
    plain = [(automaton.matcher, first) for automaton, first, path in jobs if not path]
    drafted = [(automaton.matcher, first, list(path)) for automaton, first, path in jobs if path]
    if len(jobs) == 1 and plain:
        row = rows[plain[0][1]]
        plain[0][0].unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)  # in this thread: no hand-over
        return
    place, stride, count = rows.ctypes.data, rows.strides[0], rows.shape[0]
    if plain:
        executor(threads).unsafe_compute_mask_ptr(plain, place, stride, count)
    if drafted:
        executor(threads).unsafe_compute_mask_ptr_with_draft_token(drafted, place, stride, count)


def _grammar_error(reason: str, lark: str) -> GrammarError:
    """The library's reason, without the states and the grammars of ours that it shows; with a place only in a text that
    the client wrote himself, which does not begin with our options."""
    reason = re.split(r"\n<(?:state|non-verbose)|\n +\d+ \| ", reason)[0].strip()
    place = "" if lark.startswith("%llguidance") else r"line \1, column \2: "
    reason = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", place, reason)
    return GrammarError(reason, "too_large" if _TOO_LARGE.search(reason) else "invalid")
