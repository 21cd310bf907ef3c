"""Grammars over the tokenizer of a checkpoint: what compiles them and what fills their masks, made when a request first
asks for some, in a thread: at 129,280 ids the tokenizer alone takes most of a second."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer.engine.grammars import CompileLog, Grammars
from deepinfer.grammar.compiler import Compiler
from deepinfer.grammar.errors import GrammarError
from deepinfer.grammar.fill import MaskFiller
from deepinfer.grammar.structure import Structure
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.speculation.constraint import Masks, Prototype

TOKENIZER_FILE = "tokenizer.json"
COMPILE_THREADS = 2  # a grammar that is in the cache passes one that takes long
MOST_FILL_THREADS = 8  # 32 rows of 60 us are done in a quarter of a millisecond


class _Tools(NamedTuple):
    compiler: Compiler
    filler: MaskFiller


class CheckpointGrammars:
    """A GrammarCompiler and a MaskFiller. observe: told what came of each structure, as Compiler tells it."""

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, eos_token_id: int, observe: Callable[[str, float], None]
    ) -> None:
        self._arguments = (tokenizer_file, vocab_size, eos_token_id)
        self._observe = observe
        self._lock = threading.Lock()
        self._tools: Future[_Tools] | None = None

    def compile(self, structure: Structure) -> Future[Prototype]:
        tools = self._load()
        answer: Future[Prototype] = Future()

        def begin(tools: Future[_Tools]) -> None:
            try:
                compiling = tools.result().compiler.compile(structure)
            except Exception as error:
                answer.set_exception(error)
            else:
                compiling.add_done_callback(end)

        def end(compiled: Future[Any]) -> None:
            if compiled.cancelled():
                answer.cancel()
            elif (error := compiled.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(compiled.result())

        tools.add_done_callback(begin)
        return answer

    def begin(self, rows: Sequence[tuple[Any, Sequence[int]]]) -> Future[Masks]:
        return self._load().result().filler.begin(rows)

    def close(self) -> None:
        """Compiles nothing more. Idempotent."""
        tools = self._tools
        if tools is not None and tools.done() and tools.exception() is None:
            tools.result().compiler.close()
            tools.result().filler.close()

    def _load(self) -> Future[_Tools]:
        with self._lock:
            if self._tools is None:
                pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-vocabulary")
                self._tools = pool.submit(self._make_tools)
                pool.shutdown(wait=False)
            return self._tools

    def _make_tools(self) -> _Tools:
        try:
            vocabulary = Vocabulary.from_tokenizer_file(*self._arguments)
        except (OSError, ValueError) as error:
            raise GrammarError(f"the checkpoint's {TOKENIZER_FILE} cannot be used: {error}") from error
        compiler = Compiler(vocabulary, threads=COMPILE_THREADS, observe=self._observe)
        # The forward pass wants the cores too, where it runs on them.
        threads = max(1, min((os.cpu_count() or 1) // 2, MOST_FILL_THREADS))
        return _Tools(compiler, MaskFiller(vocabulary, threads=threads))


def checkpoint_grammars(
    directory: Path, vocab_size: int, eos_token_id: int
) -> tuple[Grammars, CheckpointGrammars | None]:
    """What an engine on this checkpoint needs: for its core, and for its runner, which fills no masks where there is no
    tokenizer."""
    file = directory / TOKENIZER_FILE
    if not file.is_file():
        return Grammars(None, reason=f"the checkpoint has no {TOKENIZER_FILE}"), None
    log = CompileLog()
    compiler = CheckpointGrammars(file, vocab_size, eos_token_id, log.observe)
    return Grammars(compiler, log), compiler
