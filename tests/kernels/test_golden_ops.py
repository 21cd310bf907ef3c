"""The reference operations against single-operation vectors in the official numerics.

Tolerances are those of the set's README: "equal" byte for byte, bf16 ulps at the expected value, or a share of the
largest expected value. Everything here is bfloat16 mode unless a test says float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from golden import bf16_ulps, load, official_dir, part, relative_error
from torch import Tensor

from deepinfer.kernels.reference import (
    attention,
    compressor,
    engram,
    experts,
    hyper,
    indexer,
    linear,
    norm,
    quant,
    rope,
    router,
    selection,
)

DRAWS = ("d0", "d1", "d2", "d3", "d4", "d5", "d9")  # of every op; test_no_vector_is_left_out holds them to the manifest
OPS = {
    "q8",
    "q4_e4m3",
    "q4_e8m0",
    "linear_fp8",
    "linear_fp4",
    "sparse_attention",
    "hyper_connections",
    "engram",
    "compressor",
    "indexer",
    "router",
    "expert",
    "o_projection",
    "rope",
}
NORM_EPS = 1e-20
HC_EPS = 1e-6
COPIES = 4
BF16_GAP = 0.01  # below this gap a choice may fall either way (README, indexer)
FP32_GAP = 1e-5

by_draw = pytest.mark.parametrize("draw", DRAWS)


def draws_with(*draws: str) -> pytest.MarkDecorator:
    """For tests of a part that not every draw has."""
    return pytest.mark.parametrize("draw", draws)


ROUTED_EXPERTS = ("d0", "d2", "d3", "d5", "d9")
WITH_AN_EMPTY_ROW = ("d0", "d1", "d2", "d3", "d5", "d9")
WHOLE_HYPER_CONNECTIONS = ("d0", "d1", "d2", "d4", "d5", "d9")
ENGRAM_LOOKUPS = ("d0", "d1", "d4")
CLOSED_GROUPS = ("d0", "d1", "d2", "d3", "d4", "d9")
TEXT_ROWS = ("d0", "d1", "d2", "d3", "d5", "d9")


def vector(op: str, draw: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    tensors = part(load(official_dir() / "ops" / f"{op}.safetensors"), f"{draw}.")
    return part(tensors, "in."), part(tensors, "out.")


def fp8_weight(x: dict[str, Tensor], name: str) -> Tensor:
    return quant.dequantize_fp8_tiles(x[name], x[f"{name}_scale"])


def fp4_weight(x: dict[str, Tensor], name: str) -> Tensor:
    return quant.dequantize_fp4_groups(x[name], x[f"{name}_scale"])


def stored_weight(x: dict[str, Tensor], name: str) -> Tensor:
    return fp4_weight(x, name) if x[name].dtype == torch.int8 else fp8_weight(x, name)


def without_minus_zero(codes: Tensor) -> Tensor:
    """Unpacked e2m1 codes with -0 (8) counted as 0."""
    return torch.where(codes == 8, 0, codes)


def e4m3_bytes(scale: Tensor) -> Tensor:
    return scale.to(torch.float8_e4m3fn).view(torch.uint8)


def window_latents(x: dict[str, Tensor]) -> Tensor:
    codes = x["window_codes"].view(torch.float8_e4m3fn)
    return quant.dequantize_fp8(codes, quant.e8m0_to_float(x["window_scales"])).bfloat16()


def compressed_latents(x: dict[str, Tensor]) -> Tensor:
    scales = x["compressed_scales"].view(torch.float8_e4m3fn).float()
    return quant.dequantize_fp4(quant.unpack_fp4(x["compressed_codes"]), scales).bfloat16()


def index_keys(x: dict[str, Tensor]) -> Tensor:
    return quant.dequantize_fp4(quant.unpack_fp4(x["key_codes"]), quant.e8m0_to_float(x["key_scales"])).bfloat16()


def test_no_vector_is_left_out() -> None:
    manifest = json.loads((official_dir() / "manifest.json").read_text())
    listed = {entry["op"]: tuple(draw["draw"] for draw in entry["draws"]) for entry in manifest["ops"]}
    assert listed == dict.fromkeys(OPS, DRAWS)

    def draws(op: str, holds: Callable[[dict[str, Tensor], dict[str, Tensor]], bool]) -> tuple[str, ...]:
        return tuple(draw for draw in DRAWS if holds(*vector(op, draw)))

    assert draws("expert", lambda x, y: "route_weight" in x) == ROUTED_EXPERTS
    assert draws("sparse_attention", lambda x, y: bool((x["indices"] < 0).all(-1).any())) == WITH_AN_EMPTY_ROW
    assert draws("hyper_connections", lambda x, y: "stream" in x) == WHOLE_HYPER_CONNECTIONS
    assert draws("engram", lambda x, y: "table" in x) == ENGRAM_LOOKUPS
    assert draws("compressor", lambda x, y: "latent" in y) == CLOSED_GROUPS
    assert draws("router", lambda x, y: not bool(x["image_mask"].all())) == TEXT_ROWS


# Formats: equal byte for byte (section 2.0)


@by_draw
def test_q8_codes_scales_and_values_are_equal(draw: str) -> None:
    x, y = vector("q8", draw)
    codes, scale = quant.quantize_fp8(x["x"])
    assert torch.equal(codes.view(torch.uint8), y["codes"])
    assert torch.equal(quant.float_to_e8m0(scale), y["scales"])
    assert torch.equal(quant.fake_quantize_fp8(x["x"]).view(torch.int16), y["y"].view(torch.int16))


@by_draw
def test_q8_record_reads_back_as_the_fake_quantised_values(draw: str) -> None:
    _, y = vector("q8", draw)
    codes, scale = y["codes"].view(torch.float8_e4m3fn), quant.e8m0_to_float(y["scales"])
    assert torch.equal(quant.dequantize_fp8(codes, scale), y["y"].float())


@by_draw
def test_q4_e4m3_codes_scales_and_values_are_equal(draw: str) -> None:
    x, y = vector("q4_e4m3", draw)
    codes, scale = quant.quantize_fp4_e4m3(x["x"])
    assert torch.equal(without_minus_zero(codes), without_minus_zero(quant.unpack_fp4(y["codes"])))
    assert torch.equal(e4m3_bytes(scale), y["scales"])
    assert torch.equal(quant.fake_quantize_fp4_e4m3(x["x"]), y["y"])


@by_draw
def test_q4_e8m0_codes_scales_and_values_are_equal(draw: str) -> None:
    x, y = vector("q4_e8m0", draw)
    codes, scale = quant.quantize_fp4_e8m0(x["x"])
    assert torch.equal(without_minus_zero(codes), without_minus_zero(quant.unpack_fp4(y["codes"])))
    assert torch.equal(quant.float_to_e8m0(scale), y["scales"])
    assert torch.equal(quant.fake_quantize_fp4_e8m0(x["x"]), y["y"])


@by_draw
@pytest.mark.parametrize("op", ["q4_e4m3", "q4_e8m0"])
def test_fp4_packing_round_trips_the_recorded_bytes(op: str, draw: str) -> None:
    _, y = vector(op, draw)
    assert torch.equal(quant.pack_fp4(quant.unpack_fp4(y["codes"])), y["codes"])


# Matrix products (sections 2.0, 2.4, 2.8)


@by_draw
@pytest.mark.parametrize("op", ["linear_fp8", "linear_fp4"])
def test_quantized_linear_is_within_one_ulp(op: str, draw: str) -> None:
    x, y = vector(op, draw)
    got = linear.quantized_linear(x["x"], stored_weight(x, "weight"))
    assert got.dtype == torch.bfloat16
    assert bf16_ulps(got, y["y"]) <= 1


@by_draw
@pytest.mark.parametrize("op", ["linear_fp8", "linear_fp4"])
def test_quantized_linear_rounds_the_exact_sum(op: str, draw: str) -> None:
    x, y = vector(op, draw)
    exact = linear.linear(quant.fake_quantize_fp8(x["x"]).float(), stored_weight(x, "weight"))  # no rounding at the end
    assert relative_error(exact, y["y_exact"]) <= 2e-6


@by_draw
def test_expert_gate_up_and_activation_are_within_one_ulp(draw: str) -> None:
    x, y = vector("expert", draw)
    gate = linear.quantized_linear(x["x"], stored_weight(x, "w1"))
    up = linear.quantized_linear(x["x"], stored_weight(x, "w3"))
    assert bf16_ulps(gate, y["gate"]) <= 1
    assert bf16_ulps(up, y["up"]) <= 1
    act = experts.swiglu(y["gate"], y["up"], x["limit"].item())
    if "route_weight" in x:
        act = act * x["route_weight"].unsqueeze(-1)
    assert bf16_ulps(act.bfloat16(), y["act"]) <= 1
    assert bf16_ulps(linear.quantized_linear(y["act"], stored_weight(x, "w2")), y["y"]) <= 1


@by_draw
def test_expert_forward_is_within_one_ulp(draw: str) -> None:
    x, y = vector("expert", draw)
    w1, w3, w2 = (stored_weight(x, name) for name in ("w1", "w3", "w2"))
    got = experts.expert_forward(x["x"], w1, w3, w2, x["limit"].item(), x.get("route_weight"))
    assert bf16_ulps(got, y["y"]) <= 1


@draws_with(*ROUTED_EXPERTS)
def test_routed_experts_with_one_choice_is_that_expert(draw: str) -> None:
    x, y = vector("expert", draw)
    weights = tuple(stored_weight(x, name) for name in ("w1", "w3", "w2"))
    asked: list[int] = []

    def expert(number: int) -> tuple[Tensor, Tensor, Tensor]:
        asked.append(number)
        return weights

    ids = torch.full((x["x"].shape[0], 1), 3)
    got = experts.routed_experts(x["x"], ids, x["route_weight"].unsqueeze(-1), expert, x["limit"].item())
    assert asked == [3]
    assert got.dtype == torch.float32
    assert bf16_ulps(got, y["y"]) <= 1


@by_draw
def test_o_projection_is_within_one_ulp(draw: str) -> None:
    x, y = vector("o_projection", draw)
    cos, sin = rope.rope_angles(x["positions"], x["freqs"])
    o = rope.apply_rope(x["o"], cos, sin, inverse=True)
    assert bf16_ulps(o, y["o_unrotated"]) <= 1
    groups = x["groups"].item()
    wo_a = fp8_weight(x, "wo_a").bfloat16().chunk(groups)  # dequantised to bf16, activations as they are
    per_group = y["o_unrotated"].unflatten(1, (groups, -1)).flatten(2).unbind(1)
    z = torch.cat([linear.linear(part_of_o, w) for part_of_o, w in zip(per_group, wo_a, strict=True)], dim=-1)
    assert bf16_ulps(z, y["z"]) <= 1
    assert bf16_ulps(linear.quantized_linear(y["z"], fp8_weight(x, "wo_b")), y["y"]) <= 1


# Positions (section 2.0)


@by_draw
def test_rope_frequencies_are_within_2e_7(draw: str) -> None:
    x, y = vector("rope", draw)
    dim, original_length, base, factor, fast, slow = x["params"].tolist()
    if original_length:
        got = rope.yarn_frequencies(
            int(dim), base, factor=factor, original_length=int(original_length), beta_fast=fast, beta_slow=slow
        )
    else:
        got = rope.rope_frequencies(int(dim), base)
    assert got.dtype == torch.float32
    assert ((got.double() - y["freqs"].double()).abs() / y["freqs"].double()).max() <= 2e-7


@by_draw
def test_rope_angles_and_rotation_follow_the_given_frequencies(draw: str) -> None:
    x, y = vector("rope", draw)
    cos, sin = rope.rope_angles(x["positions"], y["freqs"])
    assert (cos - y["cos"]).abs().max() <= 2e-7
    assert (sin - y["sin"]).abs().max() <= 2e-7
    assert bf16_ulps(rope.apply_rope(x["x"], cos, sin), y["y"]) <= 1
    assert bf16_ulps(rope.apply_rope(x["x"], cos, sin, inverse=True), y["y_inverse"]) <= 1


# Attention (sections 2.4, 2.7)


@by_draw
def test_sparse_attention_over_one_pool(draw: str) -> None:
    x, y = vector("sparse_attention", draw)
    pool = torch.cat((window_latents(x), compressed_latents(x)))
    scale = x["q"].shape[-1] ** -0.5
    got = attention.sparse_attention(x["q"], pool, x["indices"].long(), None, None, x["sink"], scale)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, y["o"]) <= 0.002


@by_draw
def test_sparse_attention_over_two_pools(draw: str) -> None:
    x, y = vector("sparse_attention", draw)
    window, compressed, indices = window_latents(x), compressed_latents(x), x["indices"].long()
    window_columns = (indices < len(window)) & (indices >= 0)
    column = int(window_columns.any(0).nonzero().max()) + 1  # the list: window entries up to here, compressed after
    assert (indices[:, :column] < len(window)).all()
    kv_indices = torch.where(indices[:, column:] < 0, -1, indices[:, column:] - len(window))
    scale = x["q"].shape[-1] ** -0.5
    got = attention.sparse_attention(x["q"], window, indices[:, :column], compressed, kv_indices, x["sink"], scale)
    assert relative_error(got, y["o"]) <= 0.002


@by_draw
def test_sparse_attention_in_float32_is_one_exact_softmax(draw: str) -> None:
    x, y = vector("sparse_attention", draw)
    pool = torch.cat((window_latents(x), compressed_latents(x))).float()
    scale = x["q"].shape[-1] ** -0.5
    got = attention.sparse_attention(x["q"].float(), pool, x["indices"].long(), None, None, x["sink"], scale)
    assert relative_error(got, y["o_exact"]) <= 2e-6


@draws_with(*WITH_AN_EMPTY_ROW)
def test_a_query_without_a_key_attends_to_nothing(draw: str) -> None:
    x, _ = vector("sparse_attention", draw)
    empty = (x["indices"] < 0).all(-1)
    assert empty.any()
    pool = torch.cat((window_latents(x), compressed_latents(x)))
    for dtype in (torch.bfloat16, torch.float32):
        got = attention.sparse_attention(
            x["q"].to(dtype), pool.to(dtype), x["indices"].long(), None, None, x["sink"], 1.0
        )
        assert (got[empty] == 0).all()


# Hyper-connections (section 2.2)


@by_draw
def test_hyper_connection_coefficients_are_within_5e_6(draw: str) -> None:
    x, y = vector("hyper_connections", draw)
    iterations = x["iters"].item() if "iters" in x else 20
    mixes = x.get("mixes", y.get("mixes"))
    pre, post, comb = hyper.hyper_coefficients(
        mixes, x["scale"], x["base"], copies=COPIES, iterations=iterations, eps=HC_EPS
    )
    assert relative_error(pre, y["pre"]) <= 5e-6
    assert relative_error(post, y["post"]) <= 5e-6
    assert relative_error(comb, y["comb"]) <= 5e-6


@draws_with(*WHOLE_HYPER_CONNECTIONS)
def test_hyper_connection_mixes_are_within_5e_6(draw: str) -> None:
    x, y = vector("hyper_connections", draw)
    fn = x["fn_tile"].repeat(1, x["fn_repeat"].item())
    assert relative_error(hyper.hyper_mixes(x["stream"], fn, NORM_EPS), y["mixes"]) <= 5e-6


@draws_with(*WHOLE_HYPER_CONNECTIONS)
def test_hyper_connection_collapse_and_expand_are_within_one_ulp(draw: str) -> None:
    x, y = vector("hyper_connections", draw)
    assert bf16_ulps(hyper.hyper_collapse(x["stream"], x["pre_in"]), y["u"]) <= 1
    assert bf16_ulps(hyper.hyper_expand(x["stream"], x["y"], y["post"], y["comb"]), y["stream_out"]) <= 1


# Engram (section 2.3)


@draws_with(*ENGRAM_LOOKUPS)
def test_engram_lookup_and_projection_are_within_one_ulp(draw: str) -> None:
    x, y = vector("engram", draw)
    rows = x["row_ids"].long()
    scales = quant.e8m0_to_float(x["table_scale"].view(torch.uint8)[rows])
    memory = quant.dequantize_fp8(x["table"].view(torch.uint8)[rows].view(torch.float8_e4m3fn), scales).bfloat16()
    assert bf16_ulps(linear.quantized_linear(memory.flatten(1), fp8_weight(x, "wkv")), y["kv_out"]) <= 1


@by_draw
def test_engram_gate_is_within_2e_6_and_injection_within_one_ulp(draw: str) -> None:
    x, y = vector("engram", draw)
    kv = x["kv"] if "kv" in x else y["kv_out"]
    dim = x["stream"].shape[-1]
    keys, value = kv[:, : COPIES * dim].unflatten(-1, (COPIES, dim)), kv[:, COPIES * dim :]
    weight = x["q_weight"].float() * x["k_weight"].float()
    gate = engram.engram_gate(x["stream"], keys, weight, NORM_EPS) * x["alive"].unsqueeze(-1)
    assert (gate - y["gate"]).abs().max() <= 2e-6
    assert bf16_ulps(engram.engram_inject(x["stream"], gate, value), y["stream_out"]) <= 1


# Compressor (sections 2.5, 2.6)


def compressed_latents_of(x: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
    """The draw's closed groups as latents; checks the rows of the groups on the way."""
    if x["ratio"].item() == 1:
        return norm.rms_norm(linear.linear(x["x"], x["wkv"]), x["norm"], NORM_EPS)
    kv, gate = (linear.linear(x["x"].float(), x[name]) for name in ("wkv", "wgate"))
    assert relative_error(kv, y["kv"]) <= 2e-6
    assert relative_error(gate, y["gate"]) <= 2e-6
    rows = torch.stack((kv, gate), dim=1)
    if "open_kv_in" in x:  # the chunk starts in the middle of a group
        rows = torch.cat((torch.stack((x["open_kv_in"], x["open_gate_in"]))[None], rows))
    closed = len(rows) // 2 * 2
    if closed < len(rows):
        assert relative_error(rows[-1, 0], y["open_kv_out"]) <= 2e-6
        assert relative_error(rows[-1, 1], y["open_gate_out"]) <= 2e-6
    else:
        assert "open_kv_out" not in y
    return compressor.compress_pairs(rows[0:closed:2], rows[1:closed:2], x["norm"], NORM_EPS, torch.bfloat16)


