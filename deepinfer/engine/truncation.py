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

    A float top-k takes any of the equal values at its border and lists equal ones in any order. Putting what it took in
    id order before a stable sort settles the second; the first shows as one more equal value outside, and then those
    rows are ranked by keys that are all different.
    """
    vocab = logits.shape[-1]
    width = min(width, vocab)
    if width > vocab // 4:  # selecting so many costs more than sorting all
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values[:, :width], ids[:, :width]
    ids = torch.topk(logits, min(width + 1, vocab), dim=-1).indices
    last = logits.gather(-1, ids[:, width - 1 :])  # the last one taken and, if there is one, the first one left
    ids = ids[:, :width].sort(-1).values
    values, order = torch.sort(logits.gather(-1, ids), dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    tied = last[:, 0] == last[:, -1] if last.shape[-1] > 1 else torch.zeros_like(last[:, 0], dtype=torch.bool)
    if bool(tied.any()):
        ids[tied] = _ranked_by_keys(logits[tied], width)
        values = logits.gather(-1, ids)
    return values, ids


def _ranked_by_keys(logits: Tensor, width: int) -> Tensor:
    """Ids of `ranked`, from int64 keys: the order-preserving integer of the float32 above the id's complement."""
    bits = (logits.float() + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0, to which it is equal
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    keys = (ordered << 32) | (0xFFFFFFFF - torch.arange(logits.shape[-1], device=logits.device))
    return 0xFFFFFFFF - (torch.topk(keys, width, dim=-1).values & 0xFFFFFFFF)


def truncate(logits: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates of each row after min_p, top_k and top_p.

    logits: float32 [rows, vocab], already divided by the temperature; the three parameters [rows] (top_k 0 = off,
    top_p 1 = off, min_p 0 = off). Returns (values, ids) [rows, width], best first; dropped places hold -inf, and the
    width is the largest count that any row kept. At least one token of each row stays.
    """
    vocab = logits.shape[-1]
    limit = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    full = int(limit.max())
    own = int(torch.where(top_k > 0, limit, 0).max())  # all candidates of rows with top_k are looked at from the start
    width = min(full, max(_FIRST_LOOK, own)) if bool((top_p < 1).any()) or full < vocab else full
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
    # What top_p calls 1: the mass of the tokens that min_p and top_k left, the row's best counting 1. With top_k they
    # are all among the values, without it the whole row is asked, by rising id: so the sum has one order, whatever the
    # width that other rows ask for. Running sums, because they have no other: how a plain sum is cut depends on the
    # shape.
    running = torch.exp((values - values[:, :1]).double()).masked_fill(~keep, 0.0).cumsum(-1)
    whole = running[:, -1].clone()
    asked = ((limit == logits.shape[-1]) & (top_p < 1)).nonzero()[:, 0]
    if len(asked):
        best, row = values[asked, :1], logits[asked]
        left = row >= best + torch.log(min_p[asked])[:, None]
        whole[asked] = torch.exp((row - best).double()).masked_fill(~left, 0.0).cumsum(-1)[:, -1]
    before = running.roll(1, dims=-1)  # mass of the better tokens
    before[:, 0] = 0
    off = (top_p >= 1)[:, None]  # rounding in the sum must not drop the tail of a row that asked for all
    keep &= off | (before < (top_p.double() * whole)[:, None])
    keep[:, 0] = True
    return keep
