"""mHC kernels against the reference: the stream within one bfloat16 unit, what follows from the stream closer."""

from __future__ import annotations

import pytest
import torch
from twins import DEVICE, relative_error

from deepinfer.kernels.layer_weights import HyperWeights
from deepinfer.kernels.reference import hyper as reference
from deepinfer.kernels.reference.norm import rms_norm
from deepinfer.kernels.triton import hyper, hyper_parts, hyper_step
from deepinfer.kernels.triton.hyper_step import Plan
from deepinfer.kernels.triton.quantize import quantize_rows

ON_GPU = DEVICE.type == "cuda"
EPS, NORM_EPS = 1e-6, 1e-20
ULP = 2.0**-7  # of bfloat16, relative to a value's power of two; the interpreter truncates where hardware rounds
# of coefficients, by the parts of fn: measured 6e-6 and 1e-6 at most
TOLERANCE = {2: 1.5e-5, 3: 3e-6}
WIDTHS = [5120] if ON_GPU else [64, 704]  # 704: eleven chunks, six units, six groups of one; the last half empty


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weights(width: int, seed: int = 1) -> HyperWeights:
    return HyperWeights(
        fn=draw(seed, 4 * width, 24) * (4 * width) ** -0.5,
        scale=torch.tensor([0.9, 1.1, 1.7], device=DEVICE),
        base=draw(seed + 1, 24),
        norm=1 + 0.1 * draw(seed + 2, width),
        iterations=20,
        eps=EPS,
        norm_eps=NORM_EPS,
    )


def inputs(rows: int, width: int, seed: int = 7) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """A stream with columns of very different size, an update, pre."""
    sizes = (1.5 * draw(99, width)).exp()
    stream = (draw(seed, rows, 4, width) * sizes).to(torch.bfloat16)
    update = (
        (draw(seed + 1, rows, width) * sizes).to(torch.bfloat16),
        2 * draw(seed + 2, rows, 4).sigmoid(),
        reference.sinkhorn(draw(seed + 3, rows, 4, 4), 20, EPS),
    )
    return stream, update, draw(seed + 4, rows, 4).sigmoid()


def within_ulps(got: torch.Tensor, expected: torch.Tensor, ulps: float = 1.0) -> None:
    assert got.dtype == expected.dtype == torch.bfloat16 and got.shape == expected.shape
    unit = torch.maximum(got.float().abs(), expected.float().abs()) * ULP
    # sums of terms of both signs: also an ulp of float32 of the largest of them
    assert ((got.float() - expected.float()).abs() <= ulps * unit + 1e-5).all()


def exact_coefficients(stream: torch.Tensor, w: HyperWeights) -> tuple[torch.Tensor, ...]:
    """float64 from the stream as it is."""
    mixes = stream.double().flatten(1) @ w.fn.double()
    mixes = mixes * torch.rsqrt(stream.double().flatten(1).square().mean(1, keepdim=True) + NORM_EPS)
    return reference.hyper_coefficients(
        mixes, w.scale.double(), w.base.double(), copies=4, iterations=w.iterations, eps=EPS
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 65, 130, 384, 600, 4097] if ON_GPU else [3])
@pytest.mark.parametrize("updated", [True, False])
@pytest.mark.parametrize("split", [2, 3])
def test_a_step_equals_the_reference(
    width: int, rows: int, updated: bool, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyper_parts, "SPLIT", split)
    w = weights(width)
    old, update, pre = inputs(rows, width)
    (stream, x, *found), codes = hyper.hyper_step_quantized(old, update if updated else None, pre, w)
    if updated:
        within_ulps(stream, reference.hyper_expand(old, *update))
    else:
        assert stream is old or torch.equal(stream, old)
    u = reference.hyper_collapse(stream, pre)
    within_ulps(x, rms_norm(u, w.norm, NORM_EPS), 2.0)  # u may round the other way, and so may x
    for got, expected in zip(found, exact_coefficients(stream, w), strict=True):
        assert got.dtype == torch.float32 and got.shape == expected.shape
        assert (got.double() - expected).abs().max() < TOLERANCE[split]
    for got, expected in zip(codes, quantize_rows(x), strict=True):
        assert torch.equal(got.float(), expected.float())


