"""The bfloat16 model against the release's numerics: end to end by share of rows, layer by layer with recorded inputs.

These are small random networks: one value on the other side of a rounding edge flips an expert or an entry, and from
there a row differs. So whole prompts are judged by how many rows stay, and exactness is asked of single layers that are
fed what the recording was fed. The set's README has the reasons and the limits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from golden import bf16_ulps, golden_dir, load, official_dir, part, relative_error
from golden_runs import TEXT_PROMPTS, by_case, model, official, one_thread, prompts, run_alone, run_together  # noqa: F401
from torch import Tensor

from deepinfer.kernels.reference import attention, engram, hyper, indexer, quant, rope
from deepinfer.kernels.reference.hyper import hyper_collapse
from deepinfer.kernels.reference.linear import linear
from deepinfer.kernels.reference.norm import rms_norm
from deepinfer.kernels.reference.selection import candidate_mask
from deepinfer.model.block import Block
from deepinfer.model.hyper import taken_in
from deepinfer.model.indexer import Selection
from deepinfer.model.state import StepState

CASE, PROMPT = "01-core-trace", "p0"  # the traced prompt
LAYERS = range(6)
ENGRAM_LAYERS = (1, 4)
KV_SOURCES = (1, 3)
INDEX_SOURCES = (1, 3, 4)
CANDIDATE_SOURCE, CANDIDATE_USER = 3, 4

RECORD_SHARE = 0.005  # of record values may differ
EXPERT_GAP = 0.005  # in biased score: below it a choice of experts may fall either way
INDEX_GAP = 0.01  # of the largest score: below it a choice of entries may


# End to end


def kept_rows(case: str, name: str) -> Tensor:
    """Which rows' logits stay within 1e-3 of the row's largest, bool [T + 16], fed with the recorded greedy tokens."""
    want = official(case)
    run = run_alone(case, name, "bfloat16", official_dir() / "cases" / case)
    expected = torch.cat((want[f"{name}.prefill_logits"], want[f"{name}.decode_logits"]))
    got = torch.cat((run.prefill, run.decode))
    return (got - expected).abs().amax(1) <= 1e-3 * expected.abs().amax(1)


@by_case
def test_a_quarter_of_the_rows_of_each_case_stay(case: str) -> None:
    """Noise of half an fp32 ulp leaves 48 (06-yarn-long) to 95 % of the rows in place, a wrong rounding about none.

    Measured: 76 % (06-yarn-long) to 100 %.
    """
    rows = torch.cat([kept_rows(case, name) for name in TEXT_PROMPTS[case]])
    assert rows.float().mean() > 0.25


def test_share_of_all_rows() -> None:
    """The recording's own repeats with noise of half an fp32 ulp keep 65 %; the least visible mistakes keep 26 %.

    Measured: 86 %, most of them to the last bit. The limit leaves room for another CPU's order of summation.
    """
    rows = torch.cat([kept_rows(case, name) for case, names in TEXT_PROMPTS.items() for name in names])
    assert rows.float().mean() > 0.45


def test_rows_that_no_repeat_of_the_recording_moved_stay() -> None:
    """Eleven repeats with noise left these rows alone. Measured: 210 of 211."""
    pairs = [(case, name) for case, names in TEXT_PROMPTS.items() for name in names]
    rows = torch.cat([kept_rows(case, name)[official(case)[f"{name}.row_stability"] == 1] for case, name in pairs])
    assert len(rows) > 200
    assert rows.float().mean() > 0.9


@by_case
def test_the_first_row_of_every_prompt_stays(case: str) -> None:
    """A first token has one window entry and nothing to choose from; no repeat of the recording moved one."""
    for name in TEXT_PROMPTS[case]:
        assert kept_rows(case, name)[0], name


# Layer by layer


def recorded() -> dict[str, Tensor]:
    return load(official_dir() / "cases" / CASE / "trace.safetensors")


def layer_part(layer: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What this engine computed for a layer and what the recording says, under the names of the recording."""
    return part(driven_blocks(), f"layers.{layer}."), part(recorded(), f"layers.{layer}.")


def fp8_values(codes: Tensor, scales: Tensor) -> Tensor:
    return quant.dequantize_fp8(codes.view(torch.float8_e4m3fn), quant.e8m0_to_float(scales))


