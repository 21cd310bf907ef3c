"""Engram kernels against the reference: hashes exactly, folded table rows exactly, the injection within a unit."""

from __future__ import annotations

import pytest
import torch
from twins import DEVICE, poisoned

from deepinfer.kernels.reference import engram as reference
from deepinfer.kernels.reference.quant import e8m0_to_float, quantize_fp8
from deepinfer.kernels.triton import engram
from deepinfer.kernels.triton.quantize import Fp8Rows, fold_groups

ON_GPU = DEVICE.type == "cuda"
EPS = 1e-20


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(DEVICE)


PRIMES = torch.tensor(
    [
        [[16000057, 16000183], [16000189, 16000321], [16000339, 16000463]],
        [[16000477, 16000627], [16000667, 16000769], [16000781, 16000889]],
    ]
)
# of the release's two layers; with ids below 99,092 products come close to 2^63
MULTIPLIERS = torch.tensor(
    [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("tokens", [1, 33])
def test_hashes_are_the_references(tokens: int, mapped: bool) -> None:
    history = torch.randint(99_000, 99_092, (tokens, 4), generator=generator(1))
    history[torch.rand(tokens, 4, generator=generator(2)) < 0.2] = -1
    history[0] = torch.tensor([-1, 5, -1, 7])  # dead itself: everything behind it reads the pad
    token_map = torch.randint(0, 99_092, (99_092,), generator=generator(3)) if mapped else None
    flat = PRIMES.flatten(1)
    offsets = flat.cumsum(1) - flat
    tables = [t.to(DEVICE) for t in (history, MULTIPLIERS, PRIMES, offsets)]
    got = engram.ngram_rows(*tables, pad=17, token_map=None if token_map is None else token_map.to(DEVICE))
    ids = history if token_map is None else torch.where(history < 0, -1, token_map[history.clamp_min(0)])
    assert got.shape == (2, tokens, 6) and got.dtype == torch.int64
    for layer in range(2):
        expected = reference.ngram_rows(ids, MULTIPLIERS[layer], PRIMES[layer], offsets[layer], 17)
        assert torch.equal(got[layer].cpu(), expected)


def table(rows: int, head_dim: int, seed: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code but NaN, scales of 2^-40 .. 2^8 but mostly near 2^-9."""
    codes = torch.randint(0, 256, (rows, head_dim), generator=generator(seed), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = torch.randint(112, 122, (rows, head_dim // 32), generator=generator(seed + 1), dtype=torch.uint8)
    scales[0], scales[1] = 87, 135
    return codes.to(DEVICE), scales.to(DEVICE)


def expected_fold(codes: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the release does, and the fold: values, Q8 of them, one scale a token."""
    values = codes[ids].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
    values = (values * e8m0_to_float(scales[ids]).unsqueeze(-1)).flatten(1)
    return fold_groups(*quantize_fp8(values))


@pytest.mark.parametrize(("columns", "head_dim", "tokens"), [(6, 64, 5), (24, 256, 300 if ON_GPU else 2)])
def test_folded_rows_are_q8_of_the_tables_values(columns: int, head_dim: int, tokens: int) -> None:
    codes, scales = table(200, head_dim)
    ids = torch.randint(0, 200, (tokens, columns), generator=generator(6)).to(DEVICE)
    ids[0] = 0  # a token whose values all lie below the floor of Q8
    problems = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def fold(codes: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor | None) -> Fp8Rows:
        out = Fp8Rows(
            torch.full((tokens, columns * head_dim), float("nan"), device=DEVICE).to(torch.float8_e4m3fn),
            poisoned(tokens, dtype=torch.float32),
        )
        return engram.fold_table_rows(codes, scales, ids, problems, columns=columns, out=out)

    got = fold(codes, scales, ids)
    for mine, its in zip(got, expected_fold(codes, scales, ids), strict=True):
        assert torch.equal(mine.float(), its.float())
    gathered = codes[ids].flatten(0, 1), scales[ids].flatten(0, 1)
    for mine, its in zip(fold(*gathered, None), got, strict=True):
        assert torch.equal(mine.float(), its.float())
    assert int(problems) == 0


@pytest.mark.parametrize("damage", ["code", "scale", "outside", "negative"])
def test_damage_is_reported_and_stays_finite(damage: str) -> None:
    codes, scales = table(50, 64)
    ids = torch.randint(2, 50, (3, 6), generator=generator(8)).to(DEVICE)
    if damage == "code":
        codes[ids[2, 5], 63] = 0xFF
    elif damage == "scale":
        scales[ids[0, 1], 0] = 255
    else:
        ids[1, 3] = 50 if damage == "outside" else -1
    problems = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = engram.empty_rows(3, 6 * 64, DEVICE)
    got = engram.fold_table_rows(codes, scales, ids, problems, columns=6, out=out)
    assert int(problems) == (engram.NAN if damage in ("code", "scale") else engram.OUTSIDE)
    assert got.scale.isfinite().all()
    unread = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    nothing = engram.empty_rows(0, 6 * 64, DEVICE)
    engram.fold_table_rows(codes, scales, ids[:0], unread, columns=6, out=nothing)
    assert int(unread) == 0


@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (70, 5120)] if ON_GPU else [(3, 96), (2, 1088)])
@pytest.mark.parametrize("with_dead", [False, True])
def test_injection_equals_the_reference(tokens: int, width: int, with_dead: bool) -> None:
    stream = (draw(1, tokens, 4, width) * 3).to(torch.bfloat16)
    kv = draw(2, tokens, 5 * width).to(torch.bfloat16)
    kv[0, :width] = stream[0, 0]  # a gate that is far from a half
    weight = 1 + 0.1 * draw(3, 4, width)
    dead = torch.arange(tokens, device=DEVICE) % 2 == 1 if with_dead else None
    got = engram.engram_inject(stream, kv, weight, dead, EPS)
    keys, value = kv.unflatten(1, (5, -1)).split((4, 1), dim=1)
    gate = reference.engram_gate(stream, keys, weight, EPS)
    if dead is not None:
        gate = gate.masked_fill(dead.unsqueeze(1), 0.0)
    expected = reference.engram_inject(stream, gate, value.squeeze(1))
    unit = 2.0**-7 * torch.maximum(got.float().abs(), expected.float().abs())
    assert got.dtype == torch.bfloat16 and ((got.float() - expected.float()).abs() <= unit + 1e-5).all()
    if dead is not None:
        assert torch.equal(got[dead], stream[dead])
    for row in (0, tokens - 1):
        one = slice(row, row + 1)
        alone = engram.engram_inject(stream[one], kv[one], weight, None if dead is None else dead[one], EPS)
        assert torch.equal(alone[0], got[row])


def test_a_gate_of_nothing_is_positive() -> None:
    """d = +0 takes the positive root, which its floor makes 1e-3: sigmoid(1e-3)."""
    stream, kv = torch.zeros(1, 4, 64, device=DEVICE, dtype=torch.bfloat16), torch.zeros(1, 320, device=DEVICE)
    kv[:, 256:] = 1.0
    got = engram.engram_inject(stream, kv.to(torch.bfloat16), torch.ones(4, 64, device=DEVICE), None, EPS)
    expected = torch.full_like(got, float(torch.sigmoid(torch.tensor(1e-3))))
    assert ((got.float() - expected.float()).abs() <= 2.0**-8).all()
