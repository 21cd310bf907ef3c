"""Runs the golden prompts through the model, in the ways in which a server would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from golden import golden_dir, load, official_dir
from torch import Tensor

from deepinfer.cache import Cache
from deepinfer.kernels import select
from deepinfer.model import Chunk, load_model
from deepinfer.model.backbone import DeepseekV41

# Prompts without images: these belong to the text backbone. test_golden holds the list to the data.
TEXT_PROMPTS = {
    "01-core-trace": ("p0", "p1"),
    "02-ratio2-odd": ("p0", "p1", "p2", "p3", "p4", "p5"),
    "04-engram-repeat": ("p0", "p1", "p2"),
    "06-yarn-long": ("p0", "p1"),
    "08-dspark": ("p0", "p1"),
    "10-vision": ("p2",),
    "12-odd-sizes": ("p0", "p1"),
}
ENGRAM_CASES = ("01-core-trace", "04-engram-repeat", "10-vision")
NUM_BLOCKS = 16  # of 128 tokens: more than all prompts of a case need at once

by_prompt = pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(case, name, id=f"{case}-{name}") for case, names in TEXT_PROMPTS.items() for name in names],
)
by_case = pytest.mark.parametrize("case", TEXT_PROMPTS)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These matrices are tiny: a second thread only waits, the longer the busier the machine is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def model(case: str, dtype: str, kernels: str = "picked") -> DeepseekV41:
    """kernels: "picked" = what the engine picks on this machine; "reference" = weights in the reference's form."""
    return load_model(golden_dir() / case, dtype=dtype, weights="wide" if kernels == "reference" else "auto")


def only(kernels: str) -> AbstractContextManager[None]:
    """The context in which a model of these kernels has to run."""
    return select.reference_only() if kernels == "reference" else nullcontext()


def expected(case: str) -> dict[str, Tensor]:
    return load(golden_dir() / case / "expected.safetensors")


def official(case: str) -> dict[str, Tensor]:
    return load(official_dir() / "cases" / case / "expected.safetensors")


@cache
def prompts(case: str) -> dict[str, dict]:
    listed = json.loads((golden_dir() / case / "prompts.json").read_text())["prompts"]
    return {prompt["name"]: prompt for prompt in listed}


@contextmanager
def traced(network: DeepseekV41) -> Iterator[dict[str, list[Tensor]]]:
    """Collects what the model traces: per name, one tensor per step."""
    seen: dict[str, list[Tensor]] = {}
    network.trace = lambda name, value: seen.setdefault(name, []).append(value.clone())
    try:
        yield seen
    finally:
        network.trace = None


@dataclass(frozen=True)
class Run:
    """What a prompt gave: logits of its positions, logits after each decode token, and the trace of all of it."""

    prefill: Tensor  # [T, vocab]
    decode: Tensor  # [steps, vocab]
    trace: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def greedy_ids(self) -> list[int]:
        """What greedy decoding picks: the best of the last prompt row, then of every row but the last."""
        return torch.cat((self.prefill[-1:], self.decode[:-1])).argmax(1).tolist()


@cache
def run_alone(case: str, name: str, dtype: str, set_dir: Path, kernels: str = "picked") -> Run:
    """One prefill of the prompt, then its recorded greedy tokens one by one; `set_dir` is where those are recorded."""
    network = model(case, dtype, kernels)
    ids = prompts(case)[name]["ids"]
    tokens = load(set_dir / "expected.safetensors")[f"{name}.decode_ids"].tolist()
    store = Cache.for_model(network, max_num_seqs=1, num_blocks=NUM_BLOCKS)
    slot = store.open()
    store.reserve(slot, len(ids) + len(tokens))
    with traced(network) as trace, only(kernels):
        prefill = network.forward([Chunk(slot, 0, ids, len(ids))], store)
        steps = [network.forward([Chunk(slot, len(ids) + i, [token])], store) for i, token in enumerate(tokens)]
    store.close(slot)
    return Run(prefill, torch.cat(steps), trace)


def run_together(network: DeepseekV41, sequences: list[list[int]], sizes: list[list[int]]) -> list[Tensor]:
    """All sequences in the same steps. sizes[s]: how many tokens sequence s feeds in each step, 0 = it waits.

    -> per sequence the logits of all its positions. Slots are handed out in reverse, so rows and slots differ.
    """
    store = Cache.for_model(network, max_num_seqs=len(sequences) + 1, num_blocks=NUM_BLOCKS)
    slots = [store.open() for _ in sequences][::-1]
    rows: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for step in range(max(map(len, sizes))):
        chunks, owners = [], []
        for number, ids in enumerate(sequences):
            size = sizes[number][step] if step < len(sizes[number]) else 0
            if size == 0:
                continue
            store.reserve(slots[number], done[number] + size)
            chunk = ids[done[number] : done[number] + size]
            chunks.append(Chunk(slots[number], done[number], chunk, size))
            owners.append(number)
            done[number] += size
        logits = network.forward(chunks, store).split([len(chunk.token_ids) for chunk in chunks])
        for number, part in zip(owners, logits, strict=True):
            rows[number].append(part)
    assert done == [len(ids) for ids in sequences]
    for slot in slots:
        store.close(slot)
    return [torch.cat(parts) for parts in rows]
