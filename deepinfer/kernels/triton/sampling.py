"""From a step's logits to its tokens in a few launches: the laws of `engine/target.py` without the host.

Each row's logits are read once: by `noise.py` where a row draws from all tokens, else by `sampling_scan.py`, whose
groups tell `truncation.py` what to read again where min_p, top_k or top_p drop tokens. `sampling_finish.py` puts a
row's pieces together. A piece's size depends on the vocabulary alone, and no sum of floats depends on the order in
which programs end: a row's token does not know its batch.

What is equal to the plain path and what may not be: argmax, ties, masks, min_p, top_k and random words are equal, and a
temperature divides with the same rounding all but always. Noise is right to a unit in the last place, and what top_p
calls 1 to 1e-8; so a token differs where two of them are closer than that, about once in a million draws. In a thousand
draws over the full vocabulary on an H200 none did.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from deepinfer.kernels.triton.noise import is_packed, noise_kernel, noise_tiles
from deepinfer.kernels.triton.overlap import OVERLAP
from deepinfer.kernels.triton.runtime import launch
from deepinfer.kernels.triton.sampling_finish import finish_kernel
from deepinfer.kernels.triton.sampling_rows import RowLaws, group_size, piece_tiles
from deepinfer.kernels.triton.sampling_scan import group_scan_kernel, plain_scan_kernel
from deepinfer.kernels.triton.truncation import draw_truncated


class Sampled(NamedTuple):
    token_ids: Tensor  # int64 [rows]
    logprobs: Tensor  # float32 [rows], natural log, from the raw logits
    valid: Tensor  # bool [rows]; False: no finite largest logit, the token means nothing


def sample(
    logits: Tensor,
    laws: RowLaws | None = None,
    *,
    drawn: bool = True,
    truncated: bool = True,
    masks: Tensor | None = None,
    mask_rows: Tensor | None = None,
) -> Sampled:
    """One token per row of logits float32 [rows, vocab], raw, not changed; rows contiguous, vocab >= 1.

    laws None: all rows are greedy. drawn, truncated: False promises that no row has a temperature, or drops tokens, and
    saves the launches. masks int32 [n, (vocab + 31) // 32] with mask_rows int64 [rows] (-1 = none): what may follow, as
    `select.constrain_rows`.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    tiles = piece_tiles(vocab)
    pieces = triton.cdiv(vocab, tiles["PIECE"])
    device, stride = logits.device, logits.stride(0)
    keys, ids = torch.empty(2, rows, pieces, dtype=torch.int32, device=device)
    tops, sums = torch.empty(2, rows, pieces, device=device)
    words = (vocab + 31) // 32
    constraints = (keys, keys) if masks is None or mask_rows is None else (masks, mask_rows)
    out = Sampled(
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, device=device),
        torch.empty(rows, dtype=torch.bool, device=device),
    )
    noisy, cut = laws is not None and drawn, laws is not None and drawn and truncated
    masked, chosen = masks is not None, ids
    law: tuple[Tensor, ...] = (ids, ids, tops, ids, tops, tops, ids, ids)  # nobody's
    found: tuple[Tensor, ...] = (tops, tops, tops, tops, ids)
    part = 32
    if noisy:
        assert laws is not None
        law = laws[:8]
        part = noise_tiles(rows, vocab)["PART"]
        found = _whole_rows(logits, law, constraints, masked, noise_tiles(rows, vocab))
    launch(
        plain_scan_kernel, (pieces, rows), logits, *constraints, law[0], law[2], keys, ids, tops, sums, stride, vocab,
        pieces, words, MASKED=masked, DRAWN=noisy, **tiles, **OVERLAP,
    )  # fmt: skip
    if cut:
        assert laws is not None
        group = group_size(vocab)
        queue = torch.empty(1 + rows, dtype=torch.int32, device=device)
        bests, weights = torch.empty(2, rows, pieces * tiles["PIECE"] // group, device=device)
        launch(
            group_scan_kernel, (pieces, rows), logits, *constraints, law[0], *law[2:6], keys, ids, tops, sums, bests,
            weights, queue, stride, vocab, pieces, words, MASKED=masked, GROUP=group, **tiles, **OVERLAP,
        )  # fmt: skip
        chosen = draw_truncated(logits, laws, keys, ids, bests, weights, queue, masks, mask_rows)
    count = found[0].shape[1], found[3].shape[1]
    launch(
        finish_kernel, (rows,), logits, *constraints, *law, keys, ids, tops, sums, chosen, *found, *out, stride, vocab,
        pieces, *count, words, MASKED=masked, DRAWN=noisy, TRUNCATED=cut, PIECES=triton.next_power_of_2(pieces),
        PARTS=triton.next_power_of_2(count[0]), PROGRAMS=triton.next_power_of_2(count[1]), PART=part,
        STRIP=min(part, 128), num_warps=1, **OVERLAP,
    )  # fmt: skip
    return out


def _whole_rows(
    logits: Tensor, law: tuple[Tensor, ...], constraints: tuple[Tensor, Tensor], masked: bool, tiles: dict[str, int]
) -> tuple[Tensor, ...]:
    """What `noise_kernel` finds: tops, bests, sums [rows, parts], scores [rows, programs], winners [.., 2]."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, tiles["PART"])
    programs, words = triton.cdiv(parts, tiles["PARTS"]), (vocab + 31) // 32
    tops, bests, sums = torch.empty(3, rows, parts, device=logits.device)
    scores = torch.empty(rows, programs, device=logits.device)
    winners = torch.empty(rows, programs, 2, dtype=torch.int32, device=logits.device)
    launch(
        noise_kernel, (programs, rows), logits, *constraints, *law, tops, bests, sums, scores, winners,
        logits.stride(0), vocab, parts, programs, words, MASKED=masked, PACKED=is_packed(logits), **tiles, num_warps=1,
        **OVERLAP,
    )  # fmt: skip
    return tops, bests, sums, scores, winners
