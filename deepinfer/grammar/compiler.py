"""Structures into prototypes: in threads, each structure once."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import msgspec
import numpy as np

from deepinfer.grammar import gbnf, xgrammar_automaton
from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.errors import GrammarError, blaming
from deepinfer.grammar.lexing import loses_sentences
from deepinfer.grammar.limits import check_limits
from deepinfer.grammar.llguidance_automaton import compile_automaton
from deepinfer.grammar.prototype import Parts, Prototype
from deepinfer.grammar.sources import content_lark
from deepinfer.grammar.structure import Grammar, Structure
from deepinfer.grammar.tools import block_lark
from deepinfer.grammar.vocabulary import Vocabulary

Observer = Callable[[Literal["hit", "miss", "error"], float], None]


class Compiler:
    """Compiles for one vocabulary; the newest `cache_size` structures are kept, their errors too.

    Structures that differ only in thinking, its budget or the prefix share what was compiled. llguidance holds no GIL
    while it builds. A structure that is being compiled is joined by those who ask for it again.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        threads: int = 1,
        cache_size: int = 256,
        observe: Observer | None = None,
        fallback: bool = False,
    ) -> None:
        """observe: called in a thread of the compiler with what came of a request for a structure ("hit": it was there
        or on its way; "error": it cannot be enforced) and the seconds from the call of compile.

        fallback: EBNF in which llguidance would lose sentences is given to xgrammar where that is installed. Not for
        grammars of strangers: a Checker's worker, which has no xgrammar, cannot try them out first.
        """
        self.vocabulary = vocabulary
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar-compiler")
        self._cache_size = cache_size
        self._observe = observe
        self._fallback = fallback
        self._lock = threading.Lock()
        self._cache: OrderedDict[Structure, Future[Parts]] = OrderedDict()

    def compile(self, structure: Structure) -> Future[Prototype]:
        """Its exception is a GrammarError for a structure that cannot be enforced. Cancelling it disturbs nobody else
        who waits for the same structure."""
        asked = time.perf_counter()
        parts, known = self._parts(structure)
        answer: Future[Prototype] = Future()
        # A second task instead of a callback: the pool works in order, so it never waits for a task behind itself.
        self._pool.submit(self._assemble, structure, parts, known, asked, answer)
        return answer

    def close(self) -> None:
        """Compiles nothing more; what is being compiled is finished."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _parts(self, structure: Structure) -> tuple[Future[Parts], bool]:
        """What is compiled for a structure, and whether somebody asked for it before."""
        key = msgspec.structs.replace(structure, thinking=False, thinking_budget=None, prefix="")
        with self._lock:
            parts = self._cache.get(key)
            if parts is not None:
                self._cache.move_to_end(key)
                return parts, True
            parts = self._cache[key] = self._pool.submit(self._build, structure)
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
            return parts, False

    def _assemble(
        self, structure: Structure, parts: Future[Parts], known: bool, asked: float, answer: Future[Prototype]
    ) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        result: Literal["hit", "miss", "error"] = "hit" if known else "miss"
        try:
            check_limits(structure)
            prototype = Prototype(structure, self.vocabulary, parts.result())
        except BaseException as error:
            result = "error"
            answer.set_exception(error)
        else:
            answer.set_result(prototype)
        if self._observe is not None:
            self._observe(result, time.perf_counter() - asked)

    def _build(self, structure: Structure) -> Parts:
        return build_parts(structure, self.vocabulary, fallback=self._fallback)


def build_parts(structure: Structure, vocabulary: Vocabulary, *, fallback: bool = False) -> Parts:
    """Compiles now, in this thread. GrammarError. fallback: as Compiler's."""
    check_limits(structure)
    content = block = begun = None
    if structure.content is not None and structure.tool_mode != "required":
        grammar = structure.content
        with blaming("content"):
            content = _compile_elsewhere(grammar, vocabulary) if fallback else None
            content = content or _compile(lambda: content_lark(grammar), vocabulary)
    if structure.tool_mode != "none" and structure.tools:
        with blaming("tools"):
            block, begun = _compile_block(structure, vocabulary)
    return Parts(content, block, begun)


def _compile_block(structure: Structure, vocabulary: Vocabulary) -> tuple[Automaton, Automaton]:
    """A block of calls, and the same behind its DSML token."""
    dsml = vocabulary.dsml
    if dsml is None:
        raise GrammarError("the tokenizer has no DSML token: calls of tools cannot be enforced")
    block = _compile(lambda: block_lark(structure.tools, dsml, structure.parallel_calls), vocabulary)
    begun = block.copy()
    if not begun.consume([*vocabulary.tokenize("\n\n<"), dsml]):
        raise GrammarError(f"a block of calls cannot begin: {begun.error}")
    _warm(begun, vocabulary)
    return block, begun


def _compile(write: Callable[[], str], vocabulary: Vocabulary) -> Automaton:
    try:
        automaton = compile_automaton(write(), vocabulary)
    except RecursionError:
        raise GrammarError("the grammar is nested too deep", "too_large") from None
    _warm(automaton, vocabulary)
    return automaton


def _compile_elsewhere(grammar: Grammar, vocabulary: Vocabulary) -> Automaton | None:
    """In xgrammar, if that gains sentences and it takes the grammar; else None."""
    if grammar.kind != "ebnf" or not gbnf.is_gbnf(grammar.source) or not xgrammar_automaton.is_installed():
        return None
    if not loses_sentences(gbnf.parse(grammar.source)):
        return None
    try:
        automaton = xgrammar_automaton.compile_gbnf(grammar.source, vocabulary)
    except GrammarError:
        return None  # llguidance takes more dialects
    _warm(automaton, vocabulary)
    return automaton


def _warm(automaton: Automaton, vocabulary: Vocabulary) -> None:
    """Fills the first mask: copies inherit what the matcher had to build for it, and a grammar that allows nothing is
    found."""
    rows = np.empty((1, vocabulary.words), np.int32)
    automaton.fill(rows, 0, [])
    if automaton.accepting or not np.array_equal(rows[0], vocabulary.only_eos):
        return  # a matcher in trouble allows the end token alone, and so does one that nothing can satisfy
    if automaton.error is None or automaton.error.startswith("NoExtension"):
        raise GrammarError("no text satisfies the grammar")
    raise GrammarError(f"the grammar is too large to match: {automaton.error}", "too_large")
