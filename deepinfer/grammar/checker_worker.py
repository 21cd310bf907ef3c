"""The process in which a Checker tries grammars out. Imports no torch: a worker is there 0.3 s after one was killed."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path

import numpy as np

from deepinfer.grammar.automaton import Automaton
from deepinfer.grammar.compiler import build_parts
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.prototype import Prototype
from deepinfer.grammar.structure import Structure
from deepinfer.grammar.vocabulary import Vocabulary

WALKS, STEPS = 2, 48
_vocabulary: Vocabulary | None = None


def prepare(definition: bytes, vocab_size: int, eos_token_id: int, memory_bytes: int) -> None:
    """Once in every worker, before its first structure."""
    global _vocabulary
    _vocabulary = Vocabulary(definition, vocab_size, eos_token_id)
    _vocabulary.tokenizer  # noqa: B018  (built here, outside of any structure's time)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of Python's would wait for the parser that is to be ended
    os.nice(10)  # answers that are being streamed come first
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a parser that aborts says so in the log of the server otherwise
    _limit_memory(memory_bytes)


def ready() -> None:
    """A task that starts the workers."""


def check(structure: Structure) -> None:
    """GrammarError for a structure that does not compile, or that fails within some tokens of an answer."""
    assert _vocabulary is not None
    try:
        _try_out(structure, _vocabulary)
    except (MemoryError, RecursionError) as error:
        raise GrammarError(f"the grammar exhausts memory or the parser: {error!r}", "too_large") from None


def _try_out(structure: Structure, vocabulary: Vocabulary) -> None:
    prototype = Prototype(structure, vocabulary, build_parts(structure, vocabulary))
    for automaton in (prototype.content, prototype.block):
        for seed in range(WALKS):
            if automaton is not None:
                follow(automaton.copy(), vocabulary, random.Random(seed))


def follow(automaton: Automaton, vocabulary: Vocabulary, chance: random.Random) -> None:
    """Some tokens that the automaton allows, one after another. GrammarError if it gives up."""
    rows = np.empty((1, vocabulary.words), np.int32)
    for _ in range(STEPS):
        automaton.fill(rows, 0, [])
        if automaton.error is not None:
            raise GrammarError(f"matching the grammar exceeds a limit: {automaton.error}", "too_large")
        allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little"))
        token = int(allowed[chance.randrange(len(allowed))])
        if token == vocabulary.eos_token_id:
            return
        automaton.consume([token])


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone: nobody else would kill a worker that is stuck."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _limit_memory(extra_bytes: int) -> None:
    """Allows `extra_bytes` beyond what the process has mapped; where the system does not say how much that is, no limit
    is set."""
    with contextlib.suppress(OSError, ValueError):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + extra_bytes, mapped + extra_bytes))