@by_draw
def test_compressor_rows_open_rows_and_latents(draw: str) -> None:
    x, y = vector("compressor", draw)
    latents = compressed_latents_of(x, y)
    if "latent" in y:
        assert bf16_ulps(latents, y["latent"]) <= 1
    else:
        assert len(latents) == 0


@draws_with(*CLOSED_GROUPS)
def test_compressor_records_and_keys_are_equal_but_for_one_code_in_1000(draw: str) -> None:
    x, y = vector("compressor", draw)
    latents = compressed_latents_of(x, y)
    cos, sin = rope.rope_angles(y["entry_positions"], x["freqs"])
    codes, scale = quant.quantize_fp4_e4m3(rope.apply_rope(latents, cos, sin))
    keys = norm.rms_norm(linear.linear(latents, x["wk"]), x["k_norm"], NORM_EPS)
    key_codes, key_scale = quant.quantize_fp4_e8m0(rope.apply_rope(keys, cos, sin))
    for got, expected in (
        (without_minus_zero(codes), without_minus_zero(quant.unpack_fp4(y["codes"]))),
        (e4m3_bytes(scale), y["scales"]),
        (without_minus_zero(key_codes), without_minus_zero(quant.unpack_fp4(y["key_codes"]))),
        (quant.float_to_e8m0(key_scale), y["key_scales"]),
    ):
        assert got.shape == expected.shape
        assert (got != expected).sum() <= expected.numel() / 1000


