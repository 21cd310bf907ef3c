"""The whole mixture of experts of a layer (section 2.8): chosen experts, the shared one, and their sum."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels.streams import Stream, join
from deepinfer.kernels.triton.dense import fp8_linear
from deepinfer.kernels.triton.experts import block_rows, experts_down, experts_up
from deepinfer.kernels.triton.experts_combine import combine_experts
from deepinfer.kernels.triton.experts_layout import ShuffledBank
from deepinfer.kernels.triton.experts_plan import plan_buffers, plan_experts
from deepinfer.kernels.triton.experts_rows import plan_and_quantize, quantize_for_experts
from deepinfer.kernels.triton.experts_shared import swiglu
from deepinfer.kernels.triton.quantize import Fp8Rows

SharedExpert = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(codes, factors) of w1 above w3 and of w2, as `dense.fp8_linear` takes them."""


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    bank: ShuffledBank,
    limit: float,
    *,
    total_experts: int | None = None,
    shared: Tensor | None = None,
    side: Stream | None = None,
    exact: bool = False,
    wide: bool = False,
) -> Tensor:
    """x bf16 [T, D], ids int32 [T, k], weights float32 [T, k] -> bf16 [T, D]: the chosen experts of the bank (others
    are left out) added by rising number, then `shared` bf16 [T, D], which the stream `side` may still be making.

    total_experts: of the whole layer, where the bank holds a part of them; it only chooses tiles. exact: sums over K
    are exact for any number of rows, and a row's bits do not depend on the batch; otherwise only up to 24 rows an
    expert on average. wide: activations stay bf16 (W4A16), which is more exact than the release.
    """
    rows = block_rows(ids.numel(), bank.experts if total_experts is None else total_experts)
    exact = exact or rows < 64  # there the additions are free
    if wide:
        plan = plan_experts(ids, bank.experts, rows, bank.first)
        act = experts_up(x, plan, weights, bank.up, limit, exact=exact)
        out = experts_down(act, plan, bank.down, exact=exact)
    else:
        plan, folded = plan_and_quantize(ids, plan_buffers(ids, bank.experts, rows, bank.first), x)
        act = experts_up(folded, plan, weights, bank.up, limit, exact=exact)
        out = experts_down(quantize_for_experts(act), plan, bank.down, exact=exact)
    join(side)
    return combine_experts(out, plan, shared, ids.shape[1])


def shared_expert(rows: Fp8Rows, expert: SharedExpert, limit: float, *, exact: bool = False) -> Tensor:
    """Rows [T, D] in natural order through the shared expert -> bf16 [T, D]."""
    up, down = expert
    act = swiglu(fp8_linear(rows, *up, invariant=exact), limit)
    return fp8_linear(act, *down, invariant=exact)
