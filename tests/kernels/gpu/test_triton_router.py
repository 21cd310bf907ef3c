"""Expert choice against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twins import DEVICE

from deepinfer.kernels.reference import router as reference
from deepinfer.kernels.triton import router
from deepinfer.kernels.triton.router import gate_logits, route


def logits_of(tokens: int, experts: int) -> Tensor:
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(3)) * 3
    logits[0, 0], logits[0, 1] = 25.0, -40.0  # above softplus's threshold, and far below zero
    return logits.to(DEVICE)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "topk"), [(5, 384, 6), (3, 16, 2), (4, 128, 3), (1, 5, 5)])
def test_choice_weights_and_scores_equal_the_reference(tokens: int, experts: int, topk: int, normalize: bool) -> None:
    logits = logits_of(tokens, experts)
    for shape in ((experts,), (tokens, experts)):
        bias = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(DEVICE) * 0.2
        ids, weights, scores = route(
            logits, bias, topk=topk, scale=1.5, normalize=normalize, gate_temp=0.7, with_scores=True
        )
        expected = reference.route(logits, bias, topk=topk, scale=1.5, normalize=normalize, gate_temp=0.7)
        assert torch.equal(ids.long(), expected[0])
        torch.testing.assert_close(weights, expected[1], rtol=2e-6, atol=0)
        torch.testing.assert_close(scores, expected[2], rtol=2e-6, atol=0)
        assert ids.dtype == torch.int32


def test_ties_go_to_the_lower_expert() -> None:
    logits = torch.zeros(2, 48, device=DEVICE)
    logits[1, [7, 9, 40]] = 1.0
    ids, weights, scores = route(logits, torch.zeros(48, device=DEVICE), topk=5, scale=1.0, normalize=True)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [7, 9, 40, 0, 1]]
    assert scores is None
    torch.testing.assert_close(weights[0], torch.full((5,), 0.2, device=DEVICE))


def test_the_bias_steers_the_choice_but_not_the_weights() -> None:
    logits, bias = logits_of(3, 32), torch.zeros(32, device=DEVICE)
    bias[11] = 100.0
    ids, weights, scores = route(logits, bias, topk=2, scale=1.5, normalize=True, with_scores=True)
    assert ids[:, 0].eq(11).all()
    assert scores is not None
    chosen = scores.gather(1, ids.long())
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True) * 1.5)


def test_numbers_that_are_none_still_choose_experts_that_exist() -> None:
    logits = torch.full((2, 24), float("nan"), device=DEVICE)
    logits[1] = float("-inf")
    ids, _, _ = route(logits, torch.zeros(24, device=DEVICE), topk=6, scale=1.5, normalize=True)
    assert ids.ge(0).all() and ids.lt(24).all()


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be chosen"):
        route(torch.zeros(1, 4, device=DEVICE), torch.zeros(4, device=DEVICE), topk=5, scale=1.0, normalize=True)


@pytest.mark.parametrize(("tokens", "experts", "width"), [(3, 48, 256), (70, 12, 128), (2, 70, 512)])
def test_logits_are_the_product_whether_apart_or_not(
    monkeypatch: pytest.MonkeyPatch, tokens: int, experts: int, width: int
) -> None:
    draw = torch.Generator().manual_seed(7)
    x, gate = (torch.randn(rows, width, generator=draw).bfloat16().to(DEVICE) for rows in (tokens, experts))
    logits = gate_logits(x, gate)
    parts = router.part_count(width)
    assert logits.shape == ((parts, tokens, experts) if parts > 1 else (tokens, experts))
    whole = logits.sum(0) if parts > 1 else logits
    torch.testing.assert_close(whole, x.float() @ gate.float().T, rtol=1e-5, atol=1e-4)
    bias = torch.zeros(experts, device=DEVICE)
    chosen = route(logits, bias, topk=5, scale=1.5, normalize=True, with_scores=True)
    alone = route(gate_logits(x[-1:], gate), bias, topk=5, scale=1.5, normalize=True, with_scores=True)
    monkeypatch.setattr(router, "APART_ROWS", 0)
    together = gate_logits(x, gate)
    assert together.shape == (tokens, experts)
    same = route(together, bias, topk=5, scale=1.5, normalize=True, with_scores=True)
    for one, other, single in zip(chosen, same, alone, strict=True):
        assert one is not None and other is not None and single is not None
        assert torch.equal(one, other)
        assert torch.equal(one[-1:], single)
