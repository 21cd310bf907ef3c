"""A tokenizer as grammars see it: the bytes of every token, and which tokens are control tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import llguidance
import numpy as np

THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
# Control tokens that have no place in an answer. The reserved slots and the marks of grounding may occur in free text.
NEVER = (
    "<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>",
    "<｜deepseek_image｜>", "<｜image｜>", "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>",
    "<｜title｜>", "<｜read_url｜>", THINK, END_THINK,
)  # fmt: skip


class Vocabulary:
    """Every id of a model's vocabulary. Made from a tokenizer.json; the matcher's own tables are built when first asked
    for (0.05 s at 8,192 ids, 0.7 s at 129,280)."""

    def __init__(self, definition: bytes, vocab_size: int, eos_token_id: int, name: str = "tokenizer.json") -> None:
        """definition: content of a tokenizer.json. vocab_size: rows of the model's output, at least the tokenizer's ids
        (those beyond are never allowed by a grammar). name: for errors. ValueError for what is no tokenizer."""
        self.definition = definition
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.words = (vocab_size + 31) // 32
        try:
            parsed = json.loads(definition)
            self._added = {token["content"]: int(token["id"]) for token in parsed["added_tokens"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{name}: not a tokenizer file ({error!r})") from error
        if not 0 <= eos_token_id < vocab_size:
            raise ValueError(f"eos_token_id = {eos_token_id} is not one of {vocab_size} ids")
        if beyond := [spelling for spelling, token in self._added.items() if token >= vocab_size]:
            raise ValueError(f"{name}: token {beyond[0]!r} stands beyond vocab_size = {vocab_size}")

    @classmethod
    def from_tokenizer_file(cls, path: Path | str, vocab_size: int, eos_token_id: int) -> Vocabulary:
        """OSError for a file that cannot be read; ValueError naming one that is no tokenizer."""
        return cls(Path(path).read_bytes(), vocab_size, eos_token_id, str(path))

    @cached_property
    def digest(self) -> str:
        """Equal for vocabularies that mean the same."""
        return hashlib.sha256(b"%d %d " % (self.vocab_size, self.eos_token_id) + self.definition).hexdigest()

    @cached_property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """Added tokens are control tokens here, whatever the file says of them: no text spells one."""
        parsed = json.loads(self.definition)
        for token in parsed["added_tokens"]:
            token["special"] = True
        text = json.dumps(parsed)
        return llguidance.LLTokenizer(text, n_vocab=self.vocab_size, eos_token=self.eos_token_id)

    def control_id(self, spelling: str) -> int | None:
        """Id of a control token, None where this tokenizer lacks it."""
        return self._added.get(spelling)

    @cached_property
    def think(self) -> int | None:
        return self.control_id(THINK)

    @cached_property
    def end_think(self) -> int | None:
        return self.control_id(END_THINK)

    @cached_property
    def dsml(self) -> int | None:
        return self.control_id(DSML)

    def tokenize(self, text: str) -> list[int]:
        """Some ids whose bytes are the text's; never a control token. Not always those that a model would say."""
        return self.tokenizer.greedy_tokenize(text)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.decode_bytes([token_id])

    def row(self, token_ids: Iterable[int]) -> np.ndarray:
        """Only these ids are allowed; int32 [words], as all rows here: bit t % 32 of word t // 32 is token t."""
        row = np.zeros(self.words, np.uint32)
        for token in token_ids:
            row[token // 32] |= np.uint32(1 << token % 32)
        return row.view(np.int32)

    def row_without(self, token_ids: Iterable[int]) -> np.ndarray:
        """All ids but these are allowed."""
        return ~self.row(token_ids)

    @cached_property
    def everything(self) -> np.ndarray:
        return np.full(self.words, -1, np.int32)

    @cached_property
    def only_eos(self) -> np.ndarray:
        return self.row([self.eos_token_id])

    @cached_property
    def only_end_think(self) -> np.ndarray:
        return self.row([] if self.end_think is None else [self.end_think])

    @cached_property
    def reasoning(self) -> np.ndarray:
        """What may stand inside <think>: text, and its end. No call begins there."""
        never = self._never - {self.end_think}
        return self.row_without([*never, self.eos_token_id, *self._known(DSML)])

    @cached_property
    def free(self) -> np.ndarray:
        """What may stand in content that no grammar describes."""
        return self.row_without(self._never)

    @cached_property
    def free_without_calls(self) -> np.ndarray:
        return self.row_without([*self._never, *self._known(DSML)])

    @cached_property
    def _never(self) -> frozenset[int]:
        return frozenset(self._known(*NEVER))

    def _known(self, *spellings: str) -> list[int]:
        return [self._added[spelling] for spelling in spellings if spelling in self._added]


def allows(row: np.ndarray, token_id: int) -> bool:
    """Whether this row of a mask allows a token."""
    return 0 <= token_id < 32 * len(row) and bool(int(row[token_id // 32]) >> token_id % 32 & 1)
