"""min_p, top_k and top_p: which tokens a row may still draw, in that order (spec/dspark.md section 10).

Everything is decided in one total order, (logit descending, id ascending), so equal logits never make a result depend
on a sort's implementation.
"""

import torch
from torch import Tensor

# Rows without top_k first look at this many of their best tokens; nearly every top_p cut falls inside.
_FIRST_LOOK = 1024


def ranked(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best of each row by (logit descending, id ascending): values float32 and ids int64, [rows, width].

    Packs the order-preserving integer of a float32 above the complement of its id into one int64: all keys differ, so
    topk has no ties to break.
    """
    bits = (
        (logits.float() + 0.0).view(torch.int32).long()
    )  # + 0.0 turns -0.0 into 0.0: they are equal, so their keys are
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    vocab = logits.shape[-1]
    ids = torch.arange(vocab, device=logits.device)
    keys = (ordered << 32) | (0xFFFFFFFF - ids)
    best = torch.topk(keys, min(width, vocab), dim=-1).values
    best_ids = 0xFFFFFFFF - (best & 0xFFFFFFFF)
    return logits.gather(-1, best_ids), best_ids


def truncate(logits: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates of each row after min_p, top_k and top_p.

    logits: float32 [rows, vocab], already divided by the temperature; the three parameters [rows] (top_k 0 = off,
    top_p 1 = off, min_p 0 = off). Returns (values, ids) [rows, width], best first; dropped places hold -inf, and the
    width is the largest count that any row kept. At least one token of each row stays.
    """
    vocab = logits.shape[-1]
    limit = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    full = int(limit.max())
    width = min(full, _FIRST_LOOK) if bool((top_p < 1).any()) or full < vocab else full
    while True:
        values, ids = ranked(logits, width)
        keep = _keep(logits, values, min_p, limit, top_p)
        # A row whose last looked-at token is still kept may keep more: look at everything once.
        if width >= full or not bool(keep[:, -1].any()):
            break
        width = full
    widest = int(keep.sum(-1).max())
    return values.masked_fill(~keep, -torch.inf)[:, :widest], ids[:, :widest]


def _keep(logits: Tensor, values: Tensor, min_p: Tensor, limit: Tensor, top_p: Tensor) -> Tensor:
    """Bool [rows, width] over ranked values: a prefix of each row."""
    place = torch.arange(values.shape[-1], device=values.device)[None, :]
    keep = (place < limit[:, None]) & (values > -torch.inf)
    keep &= values >= values[:, :1] + torch.log(min_p)[:, None]  # log 0 = -inf: off
    kept = values.double().masked_fill(~keep, -torch.inf)
    # What top_p calls 1: the mass of the tokens that min_p and top_k left. Without either, that of the whole row.
    whole = torch.logsumexp(kept, -1)
    open_rows = (limit > values.shape[-1]) & keep[:, -1]
    if bool(open_rows.any()):
        floor = (values[:, :1] + torch.log(min_p)[:, None])[open_rows]
        rest = logits[open_rows].double()
        whole[open_rows] = torch.logsumexp(rest.masked_fill(rest < floor, -torch.inf), -1)
    before = torch.exp(kept - whole[:, None]).cumsum(-1).roll(1, dims=-1)  # mass of the better tokens
    before[:, 0] = 0
    off = (top_p >= 1)[:, None]  # rounding in the sum must not drop the tail of a row that asked for all
    keep &= off | (before < top_p.double()[:, None])
    keep[:, 0] = True
    return keep
