"""The coupled rule of `speculation/verify.py` on the device: which drafts are kept, and what that changes for a slot.

A draft is kept if it is the token that its row draws itself. The residual rule, whose verdict is a matter of chance,
stays with speculation/verify.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.triton.runtime import launch

CHUNKS = 32  # of a program


class Report(NamedTuple):
    """What a round says of its chunks: views of one buffer int32 [chunks, columns], so that one copy brings all."""

    buffer: Tensor
    counts: Tensor  # int32 [C] tokens: drafts kept and one more; 0 of nobody's chunk
    verified: Tensor  # int32 [C] drafts
    valid: Tensor  # int32 [C]; 0: the last token comes from a row without a finite largest logit, it means nothing
    token_ids: Tensor  # int32 [C, k + 1], 0 behind the counts
    logprobs: Tensor  # float32 [C, k + 1]
    survivals: Tensor  # float32 [C, k] of the drafts for the next round

    @classmethod
    def of(cls, buffer: Tensor, drafts: int) -> Report:
        parts = buffer[:, 3:].split((drafts + 1, drafts + 1, drafts), dim=1)
        numbers = [part.view(torch.float32) for part in parts[1:]]
        return cls(buffer, buffer[:, 0], buffer[:, 1], buffer[:, 2], parts[0], *numbers)

    @classmethod
    def empty(cls, chunks: int, drafts: int, device: torch.device | str, pinned: bool = False) -> Report:
        columns = 3 + 2 * (drafts + 1) + drafts
        return cls.of(torch.zeros(chunks, columns, dtype=torch.int32, device=device, pin_memory=pinned), drafts)


@triton.jit(do_not_specialize=["chunks", "null_slot", "width"])
def _verdict_kernel(
    inputs, drawn, logprobs, valid, chunk_slots, chunk_rows, lengths, there, tokens, anchors,
    counts, verified, fine, said, weights, chunks, null_slot, width, stride,
    DRAFTS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    named = chunk < chunks
    slot = tl.load(chunk_slots + chunk, mask=named, other=null_slot)
    live = named & (slot != null_slot)
    first = tl.load(chunk_rows + chunk, mask=live, other=0)
    drafts = tl.load(chunk_rows + chunk + 1, mask=live, other=1) - first - 1
    start = tl.load(lengths + slot, mask=live, other=0)
    alive, accepted = live, tl.zeros((CHUNKS,), tl.int32)
    newest, last_fine = tl.zeros((CHUNKS,), tl.int64), tl.zeros((CHUNKS,), tl.int32)
    for depth in tl.static_range(DRAFTS + 1):
        row = first + depth
        token = tl.load(drawn + row, mask=alive, other=0)
        good = tl.load(valid + row, mask=alive, other=0).to(tl.int32)
        newest, last_fine = tl.where(alive, token, newest), tl.where(alive, good, last_fine)
        tl.store(said + chunk * stride + depth, token.to(tl.int32), mask=named)
        weight = tl.load(logprobs + row, mask=alive, other=0.0)
        tl.store(weights + chunk * stride + depth, weight, mask=named)
        judged = alive & (depth < drafts) & (good > 0)
        alive = judged & (tl.load(inputs + row + 1, mask=judged, other=-1) == token)
        accepted += alive.to(tl.int32)
    end = start + accepted + 1
    tl.store(tokens + slot * width + end, newest.to(tl.int32), mask=live & (end < width))
    tl.store(lengths + slot, end, mask=live)
    tl.store(there + slot, start * 0, mask=live)
    tl.store(anchors + chunk, newest, mask=named)
    tl.store(counts + chunk * stride, tl.where(live, accepted + 1, 0), mask=named)
    tl.store(verified + chunk * stride, drafts.to(tl.int32), mask=named)
    tl.store(fine + chunk * stride, last_fine, mask=named)


def settle_coupled(
    inputs: Tensor,
    drawn: Tensor,
    logprobs: Tensor,
    valid: Tensor,
    chunk_slots: Tensor,
    chunk_rows: Tensor,
    lengths: Tensor,
    there: Tensor,
    tokens: Tensor,
    report: Report,
    null_slot: int,
) -> Tensor:
    """Judges every chunk of a round, and books it: the columns lengths and there int64 [slots + 1] and the table tokens
    int32 [slots, width] are changed. -> the newest tokens int64 [C], 0 of nobody's chunks.

    inputs int64 [N]: tokens of the rows; drawn int64, logprobs float32, valid bool [N]: what `sampling.sample` says of
    them; chunk_slots int64 [C], chunk_rows int64 [C + 1]. A draft that is kept stands in the table already.
    """
    chunks, drafts = len(chunk_slots), report.survivals.shape[1]
    anchors = torch.empty(chunks, dtype=torch.int64, device=inputs.device)
    launch(
        _verdict_kernel, (triton.cdiv(chunks, CHUNKS),), inputs, drawn, logprobs, valid, chunk_slots, chunk_rows,
        lengths, there, tokens, anchors, report.counts, report.verified, report.valid, report.token_ids,
        report.logprobs, chunks, null_slot, tokens.shape[1], report.buffer.stride(0),
        DRAFTS=drafts, CHUNKS=CHUNKS, num_warps=1,
    )  # fmt: skip
    return anchors


@triton.jit(do_not_specialize=["chunks", "null_slot", "width"])
def _keep_kernel(
    drafts, chances, chunk_slots, lengths, there, survivals, tokens, reported, chunks, null_slot, width, stride,
    DRAFTS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    named = chunk < chunks
    slot = tl.load(chunk_slots + chunk, mask=named, other=null_slot)
    live = named & (slot != null_slot)
    start = tl.load(lengths + slot, mask=live, other=0)
    for depth in tl.static_range(DRAFTS):
        token = tl.load(drafts + chunk * DRAFTS + depth, mask=live, other=0)
        place = start + 1 + depth
        tl.store(tokens + slot * width + place, token.to(tl.int32), mask=live & (place < width))
        chance = tl.load(chances + chunk * DRAFTS + depth, mask=live, other=0.0)
        tl.store(survivals + slot * DRAFTS + depth, chance, mask=live)
        tl.store(reported + chunk * stride + depth, chance, mask=named)
    tl.store(there + slot, start * 0 + DRAFTS, mask=live)


def keep_drafts(
    drafts: Tensor,
    chances: Tensor,
    chunk_slots: Tensor,
    lengths: Tensor,
    there: Tensor,
    survivals: Tensor,
    tokens: Tensor,
    report: Report,
    null_slot: int,
) -> None:
    """Drafts int64 [C, k] with survivals `chances` float32 [C, k] stand behind the newest tokens of these slots from
    here on: in the table, in the columns there int64 and survivals float32 [.., k], and in the report."""
    chunks, k = drafts.shape
    launch(
        _keep_kernel, (triton.cdiv(chunks, CHUNKS),), drafts.contiguous(), chances.contiguous(), chunk_slots, lengths,
        there, survivals, tokens, report.survivals, chunks, null_slot, tokens.shape[1], report.buffer.stride(0),
        DRAFTS=k, CHUNKS=CHUNKS, num_warps=1,
    )  # fmt: skip