def fp4_kv_values(codes: Tensor, scales: Tensor) -> Tensor:
    return quant.dequantize_fp4(quant.unpack_fp4(codes), scales.view(torch.float8_e4m3fn).float())


def fp4_index_values(codes: Tensor, scales: Tensor) -> Tensor:
    return quant.dequantize_fp4(quant.unpack_fp4(codes), quant.e8m0_to_float(scales))


class Probe:
    """Collects the values of one layer at a time, each under the recording's name, step after step."""

    def __init__(self) -> None:
        self.layer = 0
        self.seen: dict[str, list[Tensor]] = {}

    def put(self, name: str, value: Tensor) -> None:
        self.seen.setdefault(f"layers.{self.layer}.{name}", []).append(value.clone())

    def trace(self, name: str, value: Tensor) -> None:
        renamed = {"ffn.router_ids": "ffn.router_indices", "index_score": "indexer.score", "topk": "indexer.topk"}
        short = name.removeprefix(f"layers.{self.layer}.")
        self.put(renamed.get(short, short), value)

    def around(self, function: Callable, *, before: Callable | None = None, after: Callable | None = None) -> Callable:
        """`function`, telling `before` its arguments and `after` its result."""

        def wrapped(*args, **kwargs):  # type: ignore[no-untyped-def]
            if before is not None:
                before(*args)
            result = function(*args, **kwargs)
            if after is not None:
                after(result)
            return result

        return wrapped

    def joined(self) -> dict[str, Tensor]:
        """One tensor per name; lists of entries and of scores are padded to the longest."""
        out = {}
        for name, steps in self.seen.items():
            if name.endswith(("indexer.score", "indexer.topk", "indexer.candidates")):
                fill = {"score": float("-inf"), "topk": -1, "candidates": 0}[name.rsplit(".", 1)[1]]
                width = max(step.shape[1] for step in steps)
                steps = [F.pad(step, (0, width - step.shape[1]), value=fill) for step in steps]
            out[name] = torch.cat(steps)
        return out


@cache
def driven_blocks() -> dict[str, Tensor]:
    """Every block fed with the recorded stream_in and pre_in: one prefill of T rows, then one row at a time.

    What a layer takes from another layer (compressed records, index keys, chosen entries, candidates) is the recorded
    value. Window entries, open rows and the entries that a source chooses for itself are this engine's own.
    """
    network, probe = model(CASE, "bfloat16"), Probe()
    prompt = prompts(CASE)[PROMPT]["ids"]
    tokens = prompt + official(CASE)[f"{PROMPT}.decode_ids"].tolist()
    sizes = [len(prompt)] + [1] * (len(tokens) - len(prompt))
    with pytest.MonkeyPatch.context() as patch:
        _put_probes(patch, probe)
        patch.setattr(network, "blocks", [FedBlock(block, probe) for block in network.blocks])
        patch.setattr(network, "trace", probe.trace)
        run_together(network, [tokens], [sizes])
    return probe.joined()


class FedBlock:
    """Stands in for a block: whatever the block before gave, the block gets the recording's rows."""

    def __init__(self, block: Block, probe: Probe) -> None:
        self.block, self.layer, self.probe = block, block.layer, probe

    def __call__(
        self, stream: Tensor, pre: Tensor, memory: Tensor | None, state: StepState, selection: Selection, update: None
    ) -> tuple[Tensor, Tensor, None]:
        block, probe, name, want = self.block, self.probe, f"layers.{self.layer}", recorded()
        rows = state.view.batch.positions
        probe.layer = self.layer
        if self.layer == 0:  # once per step
            _put_step_probes(state, probe)
        injection = block.engram
        if injection is not None:
            assert memory is not None
            probe.put("engram.out", injection(want[f"{name}.stream_before_engram"][rows], memory, None))
        block.engram = None  # the block proper starts from the recorded stream_in
        inputs = want[f"{name}.stream_in"][rows], want[f"{name}.pre_in"][rows]
        stream, pre, ffn = block(*inputs, None, state, selection)
        stream = taken_in(stream, ffn)
        block.engram = injection
        probe.put("block_out", stream)
        probe.put("pre_out", pre)
        if self.layer in KV_SOURCES:
            _store_recorded_entries(self.layer, state)
        if self.layer in INDEX_SOURCES:
            selection.entries = want[f"{name}.indexer.topk"][rows].long()
        if self.layer == CANDIDATE_SOURCE:
            own = selection.candidates[0]
            (segment,) = state.segments(self.layer)
            limit = torch.arange(segment.key_rows.shape[1]) < segment.visible.reshape(-1, 1)  # [rows, entries]
            probe.put("indexer.candidates", limit if own is None else own.view_as(limit))
            kept = want[f"{name}.indexer.candidates"][rows, : limit.shape[1]].bool() & limit
            selection.candidates = [None if own is None else kept.view_as(own)]  # None: nothing to leave out yet
        return stream, pre, None


