"""Sparse attention over packed records, the records themselves and the rows of a step, for `kernels.py`.

Attention: records at random rows of two pools that are together three times the second-level cache, four sets of lists
taken in turn, checked against float64 of the same records. "Shared": the rows of a request have windows shifted by one
and choose among common entries, as the rows of a verify step do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kernel_cases import KernelCase, Prepared
from torch import Tensor

from deepinfer.kernels.reference import paging as reference_paging
from deepinfer.kernels.reference import records
from deepinfer.kernels.triton import paging
from deepinfer.kernels.triton.attention import sparse_attention
from deepinfer.kernels.triton.attention_prefill import attention_unpacked, unpack_compressed, unpack_window
from deepinfer.kernels.triton.records import insert_compressed, insert_window
from deepinfer.kernels.triton.rope import split_order

HEADS, DIM, WINDOW, SELECTED = 64, 512, 128, 512
WINDOW_BYTES, ENTRY_BYTES = records.window_bytes(DIM), records.compressed_bytes(DIM)
POOL_ROWS = 262_144
SETS = 4  # of lists: one set of 128 rows names 27 MB of records
TOLERANCE = 2.6e-3  # probabilities are rounded to bf16; the result's own rounding is 1.65e-3
CONTEXT = 32_768  # entries that the queries of a prefill chunk choose from
# (batch, rows, selected): us wanted here (issue 6), FlashMLA on V4's records in the scouting run (kernels.md 4)
DECODE: dict[tuple[int, int, int], tuple[float | None, float | None]] = {
    (1, 1, SELECTED): (None, 13.9),
    (1, 6, SELECTED): (None, None),
    (16, 1, SELECTED): (None, 17.8),
    (128, 1, SELECTED): (75.0, 44.5),
    (256, 1, SELECTED): (147.0, 85.0),
    (64, 6, SELECTED): (216.0, 126.0),
    (16, 1, 0): (None, None),
    (256, 1, 0): (None, None),
}


def pools(device: torch.device) -> tuple[Tensor, Tensor]:
    """Window records and compressed records of Gaussian values with lognormal channel outliers."""
    window = torch.empty(POOL_ROWS, WINDOW_BYTES, dtype=torch.uint8, device=device)
    compressed = torch.empty(POOL_ROWS, ENTRY_BYTES, dtype=torch.uint8, device=device)
    for start in range(0, POOL_ROWS, 32_768):
        some = slice(start, start + 32_768)
        x = torch.randn(2, 32_768, DIM, device=device) * torch.exp(0.7 * torch.randn(DIM, device=device))
        window[some], compressed[some] = records.pack_window(x[0]), records.pack_compressed(x[1])
    return window, compressed


def lists(batch: int, rows: int, selected: int, shared: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Window rows int32 [N, 128] and entry rows int32 [N, selected], N = batch * rows, of one step."""
    count = batch * rows
    if not shared:
        return random_rows((count, WINDOW), device), random_rows((count, selected), device)
    starts = torch.randint(0, POOL_ROWS - WINDOW - rows, (batch, 1, 1), device=device)
    window = starts + torch.arange(rows, device=device)[:, None] + torch.arange(WINDOW, device=device)
    common = random_rows((batch, 1, selected * 5 // 4), device).expand(-1, rows, -1)  # 640 to choose 512 from
    chosen = torch.rand(common.shape, device=device).argsort(-1)[..., :selected]
    return window.flatten(0, 1).int(), common.gather(-1, chosen).flatten(0, 1)


def random_rows(shape: tuple[int, ...], device: torch.device, rows: int = POOL_ROWS) -> Tensor:
    return torch.randint(0, rows, shape, dtype=torch.int32, device=device)


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
    device: torch.device,
    count: int,
    make_lists: Callable[[], tuple[Tensor, Tensor]],
    selected: int,
    unpacked: bool = False,
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
        kv, kv_rows = (kv_pool, chosen) if selected else (None, None)
        return sparse_attention(q, window_pool, window, kv, kv_rows, sink, DIM**-0.5)

    def check() -> float:
        some = sorted({0, count // 2, count - 1})
        window, chosen = (x[some].long() for x in sets[0])
        keys = torch.cat((records.unpack_window(window_pool[window]), records.unpack_compressed(kv_pool[chosen])), 1)
        return error(run(0)[some], q[some], list(keys), sink)

    return Prepared(run, SETS, check, TOLERANCE)


def decode_case(batch: int, rows: int, selected: int, shared: bool = False) -> KernelCase:
    count = batch * rows
    target, peer = DECODE[batch, rows, selected]
    keys = count * (WINDOW * WINDOW_BYTES + selected * ENTRY_BYTES)
    if shared:
        keys = batch * ((WINDOW + rows - 1) * WINDOW_BYTES + selected * 5 // 4 * ENTRY_BYTES)
    kind = "windows alone" if not selected else "shared lists" if shared else "own lists"
    return KernelCase(
        name=f"sparse attention, {batch} x {rows} rows, {kind}",
        area="attention",
        shape={"batch": batch, "rows": rows, "heads": HEADS, "window": WINDOW, "selected": selected},
        make=lambda device: attention(device, count, lambda: lists(batch, rows, selected, shared, device), selected),
        bytes=keys + count * (4 * HEADS * DIM + 4 * (WINDOW + selected)),
        flops=4 * count * HEADS * (WINDOW + selected) * DIM,
        rate="bf16",
        target_us=target,
        peer_us=None if shared else peer,
        peer="" if shared or peer is None else "FlashMLA on 584-byte records, kernels.md 4",
        peer_key="flashmla_decode",
    )


def prefill_case(queries: int, unpacked: bool) -> KernelCase:
    def make(device: torch.device) -> Prepared:
        window = (torch.arange(queries, device=device)[:, None] + torch.arange(WINDOW, device=device)).int()
        return attention(
            device, queries, lambda: (window, random_rows((queries, SELECTED), device, CONTEXT)), SELECTED, unpacked
        )

    flops = 4 * queries * HEADS * (WINDOW + SELECTED) * DIM
    keys = (queries + CONTEXT) * 2 * DIM if unpacked else queries * WINDOW_BYTES + CONTEXT * ENTRY_BYTES
    return KernelCase(
        name=f"sparse attention, prefill of {queries} rows, {'unpacked keys' if unpacked else 'records'}",
        area="attention",
        shape={"queries": queries, "heads": HEADS, "keys": WINDOW + SELECTED},
        make=make,
        bytes=keys + queries * (4 * HEADS * DIM + 4 * (WINDOW + SELECTED)),
        flops=flops,
        rate="bf16",
        target_us=flops / 233e6,
        peer_us=730.0,
        peer="FlashMLA on bf16 keys, kernels.md 4",
        peer_key="flashmla_prefill",
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
    found = [decode_case(*key) for key in DECODE]
    found.append(decode_case(64, 6, SELECTED, shared=True))
    found += [prefill_case(4096, unpacked) for unpacked in (False, True)]
    found.append(unpack_case(CONTEXT))
    found += [record_case(kind, count) for kind in ("window", "compressed") for count in (64, 384, 4096)]
    return found + [paging_case(name, 384) for name in ("window rows", "entry rows", "token histories", "rings")]
