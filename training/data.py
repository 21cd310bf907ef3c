"""Token streams on the training device and batches mixed from them.

A stream is a flat run of documents (BOS ... EOS) with marks (see marks.py). Rows are cut from it at a fresh phase every
epoch and visited in random order; rows of an "aligned" stream begin at the next BOS. "Record" streams hold samples of
exactly the row length, which are never cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.marks import ANSWER, ANSWER_WEIGHT, IDS, SKIP

PAD = 2


class Stream:
    """One kind of text on the device."""

    def __init__(self, data: np.ndarray, device: torch.device, record: int = 0, seed: int = 0, aligned: bool = False):
        self.data = torch.from_numpy(data.view(np.int16)).to(device)  # uint16 bits; ids stay below 32768
        self.record, self.rng = record, np.random.default_rng(seed)
        self.begins = np.flatnonzero((data & IDS) == 0) if aligned else None
        self.order: np.ndarray = np.empty(0, dtype=np.int64)
        self.length = 0
        self.taken = 0  # tokens handed out

    def starts(self, count: int, length: int) -> np.ndarray:
        """Offsets of the next `count` rows."""
        if length != self.length:
            self.order, self.length = np.empty(0, dtype=np.int64), length
        while len(self.order) < count:
            step = self.record or length
            phase = 0 if self.record else int(self.rng.integers(0, min(length, max(1, len(self.data) - length))))
            rows = (len(self.data) - phase) // step
            fresh = phase + step * self.rng.permutation(rows)
            if self.begins is not None:
                at = np.searchsorted(self.begins, fresh)
                begins = self.begins[at[at < len(self.begins)]]
                begins = begins[begins <= len(self.data) - length]
                fresh = begins if len(begins) else fresh
            self.order = np.concatenate([self.order, fresh])
        self.taken += count * length
        taken, self.order = self.order[:count], self.order[count:]
        return taken


@dataclass
class Batch:
    tokens: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64, -100 where nothing is predicted
    weights: Tensor  # [B, T] float32, share of each target in the loss: 0, 1 or ANSWER_WEIGHT
    kinds: list[str]  # kind of each row


class Mixer:
    """Batches with a fixed share of rows per kind (rounded with carry, so shares hold over many batches)."""

    def __init__(self, streams: dict[str, Stream], device: torch.device):
        self.streams, self.device = streams, device
        self.debt: dict[str, float] = {}

    def batch(self, shares: dict[str, float], rows: int, length: int) -> Batch:
        """`rows` rows of `length` tokens; kinds without a stream, or with records of another length, are left out."""
        usable = {k: s for k, s in shares.items() if k in self.streams and self.streams[k].record in (0, length)}
        total = sum(usable.values())
        wanted = {k: rows * s / total + self.debt.get(k, 0.0) for k, s in usable.items()}
        counts = {k: int(v) for k, v in wanted.items()}
        for k in sorted(wanted, key=lambda k: wanted[k] - counts[k], reverse=True)[
            : max(0, rows - sum(counts.values()))
        ]:
            counts[k] += 1
        self.debt = {k: wanted[k] - counts[k] for k in wanted}
        parts, kinds = [], []
        for kind, count in counts.items():
            count = min(count, rows - len(kinds))
            if count <= 0:
                continue
            stream = self.streams[kind]
            starts = torch.from_numpy(stream.starts(count, length)).to(self.device)
            parts.append(stream.data[starts[:, None] + torch.arange(length, device=self.device)])
            kinds += [kind] * count
        stored = torch.cat(parts).long()
        tokens, nexts = stored & IDS, stored.roll(-1, 1)
        targets = torch.where((nexts & SKIP) > 0, -100, next_targets(tokens))
        weights = torch.where((nexts & ANSWER) > 0, ANSWER_WEIGHT, 1.0) * (targets >= 0)
        return Batch(tokens, targets, weights, kinds)


def next_targets(tokens: Tensor) -> Tensor:
    """Next token of each position; -100 at the row's end and where the next token is BOS or padding."""
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    return torch.where((targets == 0) | (targets == PAD), -100, targets)


def load_streams(folder: Path, device: torch.device, seen: set[str]) -> dict[str, np.ndarray]:
    """Arrays of the not yet `seen` files `<any>.<kind>.u16`, joined per kind."""
    found: dict[str, list[np.ndarray]] = {}
    for path in sorted(folder.glob("*.u16")):
        if path.name not in seen:
            seen.add(path.name)
            found.setdefault(path.name.split(".")[-2], []).append(np.fromfile(path, dtype=np.uint16))
    return {kind: np.concatenate(parts) for kind, parts in found.items()}


class Feed:
    """Puts the streams of a folder into a mixer, also files that appear while a training runs."""

    def __init__(self, folder: str | Path, mixer: Mixer):
        self.folder, self.mixer = Path(folder), mixer
        self.seen: set[str] = set()
        self.arrays: dict[str, list[np.ndarray]] = {}

    def refresh(self) -> dict[str, int]:
        """Takes up files that have appeared since the last look -> tokens of the kinds that grew."""
        sizes = {}
        for kind, array in load_streams(self.folder, self.mixer.device, self.seen).items():
            self.arrays.setdefault(kind, []).append(array)
            joined = np.concatenate(self.arrays[kind])
            record = int(kind[4:]) if kind.startswith("look") else 0
            self.mixer.streams[kind] = Stream(joined, self.mixer.device, record, len(self.seen), aligned=kind == "chat")
            sizes[kind] = len(joined)
        return sizes