def test_the_product_is_as_good_as_float32(width: int = WIDTHS[0]) -> None:
    """Large mixes that nothing squashes: scale 0 leaves no other error, so look at the parts of fn themselves."""
    fn = weights(width).fn
    parts = hyper_parts.split_fn(fn).double().unflatten(2, (4, 64))  # [chunks, 72, 4, 64]
    parts = parts[: width // 64].permute(1, 2, 0, 3).flatten(1)  # [72, 4 * width], without what fills a unit
    first, second = parts[:48].unflatten(0, (3, 2, 8)).unbind(1)
    whole = first.flatten(0, 1) + second.flatten(0, 1) + parts[48:]
    assert relative_error(whole.t(), fn) < 2.0**-24


@pytest.mark.parametrize("width", WIDTHS[-1:])
def test_a_row_does_not_depend_on_the_others(width: int) -> None:
    """Nor on the layout of programs that a number of rows has."""
    rows = 1200 if ON_GPU else 34
    w = weights(width)
    old, (y, post, comb), pre = inputs(rows, width)
    whole, codes = hyper.hyper_step_quantized(old, (y, post, comb), pre, w)
    counts = [1, 5, 64, 97, 193, 385] if ON_GPU else [2]
    for count in counts:
        some = slice(rows - count, rows)
        part, its = hyper.hyper_step_quantized(old[some], (y[some], post[some], comb[some]), pre[some], w)
        for got, expected in zip((*part, *its), (*whole, *codes), strict=True):
            assert torch.equal(got.float(), expected[some].float())


PLANS = [Plan(16, 1, 4, 1), Plan(16, 2, 4, 1), Plan(32, 0, 4, 1)]


@pytest.mark.parametrize("width", [1152] if not ON_GPU else WIDTHS)  # 1152: nine units, groups of two and one of one
def test_every_layout_leaves_the_same_bits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 37 if ON_GPU else 3
    w = weights(width)
    old, update, pre = inputs(rows, width)
    found = []
    for plan in PLANS:
        monkeypatch.setattr(hyper_step, "plan", lambda rows, plan=plan: plan)
        step, codes = hyper.hyper_step_quantized(old, update, pre, w)
        found.append((*step, *codes))
    for other in found[1:]:
        for got, expected in zip(other, found[0], strict=True):
            assert torch.equal(got.float(), expected.float())


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="programs of the interpreter run one after the other and never wait")
def test_steps_follow_each_other(width: int = WIDTHS[0]) -> None:
    """Programs that wait for each other leave nothing behind that the next launch would stumble over."""
    w = weights(width)
    old, update, pre = inputs(600, width)
    first = hyper.hyper_step(old, update, pre, w)
    for rows in (600, 3, 384, 60, 600):
        for got, expected in zip(
            hyper.hyper_step(old[:rows], tuple(part[:rows] for part in update), pre[:rows], w), first, strict=True
        ):
            assert torch.equal(got, expected[:rows])


def test_equal_copies_and_a_one_hot_pre_need_no_path_of_their_own(width: int = WIDTHS[0]) -> None:
    embedded = draw(3, 2, width).to(torch.bfloat16)
    stream = embedded.unsqueeze(1).expand(-1, 4, -1).contiguous()
    first = torch.eye(1, 4, device=DEVICE).expand(2, 4)
    w = weights(width)
    _, x, *found = hyper.hyper_step(stream, None, first, w)
    within_ulps(x, rms_norm(embedded, w.norm, NORM_EPS))
    for got, expected in zip(found, exact_coefficients(stream, w), strict=True):
        assert (got.double() - expected).abs().max() < TOLERANCE[hyper_parts.SPLIT]


def test_expand_and_collapse_alone(width: int = WIDTHS[0]) -> None:
    stream, update, pre = inputs(3, width)
    within_ulps(hyper.hyper_expand(stream, *update), reference.hyper_expand(stream, *update))
    u = reference.hyper_collapse(stream, pre)
    within_ulps(hyper.hyper_collapse(stream, pre), u)
    norm = 1 + 0.1 * draw(5, width)
    within_ulps(hyper.hyper_collapse_norm(stream, pre, norm, NORM_EPS), rms_norm(u, norm, NORM_EPS), 2.0)


def test_no_rows_and_what_the_kernels_do_not_take() -> None:
    w = weights(64)
    stream, update, pre = inputs(0, 64)
    assert [tuple(t.shape) for t in hyper.hyper_step(stream, update, pre, w)] == [
        (0, 4, 64),
        (0, 64),
        (0, 4),
        (0, 4),
        (0, 4, 4),
    ]
    stream, update, pre = inputs(1, 96)
    with pytest.raises(ValueError, match="steps of 64"):
        hyper.hyper_step(stream, update, pre, weights(96))
