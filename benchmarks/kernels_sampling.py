"""Draws, chains of drafts and a round's bookkeeping at the released model's vocabulary, for `kernels.py`.

Logits look like a language model's: most of 129,280 values within a few units, some hundred far above them, so that
top_p leaves hundreds of tokens; of "normal x 4" it leaves 2,000 at 0.95, of "x 3" 11,000, of "x 1" 96,000. Limits
count one read of the logits (and of the head, for each draft of a chain).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from kernel_cases import KernelCase, Prepared, copies_beyond_cache
from torch import Tensor

from deepinfer.cache.graph_step import StepRows
from deepinfer.engine.device_round import DeviceRound, Round, RoundColumns
from deepinfer.engine.plan import Admission
from deepinfer.engine.sampler import choose
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.sampling_state import SamplingState
from deepinfer.kernels.prefixes import ranked_prefixes
from deepinfer.kernels.reference import markov as reference
from deepinfer.kernels.triton.draft_selection import select_lengths
from deepinfer.kernels.triton.markov import markov_chain
from deepinfer.kernels.triton.sampling import sample
from deepinfer.kernels.triton.sampling_rows import RowLaws

VOCAB, RANK, DRAFTS = 129280, 256, 5
CHECKED = 32  # rows that the CPU draws, too
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "top_k 50": SamplingParams(top_k=50),
    "top_k 50, top_p 0.9": SamplingParams(top_k=50, top_p=0.9),
}
# us for 384 rows: 1.3 and 4 reads of the logits at 4,285 GB/s.
TARGETS = {"greedy": 60.0, "top_p 0.95": 185.0, "top_k 50": 185.0}


def random_logits(rows: int, device: torch.device) -> Tensor:
    logits = torch.randn(rows, VOCAB, device=device) * 2.2
    places = torch.randint(0, VOCAB, (rows, 300), device=device)
    return logits.scatter_add_(1, places, torch.rand(rows, 300, device=device) * 14)


def slots_of(params: SamplingParams, rows: int, device: torch.device) -> tuple[SamplingState, RoundColumns]:
    state = SamplingState(rows, VOCAB, device=device)
    state.admit([Admission(i, np.array([1, 2], np.int32), 2, params, 10_007 * i) for i in range(rows)])
    columns = RoundColumns(rows, DRAFTS, device)
    columns.enter(state, np.arange(rows), np.full(rows, 20))
    return state, columns


def laws_of(columns: RoundColumns, rows: int, device: torch.device) -> RowLaws:
    return columns.laws(torch.arange(rows, device=device), torch.arange(rows, device=device) * 3 + 5)


def draw_case(name: str, rows: int, scale: float = 0.0) -> KernelCase:
    """scale: of normal logits; 0: those of `random_logits`."""
    params = KINDS[name]

    def make(device: torch.device) -> Prepared:
        _, columns = slots_of(params, rows, device)
        laws = laws_of(columns, rows, device)
        copies = range(copies_beyond_cache(4 * rows * VOCAB))
        inputs = [
            scale * torch.randn(rows, VOCAB, device=device) if scale else random_logits(rows, device) for _ in copies
        ]
        drawn, truncated = not params.greedy, params.truncated

        def check() -> float:
            """Against the sampler on the CPU: on a GPU it asks the very kernel that is measured."""
            out, first = sample(inputs[0], laws, drawn=drawn, truncated=truncated), min(rows, CHECKED)
            plain, _ = slots_of(params, first, torch.device("cpu"))
            expected = choose(inputs[0][:first].cpu(), np.arange(first), np.arange(first) * 3 + 5, plain)
            near = torch.allclose(out.logprobs[:first].cpu(), expected.logprobs, atol=2e-5)
            return 0.0 if torch.equal(out.token_ids[:first].cpu(), expected.token_ids) and near else 1.0

        return Prepared(
            lambda copy: sample(inputs[copy], laws, drawn=drawn, truncated=truncated), len(inputs), check, 0.5
        )

    return KernelCase(
        name=f"draw, {name}, {rows} rows" + (f", normal x {scale:g}" if scale else ""),
        area="sampling",
        shape={"m": rows, "n": VOCAB},
        make=make,
        bytes=4 * rows * VOCAB,
        target_us=TARGETS.get(name) if rows == 384 and not scale else None,
    )


def chain_case(rows: int, drawn: bool) -> KernelCase:
    nbytes = DRAFTS * (2 * VOCAB * RANK + 4 * rows * VOCAB)

    def make(device: torch.device) -> Prepared:
        embed, head = (0.3 * torch.randn(VOCAB, RANK, device=device).to(torch.bfloat16) for _ in range(2))
        logits = random_logits(rows * DRAFTS, device).view(rows, DRAFTS, VOCAB)
        anchors = torch.randint(0, VOCAB, (rows,), device=device)
        _, columns = slots_of(KINDS["temperature" if drawn else "greedy"], rows, device)
        laws = laws_of(columns, rows, device) if drawn else None

        def check() -> float:
            """Share of other drafts: the order of float32 sums decides where two logits are as good as equal."""
            ids, _ = markov_chain(anchors, embed, head, logits)
            expected, _ = reference.markov_chain(anchors, embed, head.float(), logits)
            return float((ids != expected).float().mean())

        return Prepared(lambda copy: markov_chain(anchors, embed, head, logits, laws), 1, check, 0.02)

    return KernelCase(
        name=f"chain of {DRAFTS} {'drawn' if drawn else 'greedy'} drafts, {rows} sequences",
        area="sampling",
        shape={"m": rows, "n": VOCAB, "k": RANK, "drafts": DRAFTS},
        make=make,
        bytes=nbytes,
        flops=2 * DRAFTS * rows * VOCAB * RANK,
        rate="bf16",
        target_us=174.0 if rows == 64 and not drawn else None,
    )


def small_case(name: str, nbytes: int, make: Callable[[torch.device], Prepared]) -> KernelCase:
    return KernelCase(name=name, area="sampling", shape={"m": 64, "drafts": DRAFTS}, make=make, bytes=nbytes)


def prepare_selection(device: torch.device) -> Prepared:
    survivals = torch.rand(64, DRAFTS, device=device).cumprod(1)
    caps, budget = torch.full((64,), DRAFTS, device=device), torch.tensor([150], device=device)

    def check() -> float:
        own = select_lengths(survivals, caps, budget)
        return float(not torch.equal(own, ranked_prefixes(survivals, caps, 150)))

    return Prepared(lambda copy: select_lengths(survivals, caps, budget), 1, check, 0.5)


def prepare_rows(device: torch.device) -> Prepared:
    _, columns = slots_of(KINDS["greedy"], 64, device)
    tokens = torch.zeros(64, 600, dtype=torch.int32, device=device)
    rows = StepRows(384, 64, 64, device)
    rounds = DeviceRound(columns, tokens, max_model_len=500)
    columns.there[:64] = DRAFTS
    rounds.begin(Round(np.arange(64), np.full(64, DRAFTS), 150), rows)

    def check() -> float:
        rounds.fill(rows)
        return float(int(rows.chunk_rows[-1]) != 64 + 150)

    return Prepared(lambda copy: rounds.fill(rows), 1, check, 0.5)


def cases() -> list[KernelCase]:
    found = [draw_case(name, rows) for rows in (384, 64, 6) for name in KINDS]
    found += [draw_case("top_p 0.95", 384, scale) for scale in (4, 3, 1)]
    found += [chain_case(rows, drawn) for rows in (64, 8) for drawn in (False, True)]
    found.append(small_case("choice of 150 drafts of 64 x 5", 64 * DRAFTS * 4, prepare_selection))
    found.append(small_case("rows of a round of 64 x 6", 384 * 5 * 8, prepare_rows))
    return found
