"""A structure, compiled: from it every sequence gets its matcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.structure import Structure
from deepinfer.grammar.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Parts:
    """What was compiled for the expensive fields of a structure. Nobody moves these automata: they are copied."""

    content: Automaton | None = None  # at the beginning of the content
    block: Automaton | None = None  # of calls, at its two line breaks
    begun: Automaton | None = None  # of calls, behind the first DSML token


class Prototype:
    """A structure that is ready to use. Any thread may call start."""

    def __init__(self, structure: Structure, vocabulary: Vocabulary, parts: Parts) -> None:
        """GrammarError for a prefix that the content's grammar does not allow, and for thinking with a tokenizer that
        has no </think>."""
        self.structure = structure
        self.vocabulary = vocabulary
        if structure.thinking and vocabulary.end_think is None:
            raise GrammarError("the tokenizer has no </think>: an answer cannot be constrained behind its reasoning")
        content = parts.content
        if content is not None and structure.prefix:
            content = content.copy()
            if not content.consume(vocabulary.tokenize(structure.prefix)):
                raise GrammarError("the beginning of the answer that the prompt holds does not fit the grammar")
        self.content = content
        self.block = parts.block
        self._begun = parts.begun

    def start(self, output_ids: Sequence[int] = ()) -> Matcher:
        """A matcher for one sequence, behind the tokens that it already has."""
        mode = self.structure.tool_mode
        alternatives = []
        if self.content is not None and mode != "required":
            alternatives.append(self.content)
        # In free content the block begins at its DSML token; behind a prefix the content has begun.
        may_be_block = mode == "required" or (alternatives and mode == "auto" and not self.structure.prefix)
        if self.block is not None and may_be_block:
            alternatives.append(self.block)
        matcher = Matcher(
            self.vocabulary,
            alternatives=[automaton.copy() for automaton in alternatives],
            calls="free" if mode == "none" else "block" if self._begun is not None else "never",
            begun=self._begun,
            thinking=self.structure.thinking,
            thinking_budget=self.structure.thinking_budget,
        )
        matcher.accept(output_ids)
        return matcher
