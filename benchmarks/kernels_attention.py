"""Sparse attention over packed records, the records themselves and the rows of a step, for `kernels.py`.

Attention, in CUDA C++ and in Triton: records at random rows of two pools, together three times the second-level cache,
four sets of lists in turn, checked against float64 of the same records. "Shared": the rows of a request have windows
shifted by one and choose among common entries, as in a verify step. "Block of drafts": they see all of one window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from attention_inputs import (
    DIM,
    ENTRY_BYTES,
    HEADS,
    POOL_ROWS,
    SELECTED,
    WINDOW,
    WINDOW_BYTES,
    Lists,
    block_lists,
    lists,
    pools,
    random_rows,
)
from kernel_cases import KernelCase, Prepared
from torch import Tensor

from deepinfer.kernels.cuda import attention as cuda_attention
from deepinfer.kernels.reference import paging as reference_paging
from deepinfer.kernels.reference import records
from deepinfer.kernels.triton import attention as triton_attention
from deepinfer.kernels.triton import paging
from deepinfer.kernels.triton.attention_prefill import attention_unpacked, unpack_compressed, unpack_window
from deepinfer.kernels.triton.records import insert_compressed, insert_window
from deepinfer.kernels.triton.rope import split_order

SETS = 4  # of lists: one set of 128 rows names 27 MB of records
CONTEXT = 32_768  # entries that the queries of a prefill chunk choose from
Family = Literal["CUDA", "Triton"]
ATTENTION = {"CUDA": cuda_attention.sparse_attention, "Triton": triton_attention.sparse_attention}
# The result's own rounding is 1.65e-3. Triton's kernel rounds probabilities to bf16 as the release does.
TOLERANCE: dict[Family, float] = {"CUDA": 1.9e-3, "Triton": 2.6e-3}


class Step(NamedTuple):
    """Rows of a decode step. Microseconds: wanted of the kernel in CUDA C++ (issue 7) and in Triton (issue 6), and
    FlashMLA's on V4's records in the scouting run (kernels.md 4)."""

    batch: int
    rows: int
    lists: Literal["own lists", "shared lists", "windows alone", "block of drafts"] = "own lists"
    cuda_us: float | None = None
    triton_us: float | None = None
    flashmla_us: float | None = None

    @property
    def window(self) -> int:
        return WINDOW + self.rows if self.lists == "block of drafts" else WINDOW

    @property
    def selected(self) -> int:
        return SELECTED if self.lists in ("own lists", "shared lists") else 0

    def make_lists(self, device: torch.device) -> Lists:
        if self.lists == "block of drafts":
            return block_lists(self.batch, self.rows, device)
        return lists(self.batch, self.rows, self.selected, self.lists == "shared lists", device)


STEPS = (
    Step(1, 1, cuda_us=10.0, flashmla_us=13.9),
    Step(1, 6),
    Step(16, 1, cuda_us=14.0, flashmla_us=17.8),
    Step(128, 1, cuda_us=29.0, triton_us=75.0, flashmla_us=44.5),
    Step(256, 1, cuda_us=56.0, triton_us=147.0, flashmla_us=85.0),
    Step(64, 6, cuda_us=82.0, triton_us=216.0, flashmla_us=126.0),
    Step(64, 6, "shared lists", cuda_us=70.0, flashmla_us=116.0),
    Step(1, 1, "windows alone"),
    Step(16, 1, "windows alone"),
    Step(128, 1, "windows alone"),
    Step(256, 1, "windows alone", cuda_us=15.0),
    Step(64, 5, "block of drafts"),
)
PREFILL_RATE = {"CUDA": 520e6, "Triton": 233e6}  # FLOP a microsecond that are wanted


def error(out: Tensor, q: Tensor, keys: list[Tensor], sink: Tensor) -> float:
    """Of some rows [n, heads, D], split order, against float64 over their keys [n, L, D] in natural order."""
    order = split_order(DIM).to(q.device)
    expected = []
    for query, row_keys in zip(q.double(), keys, strict=True):
        k = row_keys.double()[:, order]
        logits = torch.cat((query @ k.t() * DIM**-0.5, sink.double().unsqueeze(1)), dim=1)
        expected.append(logits.softmax(-1)[:, :-1] @ k)
    right = torch.stack(expected)
    return float((out.double() - right).norm() / right.norm())


def attention(
    device: torch.device, family: Family, count: int, make_lists: Callable[[], Lists], unpacked: bool = False
) -> Prepared:
    window_pool, kv_pool = pools(device)
    window_keys, keys = None, None
    if unpacked:  # what a prefill step does once for the layers that share it
        window_keys = unpack_window(window_pool[: 2 * count])
        keys = unpack_compressed(kv_pool, torch.arange(CONTEXT, device=device))
    q = torch.randn(count, HEADS, DIM, device=device).to(torch.bfloat16)
    sink = torch.randn(HEADS, device=device)
    sets = [make_lists() for _ in range(SETS)]

    def run(copy: int) -> Tensor:
        window, chosen = sets[copy]
        if window_keys is not None:
            return attention_unpacked(q, window_keys, window, keys, chosen, sink, DIM**-0.5)
        kv, kv_rows = (kv_pool, chosen) if chosen.shape[1] else (None, None)
        return ATTENTION[family](q, window_pool, window, kv, kv_rows, sink, DIM**-0.5)

    def check() -> float:
        some = sorted({0, count // 2, count - 1})
        window, chosen = (x[some].long() for x in sets[0])
        keys = torch.cat((records.unpack_window(window_pool[window]), records.unpack_compressed(kv_pool[chosen])), 1)
        torch.full_like(q, float("nan"))  # leaves poison to the allocator, which gives it to the result
        return error(run(0)[some], q[some], list(keys), sink)

    return Prepared(run, SETS, check, TOLERANCE[family])


def decode_case(step: Step, family: Family) -> KernelCase:
    batch, rows, window, selected = step.batch, step.rows, step.window, step.selected
    count, ours = batch * rows, family == "CUDA"
    keys = count * (window * WINDOW_BYTES + selected * ENTRY_BYTES)
    if step.lists == "shared lists":
        keys = batch * ((window + rows - 1) * WINDOW_BYTES + selected * 5 // 4 * ENTRY_BYTES)
    elif step.lists == "block of drafts":
        keys = batch * window * WINDOW_BYTES
    beside = ours and step.lists != "block of drafts"  # FlashMLA's lists are multiples of 64
    return KernelCase(
        name=f"sparse attention in {family}, {batch} x {rows} rows, {step.lists}",
        area="attention",
        shape={"batch": batch, "rows": rows, "heads": HEADS, "window": window, "selected": selected},
        make=lambda device: attention(device, family, count, lambda: step.make_lists(device)),
        bytes=keys + count * (4 * HEADS * DIM + 4 * (window + selected)),
        flops=4 * count * HEADS * (window + selected) * DIM,
        rate="bf16",
        target_us=step.cuda_us if ours else step.triton_us,
        peer_us=step.flashmla_us if beside else None,
        peer="FlashMLA on 584-byte records, kernels.md 4" if beside and step.flashmla_us else "",
        peer_key="flashmla_decode" if beside else None,
        note="the peer's rows have lists of their own" if beside and step.lists == "shared lists" else "",
    )


def prefill_case(queries: int, family: Family, unpacked: bool) -> KernelCase:
    def make(device: torch.device) -> Prepared:
        window = (torch.arange(queries, device=device)[:, None] + torch.arange(WINDOW, device=device)).int()
        return attention(
            device, family, queries, lambda: (window, random_rows((queries, SELECTED), device, CONTEXT)), unpacked
        )

    flops, ours = 4 * queries * HEADS * (WINDOW + SELECTED) * DIM, family == "CUDA"
    keys = (queries + CONTEXT) * 2 * DIM if unpacked else queries * WINDOW_BYTES + CONTEXT * ENTRY_BYTES
    kind = "unpacked keys" if unpacked else "records"
    return KernelCase(
        name=f"sparse attention in {family}, prefill of {queries} rows, {kind}",
        area="attention",
        shape={"queries": queries, "heads": HEADS, "keys": WINDOW + SELECTED},
        make=make,
        bytes=keys + queries * (4 * HEADS * DIM + 4 * (WINDOW + SELECTED)),
        flops=flops,
        rate="bf16",
        target_us=round(flops / PREFILL_RATE[family], 1),
        peer_us=730.0 if ours else None,
        peer="FlashMLA on bf16 keys, kernels.md 4" if ours else "",
        peer_key="flashmla_prefill" if ours else None,
    )


def unpack_case(count: int) -> KernelCase:
    def make(device: torch.device) -> Prepared:
        _, pool = pools(device)
        rows = torch.randperm(POOL_ROWS, device=device)[:count]

        def check() -> float:
            expected = records.unpack_compressed(pool[rows])[:, split_order(DIM).to(device)]
            return float(not torch.equal(unpack_compressed(pool, rows).float(), expected))

        return Prepared(lambda _: unpack_compressed(pool, rows), 1, check, 0.0)

    return KernelCase(
        name=f"{count} compressed records unpacked",
        area="attention",
        shape={"rows": count, "dim": DIM},
        make=make,
        bytes=count * (ENTRY_BYTES + 2 * DIM + 8),
    )


def record_case(kind: str, count: int) -> KernelCase:
    insert, pack, size = {
        "window": (insert_window, records.pack_window, WINDOW_BYTES),
        "compressed": (insert_compressed, records.pack_compressed, ENTRY_BYTES),
    }[kind]

    def make(device: torch.device) -> Prepared:
        x = torch.randn(count, DIM, device=device).to(torch.bfloat16)
        pool = torch.full((POOL_ROWS, size), 0xFF, dtype=torch.uint8, device=device)
        rows = torch.randperm(POOL_ROWS, device=device)[:count]

        def check() -> float:
            insert(x, pool, rows)
            unpack = records.unpack_window if kind == "window" else records.unpack_compressed
            return float(not torch.equal(unpack(pool[rows].cpu()), unpack(pack(x.cpu()))))

        return Prepared(lambda _: insert(x, pool, rows), 1, check, 0.0)

    return KernelCase(
        name=f"{count} {kind} records written",
        area="attention",
        shape={"rows": count, "dim": DIM},
        make=make,
        bytes=count * (2 * DIM + size),
    )


def paging_case(name: str, count: int) -> KernelCase:
    """Rows of `count` single-row chunks; tables of a million tokens."""
    ring, staging = 134, count * 134
    size = {
        "window rows": WINDOW * 4,
        "entry rows": SELECTED * 8,
        "token histories": 4 * 16,
        "rings": 2 * WINDOW_BYTES,
    }[name]

    def make(device: torch.device) -> Prepared:
        positions = torch.randint(0, 1 << 20, (count,), device=device)
        slots, floors = torch.randperm(count, device=device), torch.zeros_like(positions)
        tables = torch.randint(0, 1 << 16, (count, 8192), device=device)
        entries = random_rows((count, SELECTED), device, 1 << 19)
        store = torch.randint(0, 1 << 17, (count, 16), device=device)
        pool = torch.randint(0, 256, (staging + count, WINDOW_BYTES), device=device).to(torch.uint8)
        rows_of_window = (positions, slots, positions, floors, WINDOW, ring, staging)

        def run(_: int) -> Tensor | None:
            if name == "window rows":
                return paging.window_rows(*rows_of_window)
            if name == "entry rows":
                return paging.entry_rows(tables, slots, entries, 64)
            if name == "token histories":
                return paging.token_history(positions, positions, slots, positions, store, 3)
            paging.commit_window(pool, positions, slots, ring, staging)
            return None

        def check() -> float:
            if name == "window rows":
                expected = reference_paging.window_rows(*rows_of_window)
            elif name == "entry rows":
                expected = reference_paging.entry_rows(tables, slots, entries.long(), 64)
            elif name == "token histories":
                expected = reference_paging.token_history(positions, positions, slots, positions, store.clone(), 3)
            else:
                run(0)
                return float(not torch.equal(pool[slots * ring + positions % ring], pool[staging:]))
            found = run(0)
            return float(found is None or not torch.equal(found.long(), expected))

        return Prepared(run, 1, check, 0.0)

    return KernelCase(name=f"{name} of {count}", area="attention", shape={"rows": count}, make=make, bytes=count * size)


def cases() -> list[KernelCase]:
    families: tuple[Family, ...] = ("CUDA", "Triton")
    found = [decode_case(step, family) for step in STEPS for family in families]
    found += [prefill_case(4096, family, False) for family in families] + [prefill_case(4096, "Triton", True)]
    found.append(unpack_case(CONTEXT))
    found += [record_case(kind, count) for kind in ("window", "compressed") for count in (64, 384, 4096)]
    return found + [paging_case(name, 384) for name in ("window rows", "entry rows", "token histories", "rings")]