# Index (section 2.6)


def index_queries(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    cos, sin = rope.rope_angles(x["positions"], x["freqs"])
    return quant.quantize_fp4_e8m0(rope.apply_rope(x["q"], cos, sin))


def visible_entries(x: dict[str, Tensor]) -> Tensor:
    return ((x["positions"].long() + 1) // x["ratio"].item()).clamp_max(len(x["key_codes"]))


def scores_of(x: dict[str, Tensor], y: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Scores from the recorded queries and keys, -inf where an entry is not visible yet."""
    scales = quant.e8m0_to_float(y["q_scales"])
    queries = quant.dequantize_fp4(quant.unpack_fp4(y["q_codes"]), scales).to(dtype)
    scores = indexer.index_scores(queries[None], index_keys(x)[None].to(dtype), y["weights"][None].to(dtype))[0]
    entries = torch.arange(scores.shape[1])
    return scores.masked_fill(entries >= visible_entries(x).unsqueeze(-1), float("-inf"))


MODES = pytest.mark.parametrize(
    ("suffix", "gap"), [("bf16", BF16_GAP), ("fp32", FP32_GAP)], ids=["bf16_scores", "fp32_scores"]
)


@by_draw
def test_indexer_query_records_are_equal(draw: str) -> None:
    x, y = vector("indexer", draw)
    codes, scale = index_queries(x)
    assert torch.equal(without_minus_zero(codes), without_minus_zero(quant.unpack_fp4(y["q_codes"])))
    assert torch.equal(quant.float_to_e8m0(scale), y["q_scales"])


@by_draw
def test_indexer_scores_in_bf16_are_within_one_ulp(draw: str) -> None:
    x, y = vector("indexer", draw)
    assert bf16_ulps(scores_of(x, y, torch.bfloat16), y["score_bf16"]) <= 1


@by_draw
def test_indexer_scores_in_float32_are_within_2e_6(draw: str) -> None:
    x, y = vector("indexer", draw)
    assert relative_error(scores_of(x, y, torch.float32), y["score_fp32"]) <= 2e-6


@MODES
@by_draw
def test_indexer_topk_of_the_recorded_scores_is_equal(draw: str, suffix: str, gap: float) -> None:
    x, y = vector("indexer", draw)
    topk = x["topk"].item()
    got = selection.top_entries(y[f"score_{suffix}"].float(), topk)
    assert torch.equal(got, y[f"topk_{suffix}"].long())  # the recorded scores leave no room, ties go to the lower index


@MODES
@by_draw
def test_indexer_topk_of_own_scores_is_equal_where_the_gap_allows(draw: str, suffix: str, gap: float) -> None:
    x, y = vector("indexer", draw)
    topk = x["topk"].item()
    scores = scores_of(x, y, torch.bfloat16 if suffix == "bf16" else torch.float32)
    got = selection.top_entries(scores, topk)
    clear = y[f"gap_{suffix}"] > gap
    assert torch.equal(got[clear], y[f"topk_{suffix}"].long()[clear])


@MODES
@by_draw
def test_indexer_candidates_and_choice_inside_them_are_equal(draw: str, suffix: str, gap: float) -> None:
    x, y = vector("indexer", draw)
    scores, topk = y[f"score_{suffix}"].float(), x["topk"].item()
    mask = selection.candidate_mask(
        scores, visible_entries(x), block_size=x["block_size"].item(), topk_blocks=x["topk_blocks"].item()
    )
    assert torch.equal(mask, y[f"candidates_{suffix}"].bool() & ~scores.isneginf())
    inside = selection.top_entries(scores.masked_fill(~mask, float("-inf")), topk)
    assert torch.equal(inside, y[f"topk_in_candidates_{suffix}"].long())


# Router (section 2.8)


@by_draw
def test_router_choice_is_equal_and_scores_and_weights_within_2e_6(draw: str) -> None:
    x, y = vector("router", draw)
    bias = torch.where(x["image_mask"].bool().unsqueeze(-1), x["bias_vl"], x["bias"])  # by row
    ids, weights, scores = router.route(
        linear.linear(x["x"].float(), x["weight"]),
        bias,
        topk=x["topk"].item(),
        scale=x["route_scale"].item(),
        normalize=True,
        gate_temp=x["gate_temp"].item(),
    )
    assert torch.equal(ids, y["indices"].long())
    assert relative_error(scores, y["scores"]) <= 2e-6
    assert relative_error(weights, y["weights"]) <= 2e-6


@draws_with(*TEXT_ROWS)
def test_router_with_one_bias_for_all_rows_serves_text(draw: str) -> None:
    x, y = vector("router", draw)
    text = ~x["image_mask"].bool()
    assert text.any()
    ids, _, _ = router.route(
        linear.linear(x["x"][text].float(), x["weight"]),
        x["bias"],
        topk=x["topk"].item(),
        scale=x["route_scale"].item(),
        normalize=True,
        gate_temp=x["gate_temp"].item(),
    )
    assert torch.equal(ids, y["indices"].long()[text])
