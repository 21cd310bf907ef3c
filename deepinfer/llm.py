"""`LLM`: the offline entry point. Loads a model, answers batches of prompts."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Unpack

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer.cache import Cache
from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.config import blocks_for
from deepinfer.engine.admission import check_label
from deepinfer.engine.arguments import Arguments, EngineArguments, shows_arguments
from deepinfer.engine.build import build_core, describe, load
from deepinfer.engine.engine import Engine
from deepinfer.engine.errors import InvalidRequestError
from deepinfer.engine.outputs import RequestOutput, SequenceDelta
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.settings import Settings, resolve_settings
from deepinfer.model import Chunk
from deepinfer.model.hub import resolve_model


class LLM:
    """A loaded model that answers prompts. Threads may share one: their requests are batched together.

    model: a local Hugging Face directory, a hub id, or "nano"; None = DEEPINFER_HF_MODEL_DIR, else "nano". verbose:
    print the effective settings and the loading progress to stderr; without it, settings that have no effect are
    warnings in the log. All other arguments are the fields of
    `EngineArguments` (engine/arguments.py), where each is explained; `help(LLM.__init__)` shows them with their
    defaults. What cannot be had is refused with a reason or stated in the printed settings.
    Raises ValueError naming the argument, the field of config.json, or the file; TypeError for an unknown argument.
    """

    @shows_arguments
    def __init__(
        self, model: str | Path | None = None, *, verbose: bool = True, **arguments: Unpack[Arguments]
    ) -> None:
        chosen = resolve_settings(EngineArguments(**arguments))
        if not verbose:
            chosen.warn()
        self.path = resolve_model(None if model is None else str(model))
        self.tokenizer = Tokenizer.from_directory(self.path)
        self.model, self.engine_config = load(self.path, chosen, progress=verbose)
        self.config = self.model.config
        if self.tokenizer.vocab_size > self.config.vocab_size:
            raise ValueError(
                f"{self.path}: tokenizer.json has {self.tokenizer.vocab_size} ids and config.json's vocab_size is "
                f"{self.config.vocab_size}; the files belong to different models"
            )
        core = build_core(self.path, self.model, self.engine_config, progress=verbose)
        self.engine = Engine(
            core,
            detokenizer=self.tokenizer.text_stream,
            report=lambda line: tqdm.write(f"deepinfer: {line}", file=sys.stderr),  # above a progress bar, not through
            report_interval=chosen.logging_interval,
        )
        self.settings: Settings = chosen
        self._ids = count()
        self._lock = RLock()  # threads share the engine's steps, and their requests its batch: see _turn
        self._in_turn = False
        self._streams: dict[str, deque[SequenceDelta]] = {}
        self._abandoned: deque[str] = deque()  # requests that nobody waits for any more, to be discarded between turns
        if verbose:
            print(describe(self.path, chosen, self.config, core), file=sys.stderr)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        add_bos: bool = True,
        tenant: str = "",
        salt: str = "",
    ) -> list[RequestOutput]:
        """Completes every prompt; outputs in the order of the prompts.

        Give prompts (text) or prompt_token_ids (used as they are), not both. Prompt text is trusted: spellings of
        control tokens in it become control tokens. add_bos puts the begin token in front, unless the text starts with
        its spelling. sampling_params: one for all, or one per prompt. tenant: with queue_policy "fair", whose share the
        prompts count against. salt: they share cached prefixes only with prompts of the same salt.

        Everything is checked before anything starts: an error (InvalidRequestError) names the prompt's index and the
        field, and none of the others has run. If a step fails or the call is interrupted, all blocks are freed.
        """
        _check_labels(tenant, salt)
        work = self._checked(prompts, sampling_params, prompt_token_ids, add_bos)
        request_ids = [str(next(self._ids)) for _ in work]
        try:
            with self._turn():
                for request_id, (text, ids, params) in zip(request_ids, work, strict=True):
                    self.engine.add_request(request_id, ids, params, prompt=text, tenant=tenant, salt=salt)
            self._run(set(request_ids), use_tqdm)
            with self._turn():
                return [self.engine.pop_output(request_id) for request_id in request_ids]
        finally:
            self._abandon(request_ids)  # does nothing to those that were handed over

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        add_bos: bool = True,
        tenant: str = "",
        salt: str = "",
    ) -> Iterator[SequenceDelta]:
        """Completes one prompt (text or token ids) and yields what each step adds. Leaving the loop early aborts it.
        add_bos, tenant, salt: as of `generate`."""
        _check_labels(tenant, salt)
        if isinstance(prompt, str):
            work = self._checked(prompt, sampling_params, None, add_bos)
        else:
            work = self._checked(None, sampling_params, [list(prompt)], add_bos)
        ((text, ids, params),) = work
        return self._stream(text, ids, params, tenant, salt)

    def _stream(
        self, text: str | None, ids: np.ndarray, params: SamplingParams, tenant: str, salt: str
    ) -> Iterator[SequenceDelta]:
        request_id = str(next(self._ids))
        arrived: deque[SequenceDelta] = deque()
        try:
            with self._turn():
                self._streams[request_id] = arrived
                self.engine.add_request(request_id, ids, params, prompt=text, tenant=tenant, salt=salt)
            while arrived or self._goes_on(request_id, arrived):
                if not arrived:
                    self._step()
                while arrived:
                    yield arrived.popleft()
        finally:
            self._abandon([request_id])  # the garbage collector may run this anywhere, in the middle of a step too

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits at every position of a sequence, float32 [n, vocab], on the CPU: row i predicts token i + 1.

        An exact full forward pass in chunks of max_num_batched_tokens, in a cache of its own. Raises
        InvalidRequestError for an empty sequence, an id out of range, or more than the model's positions.
        """
        ids = list(token_ids)
        if len(ids) > self.config.max_position_embeddings:
            raise InvalidRequestError(
                "token_ids", f"{len(ids)} tokens are more than the model's {self.config.max_position_embeddings}"
            )
        self.engine.check_ids("token_ids", ids)
        cache = Cache.for_model(self.model, max_num_seqs=1, num_blocks=blocks_for(len(ids)))
        slot = cache.open()
        cache.reserve(slot, len(ids))
        step = self.engine_config.max_num_batched_tokens
        parts = []
        for start in range(0, len(ids), step):
            piece = ids[start : start + step]
            with self._turn():
                self.engine.core.loop.wait()  # a forward pass has the CPU's threads to itself
                parts.append(self.model.forward([Chunk(slot, start, piece, len(piece))], cache).cpu())
        cache.close(slot)
        return torch.cat(parts)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The engine for one thread; every touch that may change it is made in a turn, and turns do not nest.

        RuntimeError if the thread is in one: a finalizer or a signal handler has struck in the middle of a step.
        """
        try:
            with self._lock:
                if self._in_turn:
                    raise RuntimeError("this LLM was called from within one of its own steps (by a finalizer?)")
                try:
                    self._in_turn = True
                    yield
                finally:
                    self._in_turn = False
        finally:
            self._discard_abandoned()  # those who came in the meantime could not do it themselves

    def _abandon(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these any more: they are discarded now, or when the turn that is under way ends.

        Never waits and never touches an engine that is in use: the garbage collector may call it from any line of any
        thread, with any lock held.
        """
        self._abandoned.extend(request_ids)
        self._discard_abandoned()

    def _discard_abandoned(self) -> None:
        # Looked at again after every release: who comes while the lock is held leaves his to the holder.
        while self._abandoned and self._lock.acquire(blocking=False):
            try:
                if self._in_turn:  # of this same thread; its end comes here again
                    return
                try:
                    self._in_turn = True
                    while self._abandoned:
                        request_id = self._abandoned[0]
                        self._streams.pop(request_id, None)
                        self.engine.discard(request_id)
                        self._abandoned.popleft()  # last, so that an interrupt loses none
                finally:
                    self._in_turn = False
            finally:
                self._lock.release()

    def _goes_on(self, request_id: str, arrived: deque[SequenceDelta]) -> bool:
        """Whether a stream may still get something. A request is over some lines before its last delta has arrived, so
        its end counts only between turns."""
        if self.engine.is_unfinished(request_id):
            return True
        with self._turn():
            return bool(arrived)

    def _step(self) -> list[SequenceDelta]:
        """One engine step; what belongs to an open stream is kept for it, whoever made the step."""
        with self._turn():
            if not self.engine.has_unfinished:  # another thread's step has just ended the last one
                return []
            deltas = self.engine.step()
            for delta in deltas:
                if delta.request_id in self._streams:
                    self._streams[delta.request_id].append(delta)
            return deltas

    def _run(self, waited_for: set[str], use_tqdm: bool) -> None:
        """Steps until these requests have ended, with a bar over them."""
        bar = tqdm(total=len(waited_for), desc="requests", unit="req", disable=not use_tqdm, dynamic_ncols=True)
        tokens = 0
        with bar:
            while waited_for:
                deltas = self._step()
                tokens += sum(len(delta.token_ids) for delta in deltas if delta.request_id in waited_for)
                ended = {request_id for request_id in waited_for if not self.engine.is_unfinished(request_id)}
                waited_for -= ended
                bar.set_postfix(tokens=tokens, refresh=False)
                bar.update(len(ended))

    def _checked(
        self,
        prompts: str | Sequence[str | Sequence[int]] | None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        add_bos: bool,
    ) -> list[tuple[str | None, np.ndarray, SamplingParams]]:
        """(text, ids int32 [n], parameters) of every prompt, all checked."""
        entries = _prompt_list(prompts, prompt_token_ids)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(entries)
        if len(sampling_params) != len(entries):
            raise InvalidRequestError(
                "sampling_params",
                f"{len(sampling_params)} given for {len(entries)} prompts; give one, or one per prompt",
            )
        work: list[tuple[str | None, np.ndarray, SamplingParams]] = []
        compiled: set[int] = set()  # parameters, by identity: most prompts share theirs
        for index, (entry, params) in enumerate(zip(entries, sampling_params, strict=True)):
            try:
                if not isinstance(params, SamplingParams):
                    raise InvalidRequestError("sampling_params", f"must be SamplingParams, got {type(params).__name__}")
                text, ids = self._encoded(entry, add_bos)
                self.engine.check(ids, params)
                if id(params) not in compiled:
                    self.engine.check_grammar(params)
                    compiled.add(id(params))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {index}, {error.field}", error.message) from None
            work.append((text, np.array(ids, np.int32), params))
        return work

    def _encoded(self, entry: object, add_bos: bool) -> tuple[str | None, list[int]]:
        if isinstance(entry, str):
            if not entry:
                raise InvalidRequestError("prompt", "is empty; give at least one character")
            try:
                return entry, self.tokenizer.encode_prompt(entry, add_bos)
            except ValueError as error:
                raise InvalidRequestError("prompt", str(error)) from None
        if isinstance(entry, Sequence) and not isinstance(entry, bytes):
            return None, list(entry)
        raise InvalidRequestError("prompt", f"must be a text or a list of token ids, got {type(entry).__name__}")


def _check_labels(tenant: object, salt: object) -> None:
    for field, value in (("tenant", tenant), ("salt", salt)):
        check_label(field, value)


def _prompt_list(prompts: object, prompt_token_ids: object) -> list:
    """One entry per prompt: text or ids."""
    if (prompts is None) == (prompt_token_ids is None):
        raise InvalidRequestError("prompts", "give either prompts or prompt_token_ids")
    name, given = ("prompts", prompts) if prompts is not None else ("prompt_token_ids", prompt_token_ids)
    if isinstance(given, str) and name == "prompts":
        given = [given]
    if name == "prompt_token_ids" and (
        isinstance(given, str) or (isinstance(given, Sequence) and any(isinstance(entry, str) for entry in given))
    ):
        raise InvalidRequestError(name, "holds text; give text as prompts")
    if not isinstance(given, Sequence):
        raise InvalidRequestError(name, f"must be a list, got {type(given).__name__}")
    if not given:
        raise InvalidRequestError(name, "is empty; give at least one prompt")
    if all(isinstance(entry, int) for entry in given):
        return [given]  # one list of ids
    return list(given)
