"""A grammar that a reader can check by eye, with a gate before it as <think> is, and a compiler under a test's control.

Sentences: anything but the end token, up to GATE; then `count` times an even id and an odd one, both from 4 on; then
the end token. In a structure it is a regex whose pattern is the number of pairs, with thinking or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from plans import Automaton, bit_masks
from scripted import EOS, VOCAB

from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.structure import Grammar, Structure
from deepinfer.speculation.constraint import Masks

GATE = 3
BEHIND, LOST = -1, -2  # states: the end token has come; behind a token that may not stand there


def pairs(count: int, thinking: bool = False) -> Structure:
    return Structure(content=Grammar("regex", str(count)), thinking=thinking)


def is_sentence(output: Sequence[int], count: int, thinking: bool = False) -> bool:
    tokens = list(output)
    if thinking:
        if GATE not in tokens or EOS in tokens[: tokens.index(GATE)]:
            return False
        tokens = tokens[tokens.index(GATE) + 1 :]
    body = tokens[:-1]
    return (
        len(body) == 2 * count
        and tokens[-1] == EOS
        and all(token >= 4 and token % 2 == at % 2 for at, token in enumerate(body))
    )


class Pairs:
    """Its constraint. State: tokens of pairs so far; None = before the gate."""

    error: str | None = None

    def __init__(self, count: int, state: int | None, vocab: int) -> None:
        self.count, self.state, self.vocab = count, state, vocab

    def row(self, state: int | None) -> torch.Tensor:
        ids = torch.arange(self.vocab)
        if state is None:
            return ids != EOS
        if state == LOST:
            return ids >= 0
        if state == BEHIND:
            return ids < 0
        return (ids >= 4) & (ids % 2 == state % 2) if state < 2 * self.count else ids == EOS

    def after(self, state: int | None, token: int) -> int | None:
        if not self.row(state)[token]:
            return LOST
        if state is None:
            return 0 if token == GATE else None
        return state if state < 0 else BEHIND if token == EOS else state + 1

    def masks(self, path: Sequence[int]) -> Masks:
        states = [self.state]
        for token in path:
            states.append(self.after(states[-1], token))
        return bit_masks(torch.stack([self.row(state) for state in states]))

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.state = self.after(self.state, token)
            if self.state == LOST:
                self.error = f"{token} may not stand here"

    def copy(self) -> Pairs:
        return type(self)(self.count, self.state, self.vocab)


class ToyPrototype:
    def __init__(self, structure: Structure, vocab: int, kind: type[Pairs]) -> None:
        assert structure.content is not None
        self.count, self.thinking, self.vocab = int(structure.content.source), structure.thinking, vocab
        self.kind = kind

    def start(self, output_ids: Sequence[int] = ()) -> Pairs:
        constraint = self.kind(self.count, None if self.thinking else 0, self.vocab)
        constraint.accept(output_ids)
        return constraint


class ToyCompiler:
    """Compiles at once, or, where `held`, when the test says so (`finish`). A pattern that is no number is an error."""

    def __init__(self, held: bool = False, vocab: int = VOCAB, kind: type[Pairs] = Pairs) -> None:
        self.held, self.vocab, self.kind = held, vocab, kind
        self.waiting: list[tuple[Structure, Future]] = []

    def compile(self, structure: Structure) -> Future:
        future: Future = Future()
        self.waiting.append((structure, future))
        if not self.held:
            self.finish()
        return future

    def close(self) -> None:
        self.held = True

    def finish(self) -> None:
        for structure, future in self.waiting:
            try:
                future.set_result(ToyPrototype(structure, self.vocab, self.kind))
            except ValueError:
                future.set_exception(GrammarError(f"{structure.content} is not a number"))
        self.waiting.clear()


class AutomatonCompiler:
    """Whatever the structure says, it is the endless automaton of plans.py: for engines without an end token."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def compile(self, structure: Structure) -> Future:
        future: Future = Future()
        future.set_result(self)
        return future

    def start(self, output_ids: Sequence[int] = ()) -> Automaton:
        constraint = Automaton(vocab=self.vocab)
        constraint.accept(output_ids)
        return constraint

    def close(self) -> None:
        pass


class FailingPairs(Pairs):
    """Gives up when it is asked what may follow the middle of the second pair."""

    def masks(self, path: Sequence[int]) -> Masks:
        if (self.state or 0) > 2:
            raise RuntimeError("out of fuel")
        return super().masks(path)


class EmptyPairs(Pairs):
    """Lets nothing follow the first pair, and does not say why."""

    def masks(self, path: Sequence[int]) -> Masks:
        rows = super().masks(path)
        return np.where((np.arange(len(rows)) + (self.state or 0) >= 2)[:, None], 0, rows).astype(np.int32)
