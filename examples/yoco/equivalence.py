"""Leaving rows out gives the logits that masks would have given, bit for bit.

Decoder truncation and bounded replay (docs/engine.md) are approximations: windows end earlier. That they are exactly
those approximations and nothing else is what this proves: every case runs once as the engine does it, with chunks cut
where it hurts, and once as `masked_full.py` does it, and the logits of the prompt's last token and of the tokens
decoded after it must be equal. Replays of the whole dependency cone and windows from the store are compared with a cold
run.

    .venv/bin/python examples/yoco/equivalence.py [--cases all] [--model DIR]

Prints "equal" and the number of cases, or every case that differs; the exit status says the same.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from masked_full import Masks, masked_full
from sequences import Bounds, cold_slot, feed, hit_slot
from torch import Tensor
from tqdm import tqdm

from deepinfer.cache.blocks import BLOCK_TOKENS, blocks_for
from deepinfer.cache.edits import LoadWindow, SaveWindow
from deepinfer.cache.storage import CacheStorage
from deepinfer.kernels import select
from deepinfer.model import load_model
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.config import ModelConfig
from deepinfer.model.hub import resolve_model
from deepinfer.model.truncation import least_keep_tokens

DECODED = 3  # tokens after the prompt, computed one by one and compared, too
DRAFTS = 5  # wrong tokens behind each of them, taken back again


@dataclass(frozen=True)
class Case:
    """A prompt of `length` tokens. hit: how many of them are cached before it is entered at `start` (0: cold; a start
    equal to the hit has its window from the store). keep_from: see Masks. cuts: where chunks end. expected: the masks
    that hide what the run leaves out."""

    kind: str
    length: int
    expected: Masks = field(default_factory=Masks)
    hit: int = 0
    start: int = 0
    keep_from: int = 0
    cuts: tuple[int, ...] = ()


class Prover:
    """Runs cases on one model with made-up tokens; what reading the model's own text would not show better."""

    def __init__(self, model: DeepseekV41, longest: int) -> None:
        self.model, self.longest = model, longest + DECODED
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, model.config.vocab_size // 2, (self.longest,), generator=generator).tolist()
        self.tolerance = 0.0 if select.cpu_twins(model.device, model.numerics.dtype) else 1e-5

    @functools.lru_cache(maxsize=8)  # noqa: B019  # one prover per run
    def reference(self, length: int, masks: Masks) -> Tensor:
        return masked_full(self.model, self.ids[: length + DECODED], masks, DECODED + 1)

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def storage(self, hit: int) -> tuple[CacheStorage, range]:
        """A cache in which a sequence of `hit` tokens has been, with its window in the store, and its blocks. It ended
        long ago, and every case of that hit comes after it, into the same blocks."""
        storage = CacheStorage.for_model(
            self.model,
            max_num_seqs=2,
            num_blocks=2 * blocks_for(self.longest + DRAFTS),
            drafts=DRAFTS,
            window_entries=1,
        )
        if not hit:
            return storage, range(1, 1)
        shared = cold_slot(storage, 0, hit)
        feed(self.model, storage, 0, self.ids[:hit], [hit // 2])
        storage.apply([SaveWindow(0, hit, 0)])
        return storage, shared

    def difference(self, case: Case) -> float:
        """Largest difference of two logits as a share of the largest logit; 0 where they are equal bit for bit."""
        got, expected = self.run(case), self.reference(case.length, case.expected)
        if torch.equal(got, expected):
            return 0.0
        return float((got - expected).abs().nan_to_num(float("inf")).max() / expected.abs().max())

    def run(self, case: Case) -> Tensor:
        """Logits of the prompt's last token and of those decoded after it."""
        (storage, shared), prompt = self.storage(case.hit), self.ids[: case.length]
        count = blocks_for(case.length + DECODED + DRAFTS)
        own = range(len(shared) + 1, count + 1)
        before = storage.block_checksums(shared)
        hit_slot(storage, 1, prompt, case.hit, case.start, own, shared)
        # nothing that lies below the start may be read: not what an earlier sequence left in this slot
        storage.windows.pool[:, storage.windows.ring_of(1)] = float("nan")
        if case.hit and case.start == case.hit:
            storage.apply([LoadWindow(0, 1, case.hit)])
        floor = case.start if case.start < case.hit else 0
        bounds = Bounds(window_floor=floor, write_from=case.hit, keep_from=case.keep_from)
        rows = [feed(self.model, storage, 1, prompt, case.cuts, bounds=bounds)]
        for position in range(case.length, case.length + DECODED):
            step = [*self.ids[: position + 1], *self.ids[:DRAFTS]]
            rows.append(feed(self.model, storage, 1, step, num_logits=1 + DRAFTS)[:1])
            storage.truncate(1, position + 1)
        if (storage.block_checksums(shared) != before).any():
            raise RuntimeError(f"a shared block was written: {case}")
        return torch.cat(rows)


def lengths_of(config: ModelConfig, longest: int) -> list[int]:
    """Around the window, the least and the usual keep set, the first hits; then long ones. For a window of 128 those of
    spec/engine.md 3.10: 1, 127..130, 133..135, 139..141, 255..263, 1,000 and 4,000."""
    w = config.sliding_window
    near = [1, *range(w - 1, w + 3), *range(w + 5, w + 8), *range(w + 11, w + 14), *range(255, 264)]
    return sorted({length for length in (*near, 1000, 4000) if length <= longest})


def around(*places: int, reach: int) -> Iterator[tuple[int, ...]]:
    """Cuts at each place, before and behind it; and all places at once."""
    yield from ((place + offset,) for place in places for offset in range(-reach, reach + 1))
    yield places


def cases_of(config: ModelConfig, longest: int, every: bool) -> Iterator[Case]:
    window, keep, least = config.sliding_window, config.sliding_window + 12, least_keep_tokens(config)
    cone = config.num_hidden_layers * (window - 1) // 2 * 2 + 2
    for length in lengths_of(config, longest):
        masks = Masks(keep_from=max(0, length - keep))
        yield Case("truncated", length, masks, keep_from=masks.keep_from)
        some = around(masks.keep_from, reach=3 if every else 1) if length < 1000 else around(masks.keep_from, reach=0)
        for cuts in some:
            if any(0 < cut < length for cut in cuts):
                yield Case("truncated", length, masks, keep_from=masks.keep_from, cuts=cuts)
        hit = (length - least) // BLOCK_TOKENS * BLOCK_TOKENS
        if hit < 2 * BLOCK_TOKENS and length < 1000:  # the shortest prompts that hit have 262 tokens, 390 with a replay
            length, hit = length + BLOCK_TOKENS, hit + BLOCK_TOKENS
        if length > longest or hit < 2 * BLOCK_TOKENS or not (every or length % 4 == 3 or length >= 1000):
            continue
        start, last = hit - window, length - keep
        replayed = Masks(start, hit)
        for kind, masks in (("replayed", replayed), ("replayed and truncated", Masks(start, hit, last))):
            places = (start, hit, last) if kind.endswith("truncated") else (start, hit)
            yield Case(kind, length, masks, hit, start, masks.keep_from)
            for cuts in around(*places, reach=3 if every and length < 1000 else 1):
                yield Case(kind, length, masks, hit, start, masks.keep_from, cuts)
        yield Case("window from the store", length, Masks(), hit, hit, cuts=(hit + 1,))
        kept = Masks(keep_from=max(last, hit))
        yield Case("window from the store and truncated", length, kept, hit, hit, kept.keep_from)
        if start > cone:
            yield Case("whole cone replayed", length, Masks(), hit, hit - cone, cuts=(hit - 1, hit + 1))
    if every:  # chunk ends at every residue of a block
        length, hit = 401, 2 * BLOCK_TOKENS
        masks = Masks(hit - window, hit, length - keep)
        for cut in range(hit - BLOCK_TOKENS // 2, hit + BLOCK_TOKENS // 2):
            yield Case("replayed and truncated", length, masks, hit, masks.replay_from, masks.keep_from, (cut,))


def main() -> int:
    parser = argparse.ArgumentParser(description="Truncation and replay against masks, bit for bit.")
    parser.add_argument("--model", default=None, help="nano (the default), or a directory in the Hugging Face layout")
    parser.add_argument("--cases", choices=("quick", "all"), default="quick", help="quick: a minute or two")
    options = parser.parse_args()
    model = load_model(resolve_model(options.model))
    if (obstacle := model.config.narrowing_obstacle()) is not None:
        parser.error(f"this model cannot be truncated: {obstacle}")
    longest = min(4000, model.config.max_position_embeddings - DECODED - DRAFTS)
    cases = list(dict.fromkeys(cases_of(model.config, longest, options.cases == "all")))
    cases.sort(key=lambda case: (case.length, case.hit))  # neighbours share their references and caches
    prover, wrong = Prover(model, longest), []
    for case in tqdm(cases, unit="case", disable=None):
        difference = prover.difference(case)
        if difference > prover.tolerance:
            wrong.append((case, difference))
    for case, difference in wrong:
        print(f"differs by {difference:.1e} of the largest logit: {case}")
    if wrong:
        print(f"{len(wrong)} of {len(cases)} cases differ")
        return 1
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(case.kind for case in cases).items())
    bits = "bit for bit" if not prover.tolerance else f"within {prover.tolerance} (no CPU kernels here)"
    print(f"equal {bits}: {len(cases)} cases ({kinds})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
