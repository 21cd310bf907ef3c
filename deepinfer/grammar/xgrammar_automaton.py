"""xgrammar as a second matcher, for EBNF in which llguidance's lexer would lose sentences (lexing.py).

It is optional, and importing it imports torch and transformers (seconds): only whoever asks for it pays. For JSON
schemas it gains nothing: what llguidance refuses, xgrammar passes over in silence (tests/grammar/
test_schema_features.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.gbnf import ROOT
from deepinfer.grammar.vocabulary import Vocabulary

_setting_up = threading.Lock()
_compilers: dict[str, Any] = {}  # by the vocabulary's digest


@cache
def is_installed() -> bool:
    return find_spec("xgrammar") is not None


class XGrammarAutomaton:
    """An Automaton over xgrammar's matcher."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._error: str | None = None

    @property
    def accepting(self) -> bool:
        return self._error is None and self._matcher.is_completed()

    @property
    def error(self) -> str | None:
        return self._error

    def consume(self, token_ids: Sequence[int]) -> bool:
        if self._error is None and not all(self._matcher.accept_token(token) for token in token_ids):
            self._error = "a token may not stand where it does"
        return self._error is None

    def fill(self, rows: np.ndarray, first: int, path: Sequence[int]) -> None:
        walked = 0
        for place, token in enumerate([*path, None]):
            row = rows[first + place : first + place + 1]
            row[:] = -1  # where everything is allowed it writes nothing
            self._matcher.fill_next_token_bitmask(row)
            if token is None or not self._matcher.accept_token(token):
                break
            walked += 1
        if walked:
            self._matcher.rollback(walked)

    def copy(self) -> XGrammarAutomaton:
        other = XGrammarAutomaton(self._matcher.fork())
        other._error = self._error
        return other


def compile_gbnf(source: str, vocabulary: Vocabulary) -> XGrammarAutomaton:
    """GrammarError for what xgrammar does not take. Needs it installed."""
    import xgrammar

    compiler = _compiler(vocabulary)
    try:
        compiled = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(source, root_rule_name=ROOT))
    except RuntimeError as error:
        raise GrammarError(f"xgrammar: {str(error).strip().splitlines()[-1]}") from None
    return XGrammarAutomaton(xgrammar.GrammarMatcher(compiled))


def _compiler(vocabulary: Vocabulary) -> Any:
    import xgrammar

    with _setting_up:
        if vocabulary.digest not in _compilers:
            # A token without text is a control token to xgrammar: no rule matches it.
            tokenizer = vocabulary.tokenizer
            tokens = [
                b"" if tokenizer.is_special_token(token) else vocabulary.token_bytes(token)
                for token in range(vocabulary.vocab_size)
            ]
            info = xgrammar.TokenizerInfo(
                tokens,
                xgrammar.VocabType.RAW,
                stop_token_ids=[vocabulary.eos_token_id],
                vocab_size=vocabulary.vocab_size,
            )
            _compilers[vocabulary.digest] = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return _compilers[vocabulary.digest]
