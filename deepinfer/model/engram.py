"""Engram: rows of a hashed n-gram table, gated into every copy of the stream (section 2.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from deepinfer.kernels import select
from deepinfer.model.config import ConfigError, ModelConfig
from deepinfer.model.parameters import EngramRows, WeightSource

if TYPE_CHECKING:
    from deepinfer.model.engram_prefetch import EngramPrefetch

_SEED_STEP = 10007  # the release seeds layer L's multipliers with 10007 * L
_KEPT_SPACE = "\ue000"  # private-use stand-in that protects a string of exactly one space from strip


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _KEPT_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_KEPT_SPACE, " "),
        ]
    )


def token_map(tokenizer: Tokenizer) -> Tensor:
    """Token id -> compressed id, int64 [vocabulary]. Tokens that read alike (case, accents, white space) share an id.

    A token whose text is not whole UTF-8 keeps its raw vocabulary string as its key. Ids follow first appearance.
    """
    normalize = _normalizer().normalize_str
    seen: dict[str, int] = {}
    ids = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = str(tokenizer.id_to_token(token)) if "\ufffd" in text else normalize(text) or text
        ids.append(seen.setdefault(key, len(seen)))
    return torch.tensor(ids, dtype=torch.int64)


class NgramHash:
    """The hash tables of every Engram layer, derived from the config and the tokenizer alone."""

    def __init__(self, config: ModelConfig, tokenizer_file: Path, device: torch.device) -> None:
        """Raises ConfigError when the tokenizer does not give the compressed vocabulary that the config names."""
        self.layers = config.engram_layer_ids
        self.image_token_id = config.image_token_id
        self.token_map = token_map(Tokenizer.from_file(str(tokenizer_file))).to(device)
        size = int(self.token_map.max()) + 1
        if size != config.engram_compressed_vocab_size:
            raise ConfigError(
                str(tokenizer_file),
                [
                    f"the tokenizer gives {size} compressed ids, engram_compressed_vocab_size says "
                    f"{config.engram_compressed_vocab_size}: tokenizer and checkpoint do not belong together"
                ],
            )
        self.pad = int(self.token_map[config.engram_pad_token_id])
        self.primes = torch.tensor(config.engram_primes(), device=device)  # [layers, orders, heads]
        flat = self.primes.flatten(1)
        self.offsets = flat.cumsum(1) - flat  # [layers, orders * heads]
        self.multipliers = torch.stack([self._multipliers(layer, size, config) for layer in self.layers]).to(device)

    @staticmethod
    def _multipliers(layer: int, size: int, config: ModelConfig) -> Tensor:
        bound = (2**63 - 1) // size // 2  # an id times 2v + 1 stays below 2^63
        draws = np.random.default_rng(_SEED_STEP * layer).integers(
            0, bound, size=config.engram_max_ngram_size, dtype=np.int64
        )
        return torch.from_numpy(2 * draws + 1)

    def live(self, token_ids: Tensor) -> Tensor:
        """Token ids with -1 in place of dead (image) tokens, which end n-grams and get no Engram term."""
        return torch.where(token_ids == self.image_token_id, -1, token_ids)

    def rows(self, history: Tensor) -> list[Tensor]:
        """history int64 [N, orders + 1] raw token ids (-1 = blocked) -> per Engram layer int64 [N, columns]."""
        return select.ngram_rows(history, self.token_map, self.multipliers, self.primes, self.offsets, self.pad)


class TableRows(Protocol):
    """Rows of the Engram tables for the tokens of a step."""

    @property
    def capturable(self) -> bool:
        """Whether they may be read in a CUDA graph."""
        ...

    def start(self, ids: Mapping[int, Tensor]) -> Callable[[int], Any]:
        """Row numbers int64 [N, columns] of every Engram layer -> what gives a layer its rows, once."""
        ...

    def check(self) -> None:
        """Raises what was wrong with rows that were read up to now, if that was not said at once."""
        ...


class ReadTables:
    """Rows are read when a layer takes them -> [N, columns * head_dim] in the model's dtype. Several threads may."""

    capturable = False

    def __init__(self, tables: Mapping[int, EngramRows], device: torch.device, dtype: torch.dtype) -> None:
        self._tables, self._device, self._dtype = tables, device, dtype

    def start(self, ids: Mapping[int, Tensor]) -> Callable[[int], Tensor]:
        return lambda layer: self._tables[layer].rows(ids[layer]).to(self._device, self._dtype).flatten(1)

    def check(self) -> None:
        """Nothing is left to say."""


class PrefetchedTables:
    """Rows are on their way to the GPU from `start` on, and come folded to FP8. One step at a time."""

    def __init__(self, prefetch: EngramPrefetch) -> None:
        self.prefetch = prefetch

    @property
    def capturable(self) -> bool:
        return self.prefetch.capturable

    def start(self, ids: Mapping[int, Tensor]) -> Callable[[int], Any]:
        self.prefetch.start(ids)
        return self.prefetch.take

    def check(self) -> None:
        self.prefetch.check()


def table_rows(engrams: Mapping[int, Engram], columns: int, device: torch.device, dtype: torch.dtype) -> TableRows:
    """Engrams by layer -> what their tables are read with: on a GPU by its kernels, where those serve the weights."""
    tables = {layer: engram.table for layer, engram in engrams.items()}
    if tables and all(select.folds_rows(engram.wkv, device, dtype) for engram in engrams.values()):
        from deepinfer.model.engram_prefetch import EngramPrefetch
        from deepinfer.model.engram_table import EngramTable

        mapped = {layer: table for layer, table in tables.items() if isinstance(table, EngramTable)}
        return PrefetchedTables(EngramPrefetch(mapped, columns=columns, device=device))
    return ReadTables(tables, device, dtype)


class Engram:
    """The injection before one block. The table stays on disk; everything else is a weight like any other."""

    def __init__(self, config: ModelConfig, source: WeightSource, prefix: str) -> None:
        self.eps = config.rms_norm_eps
        self.table = source.table(f"{prefix}.engram.embed")
        self.wkv = source.matrix(f"{prefix}.engram.wkv")
        self.gate_weight = source.vector(f"{prefix}.engram.q_weight") * source.vector(f"{prefix}.engram.k_weight")

    def __call__(self, stream: Tensor, memory: Any, dead: Tensor | None) -> Tensor:
        """stream [N, copies, D], memory (what `TableRows.start` led to), dead bool [N] or None -> stream with the term
        added."""
        kv = select.project_memory(memory, self.wkv)  # [N, (copies + 1) * D]
        return select.engram_inject(stream, kv, self.gate_weight, dead, self.eps)
