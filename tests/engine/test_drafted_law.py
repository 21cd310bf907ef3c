"""Drafts that are accepted by chance: what comes out follows the law of the target, token for token and together.

Many sequences with one prompt and seeds of their own draw a few tokens each, and the paths are counted against the
exact law of all paths. Drafts come from another law, with a confidence that knows the tokens before each draft.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from plans import Automaton, Chunk, Host
from torch import Tensor

from deepinfer.cache.storage import CacheStorage
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model.batch import Batch
from deepinfer.speculation.propose import DraftLaw, Proposal, draw_drafts

VOCAB, LENGTH, SLOTS = 5, 4, 500
PROMPT = [1, 3]
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.manual_seed(1)) * 1.2  # row: the last token
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=torch.manual_seed(2))
EVERYTHING = SamplingParams(
    temperature=0.9, top_k=4, top_p=0.93, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=-0.2
)


class BigramModel:
    """Logits are a function of the last token alone."""

    device = torch.device("cpu")

    def forward(self, batch: Batch, storage: CacheStorage) -> Tensor:
        storage.begin(batch).commit()
        return TARGET[batch.token_ids[batch.logit_rows]]


class BigramDrafter:
    """Drafts from `logits`, by the token before; its confidence is a function of that token, too."""

    def __init__(self, storage: CacheStorage, k: int, logits: Tensor) -> None:
        self.k, self._storage, self._logits = k, storage, logits
        self._confidence = torch.linspace(-2, 2, VOCAB)

    def propose(self, slots: np.ndarray, anchors: Tensor, law: DraftLaw) -> Proposal:
        previous, drafts, logits, confidence = anchors, [], [], []
        positions = torch.from_numpy(self._storage.lengths(slots))
        for i in range(self.k):
            logits.append(self._logits[previous])
            confidence.append(self._confidence[previous])
            previous = draw_drafts(logits[-1], law, positions + i, i + 1)
            drafts.append(previous)
        return Proposal(torch.stack(drafts, 1), torch.stack(confidence, 1), torch.stack(logits, 1))


def law_behind(output: tuple[int, ...], params: SamplingParams, constrained: bool) -> np.ndarray:
    """Probabilities of the next token, float64 [VOCAB], by the specification's order spelled out."""
    z = TARGET[[*PROMPT, *output][-1]].double().numpy().copy()
    said = Counter(output)
    for token in {*PROMPT, *output}:
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token, times in said.items():
        z[token] -= params.frequency_penalty * times + params.presence_penalty
    if constrained:
        z[sum(output) % 5] = -np.inf  # the automaton's state
    p = np.exp((z - z.max()) / params.temperature)
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    mass = np.cumsum(p[order]) / p.sum()
    p[order[int((mass < params.top_p).sum()) + 1 :]] = 0
    return p / p.sum()


def assert_paths_follow(paths: Counter, params: SamplingParams, constrained: bool) -> None:
    """Chi-square at 1 in 1,000 over all paths; those expected less than ten times together."""
    total = sum(paths.values())
    laws = {
        output: law_behind(output, params, constrained)
        for length in range(LENGTH)
        for output in itertools.product(range(VOCAB), repeat=length)
    }
    rare_seen, rare_expected, statistic, cells = 0, 0.0, 0.0, 0
    for path in itertools.product(range(VOCAB), repeat=LENGTH):
        expected = total * math.prod(laws[path[:i]][token] for i, token in enumerate(path))
        if expected == 0:
            assert paths[path] == 0
        elif expected < 10:
            rare_seen, rare_expected = rare_seen + paths[path], rare_expected + expected
        else:
            statistic, cells = statistic + (paths[path] - expected) ** 2 / expected, cells + 1
    if rare_expected >= 10:
        statistic, cells = statistic + (rare_seen - rare_expected) ** 2 / rare_expected, cells + 1
    freedom = cells - 1
    # Wilson-Hilferty: quantile 0.999 of chi-square, z = 3.090
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.090 * math.sqrt(2 / (9 * freedom))) ** 3


def count_paths(params: SamplingParams, constrained: bool, budget: int | None, logits: Tensor, sequences: int):
    """-> how often each path came, and drafts accepted per draft verified."""
    host = Host(BigramModel(), drafts=3, drafter=lambda storage, k: BigramDrafter(storage, k, logits),
                slots=SLOTS, vocab=VOCAB)  # fmt: skip
    seeds, paths, accepted, verified = Random(4), Counter(), 0, 0
    for _ in range(sequences // SLOTS):
        slots = [
            host.admit(
                PROMPT,
                params.with_changes(ignore_eos=True),  # id 1 is a token like any other here
                seeds.getrandbits(64),
                room=64,
                reproducible=False,
                constraint=Automaton(vocab=VOCAB) if constrained else None,
            )
            for _ in range(SLOTS)
        ]
        parts = host.speculate(*(Chunk(slot, 0, len(PROMPT)) for slot in slots))
        said = dict(zip(slots, parts, strict=True))
        while open_slots := [slot for slot in slots if len(said[slot]) < LENGTH]:
            plan = host.plan(*(Chunk(slot, 0) for slot in open_slots), caps=[3] * len(open_slots), budget=budget,
                             propose=True)  # fmt: skip
            result = host.runner.run(plan)
            assert result.valid.all() and result.counts is not None and result.num_verified is not None
            accepted, verified = (
                accepted + int(result.counts.sum()) - len(open_slots),
                verified + result.num_verified.sum(),
            )
            parts = np.split(result.token_ids, result.counts.cumsum()[:-1])
            for slot, part in zip(open_slots, parts, strict=True):
                said[slot] += part.tolist()
        paths.update(tuple(tokens[:LENGTH]) for tokens in said.values())
        for slot in slots:
            host.manager.close(slot)
    return paths, accepted / max(int(verified), 1)


def test_paths_follow_the_target_s_law_with_every_processor_and_a_budget() -> None:
    paths, kept = count_paths(EVERYTHING, True, 650, DRAFT, 20_000)  # 80,000 tokens; the slow test has 240,000 a case
    assert_paths_follow(paths, EVERYTHING, True)
    assert 0.2 < kept < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 350], ids=["fixed", "budget"])
@pytest.mark.parametrize("drafts", ["other", "opposite", "same"])
@pytest.mark.parametrize("params", [SamplingParams(), EVERYTHING, SamplingParams(temperature=0.6, top_k=3)])
def test_paths_follow_the_target_s_law(params: SamplingParams, drafts: str, budget: int | None) -> None:
    logits = {"other": DRAFT, "opposite": -3 * TARGET, "same": TARGET}[drafts]
    for constrained in (False, True):
        paths, _ = count_paths(params, constrained, budget, logits, 60_000)
        assert_paths_follow(paths, params, constrained)
