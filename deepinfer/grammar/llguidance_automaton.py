"""llguidance as the matcher: byte-level, no compilation to speak of, and it fills masks in threads of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import llguidance
import numpy as np

from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.vocabulary import Vocabulary

# Fuel is llguidance's unit of lexer work (about 14,000 a millisecond), items are its unit of parser work (20,000 a
# millisecond): a step that needs more than about 10 ms is refused. Its own defaults allow a lexer of 0.5 GiB.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
_TOO_LARGE = re.compile(r"too (large|many|big|long|complex)|fuel|limit|exceed", re.IGNORECASE)


@cache
def executor(threads: int) -> llguidance.LLExecutor:
    return llguidance.LLExecutor(threads)


class LLAutomaton:
    """An Automaton over llguidance's matcher."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher

    @property
    def accepting(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def error(self) -> str | None:
        return self.matcher.get_error() or None

    def consume(self, token_ids: Sequence[int]) -> bool:
        return self.matcher.consume_tokens(list(token_ids))

    def fill(self, rows: np.ndarray, first: int, path: Sequence[int]) -> None:
        fill_all([(self, first, path)], rows, threads=1)

    def copy(self) -> LLAutomaton:
        return LLAutomaton(self.matcher.deep_copy())


def compile_automaton(lark: str, vocabulary: Vocabulary) -> LLAutomaton:
    """lark: in llguidance's dialect. GrammarError with the library's reason."""
    try:
        text = llguidance.LLMatcher.grammar_from_lark(lark)
        matcher = llguidance.LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=LIMITS)
    except ValueError as error:
        raise _grammar_error(str(error), lark) from None
    except BaseException as error:
        if (
            type(error).__name__ != "PanicException"
        ):  # how a failed assertion in Rust arrives; it has no module to import
            raise
        raise GrammarError(f"the grammar is beyond the parser: {error}", "too_large") from None
    if matcher.is_error():
        raise _grammar_error(matcher.get_error(), lark)
    return LLAutomaton(matcher)


def fill_all(jobs: Sequence[tuple[LLAutomaton, int, Sequence[int]]], rows: np.ndarray, threads: int) -> None:
    """LLAutomaton.fill of (automaton, first, path) for all jobs, in `threads` threads, without the GIL. No automaton
    stands in two jobs."""
    assert rows.dtype == np.int32 and rows.flags.c_contiguous
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