def _put_step_probes(state: StepState, probe: Probe) -> None:
    def paired(layer: int, rows: Tensor) -> None:
        probe.put("compressor.kv", rows[:, 0])
        probe.put("compressor.gate", rows[:, 1])

    state.close_pairs = probe.around(state.close_pairs, before=paired)  # type: ignore[method-assign]
    staged = probe.around(state.stage_window, before=lambda layer, kv: probe.put("attn.window", kv))
    state.stage_window = staged  # type: ignore[method-assign]


def _put_probes(patch: pytest.MonkeyPatch, probe: Probe) -> None:
    """Values that the model doesn't trace are picked up at the reference operations, which bfloat16 on a CPU runs."""

    def scored(queries: Tensor, keys: Tensor, weights: Tensor) -> None:
        probe.put("indexer.q", queries.flatten(0, 1))
        probe.put("indexer.weights", weights.flatten(0, 1))

    turn = rope.apply_rope

    def turned(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        result = turn(x, cos, sin, inverse=inverse)
        if inverse:
            probe.put("attn.o", result)
        return result

    patch.setattr(rope, "apply_rope", turned)
    for module, name, before, after in (
        (attention, "sparse_attention", lambda q, *_: probe.put("attn.q", q), None),
        (indexer, "index_scores", scored, None),
        (hyper, "hyper_expand", None, lambda stream: probe.put("streams", stream)),
        (engram, "engram_gate", None, lambda gate: probe.put("engram.gate", gate)),
    ):
        patch.setattr(module, name, probe.around(getattr(module, name), before=before, after=after))


def _store_recorded_entries(layer: int, state: StepState) -> None:
    name, want = f"layers.{layer}", recorded()
    ratio = model(CASE, "bfloat16").config.ratio(layer)
    entries = state.entry_positions(layer) // ratio
    kv = fp4_kv_values(want[f"{name}.compressor.codes"][entries], want[f"{name}.compressor.scales"][entries])
    keys = fp4_index_values(want[f"{name}.indexer.k_codes"][entries], want[f"{name}.indexer.k_scales"][entries])
    if len(entries):
        state.write_entries(layer, kv.bfloat16(), keys.bfloat16())


def gap_at_the_cut(scores: Tensor, k: int) -> Tensor:
    """Last chosen minus first rejected score of every row; infinite where nothing is rejected."""
    best = F.pad(scores, (0, max(0, k + 1 - scores.shape[1])), value=float("-inf")).topk(k + 1, dim=-1).values
    return torch.where(best[:, k].isneginf(), float("inf"), best[:, k - 1] - best[:, k])


def relative_gap(scores: Tensor, k: int) -> Tensor:
    largest = scores.masked_fill(scores.isinf(), 0.0).abs().amax(-1)
    return torch.nan_to_num(gap_at_the_cut(scores, k) / largest, nan=float("inf"))


def entries_agree(layer: int) -> Tensor:
    """Rows whose own choice of entries is the recorded one, bool [T + 16]."""
    got, want = layer_part(layer)
    if "indexer.topk" not in want:
        return torch.ones(len(want["stream_in"]), dtype=torch.bool)
    return (got["indexer.topk"] == want["indexer.topk"]).all(-1)


def experts_agree(layer: int) -> Tensor:
    got, want = layer_part(layer)
    return (got["ffn.router_indices"] == want["ffn.router_indices"]).all(-1)


@pytest.mark.parametrize("layer", LAYERS)
def test_window_records_of_layer(layer: int) -> None:
    got, want = layer_part(layer)
    values = fp8_values(want["attn.window_codes"], want["attn.window_scales"])
    assert (got["attn.window"] != values).float().mean() <= RECORD_SHARE


@pytest.mark.parametrize("layer", KV_SOURCES)
def test_compressed_records_and_index_keys_of_layer(layer: int) -> None:
    got, want = layer_part(layer)
    values = fp4_kv_values(want["compressor.codes"], want["compressor.scales"])
    assert (got["compressed_kv"] != values).float().mean() <= RECORD_SHARE
    keys = fp4_index_values(want["indexer.k_codes"], want["indexer.k_scales"])
    assert (got["index_k"] != keys).float().mean() <= RECORD_SHARE


@pytest.mark.parametrize("layer", KV_SOURCES)
def test_compressor_rows_of_layer(layer: int) -> None:
    got, want = layer_part(layer)
    for name in ("compressor.kv", "compressor.gate"):
        assert (name in want) == (name in got)
        if name in want:
            assert relative_error(got[name], want[name]) <= 0.001


@pytest.mark.parametrize("layer", INDEX_SOURCES)
def test_index_queries_weights_and_scores_of_layer(layer: int) -> None:
    got, want = layer_part(layer)
    queries = fp4_index_values(want["indexer.q_codes"], want["indexer.q_scales"])
    assert (got["indexer.q"] != queries).float().mean() <= RECORD_SHARE
    assert relative_error(got["indexer.weights"], want["indexer.weights"]) <= 0.01
    assert relative_error(got["indexer.score"], want["indexer.score"]) <= INDEX_GAP
    assert (got["indexer.score"] != want["indexer.score"]).float().mean() <= RECORD_SHARE  # summed in bf16 steps


@pytest.mark.parametrize("layer", INDEX_SOURCES)
def test_chosen_entries_of_layer_where_the_gap_allows(layer: int) -> None:
    _, want = layer_part(layer)
    scores = want["indexer.score"].float()
    if layer == CANDIDATE_USER:
        candidates = recorded()[f"layers.{CANDIDATE_SOURCE}.indexer.candidates"].bool()
        scores = scores.masked_fill(~candidates, float("-inf"))
    clear = relative_gap(scores, model(CASE, "bfloat16").config.index_topk) > INDEX_GAP
    assert clear.sum() >= len(clear) // 2
    assert entries_agree(layer)[clear].all()


def test_candidates_where_the_gap_allows() -> None:
    got, want = layer_part(CANDIDATE_SOURCE)
    config, scores = model(CASE, "bfloat16").config, want["indexer.score"].float()
    rows, size, keep = torch.arange(len(scores)), config.candidate_block_size, config.candidate_topk_blocks
    blocks = F.pad(scores, (0, -len(scores) % size), value=float("-inf")).unflatten(1, (-1, size)).amax(-1)
    blocks[rows, rows // size] = float("inf")  # the newest block is forced in and takes one of the places
    best = blocks.topk(keep + 1, dim=-1).values
    largest = scores.masked_fill(scores.isinf(), 0.0).abs().amax(-1)
    clear = best[:, keep].isneginf() | (best[:, keep - 1] - best[:, keep] > INDEX_GAP * largest)
    assert clear.sum() >= len(clear) // 2
    kept = want["indexer.candidates"].bool() & ~scores.isneginf()  # recorded by whole blocks, visible or not
    assert torch.equal(got["indexer.candidates"][clear], kept[clear])
    mask = candidate_mask(scores, rows + 1, block_size=size, topk_blocks=keep)
    assert torch.equal(mask, kept)  # from the recorded scores there is nothing to excuse


@pytest.mark.parametrize("layer", LAYERS)
def test_attention_of_layer(layer: int) -> None:
    got, want = layer_part(layer)
    rows = entries_agree(layer)
    assert relative_error(got["attn_in"], want["attn_in"]) <= 0.01
    assert relative_error(got["attn.q"], want["attn.q"]) <= 0.02
    for name, limit in (("attn.o", 0.02), ("attn_out", 0.02)):
        assert relative_error(got[name][rows], want[name][rows]) <= limit, name
    middle = got["streams"][_first_of_two(got["streams"])]
    assert relative_error(middle[rows], want["stream_mid"][rows]) <= 0.01


def _first_of_two(streams: Tensor) -> Tensor:
    """Rows of the streams after attention: every step put its rows after attention, then its rows after the experts."""
    prefill = len(prompts(CASE)[PROMPT]["ids"])
    steps = (len(streams) - 2 * prefill) // 2
    return torch.cat((torch.arange(prefill), 2 * prefill + 2 * torch.arange(steps)))


@pytest.mark.parametrize("layer", LAYERS)
def test_hyper_connections_of_layer(layer: int) -> None:
    got, want = layer_part(layer)
    rows = entries_agree(layer)
    for name in ("pre", "post", "comb"):
        assert relative_error(got[f"hc_attn_{name}"], want[f"hc_attn_{name}"]) <= 5e-6, name  # from the recorded stream
        ffn = f"hc_ffn_{name}"
        assert relative_error(got[ffn][rows], want[ffn][rows]) <= 0.005, name  # from this engine's stream_mid


@pytest.mark.parametrize("layer", LAYERS)
def test_experts_of_layer_where_the_gap_allows(layer: int) -> None:
    got, want = layer_part(layer)
    network = model(CASE, "bfloat16")
    bias = load(golden_dir() / CASE / "model.safetensors")[f"layers.{layer}.ffn.gate.bias"]
    biased = want["ffn.router_scores"] + bias
    clear = (gap_at_the_cut(biased, network.config.num_experts_per_tok) > EXPERT_GAP) & entries_agree(layer)
    assert clear.sum() >= len(clear) // 2
    chosen, expected = (side["ffn.router_indices"].long().sort(dim=-1).values[clear] for side in (got, want))
    assert torch.equal(chosen, expected)


@pytest.mark.parametrize("layer", LAYERS)
def test_experts_output_and_stream_of_layer(layer: int) -> None:
    got, want = layer_part(layer)
    rows = entries_agree(layer) & experts_agree(layer)
    assert rows.sum() >= len(rows) * 3 // 4
    assert relative_error(got["ffn_in"][rows], want["ffn_in"][rows]) <= 0.01
    for name in ("ffn.router_scores", "ffn.router_weights"):
        assert relative_error(got[name][rows], want[name][rows]) <= 0.005, name
    assert relative_error(got["ffn_out"][rows], want["ffn_out"][rows]) <= 0.04
    following = recorded()
    after = f"layers.{layer + 1}"
    name = f"{after}.stream_before_engram" if f"{after}.stream_before_engram" in following else f"{after}.stream_in"
    stream = following.get(name, following["final.stream"])
    pre = following.get(f"{after}.pre_in", following["final.pre"])
    assert relative_error(got["block_out"][rows], stream[rows]) <= 0.04
    assert relative_error(got["pre_out"][rows], pre[rows]) <= 0.005


@pytest.mark.parametrize("layer", ENGRAM_LAYERS)
def test_engram_of_layer(layer: int) -> None:
    got, want = layer_part(layer)
    assert (got["engram.gate"] - want["engram.gate"]).abs().max() <= 2e-6
    assert bf16_ulps(got["engram.out"], want["stream_in"]) <= 1


def test_engram_rows_are_equal() -> None:
    trace = run_alone(CASE, PROMPT, "bfloat16", official_dir() / "cases" / CASE).trace
    assert torch.equal(torch.cat(trace["engram_hashes"]), recorded()["engram_hashes"].long())


def test_end_of_the_pass() -> None:
    network, want = model(CASE, "bfloat16"), recorded()
    hidden = hyper_collapse(want["final.stream"], want["final.pre"])
    assert bf16_ulps(hidden, want["final.hidden"]) <= 1
    normed = rms_norm(want["final.hidden"], network.norm, network.config.rms_norm_eps)
    assert bf16_ulps(normed, want["final.normed"]) <= 1
    assert relative_error(linear(want["final.normed"].float(), network.head.dense()), want["final.logits"]) <= 2e-6


def test_roles_of_the_layers_are_those_assumed_here() -> None:
    config, want = model(CASE, "bfloat16").config, recorded()
    assert {int(name.split(".")[1]) for name in want if name.startswith("layers.")} == set(LAYERS)
    assert (config.engram_layer_ids, config.kv_source_layer_ids) == (ENGRAM_LAYERS, KV_SOURCES)
    assert (config.index_source_layer_ids, config.candidate_source_layer_id) == (INDEX_SOURCES, CANDIDATE_SOURCE)
    assert [layer for layer in LAYERS if config.is_candidate_user(layer)] == [CANDIDATE_USER]
