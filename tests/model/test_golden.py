"""The float32 model against an independent float32 engine: prompts, decode steps, n-gram hashes, intermediates.

Tolerance of the set (its README gives the reason): max|got - expected| < 1e-4 max|expected| per tensor, every id equal.
Drafts and image prompts belong to parts of the engine that are not the text backbone.
"""

from __future__ import annotations

import pytest
import torch
from golden import CASES, golden_dir, load, part, relative_error
from golden_runs import (
    ENGRAM_CASES,
    TEXT_PROMPTS,
    Run,
    by_case,
    by_prompt,
    expected,
    model,
    one_thread,  # noqa: F401
    only,
    prompts,
    run_alone,
    run_together,
    traced,
)
from torch import Tensor

from deepinfer.cache import Cache
from deepinfer.kernels.reference.selection import candidate_mask
from deepinfer.model import Chunk, load_model

LIMIT = 1e-4
TRACE_LAYERS = 6


# reference: plain PyTorch throughout; picked: what the engine picks here (the same where no faster kernel runs)
by_kernels = pytest.mark.parametrize("kernels", ["reference", "picked"])


def run(case: str, name: str, kernels: str = "picked") -> Run:
    return run_alone(case, name, "float32", golden_dir() / case, kernels)


def whole_prompts(case: str) -> tuple[list[list[int]], list[Tensor]]:
    """Every text prompt of a case with its decode tokens, and the logits expected of all positions."""
    want = expected(case)
    ids = [prompts(case)[name]["ids"] + want[f"{name}.decode_ids"].tolist() for name in TEXT_PROMPTS[case]]
    logits = [torch.cat((want[f"{n}.prefill_logits"], want[f"{n}.decode_logits"])) for n in TEXT_PROMPTS[case]]
    return ids, logits


def assert_all_close(got: list[Tensor], want: list[Tensor]) -> None:
    for number, (g, w) in enumerate(zip(got, want, strict=True)):
        assert relative_error(g, w) < LIMIT, f"sequence {number}"


def test_no_text_prompt_is_left_out() -> None:
    assert sorted(path.name for path in golden_dir().iterdir() if path.is_dir()) == list(CASES) == list(TEXT_PROMPTS)
    for case, names in TEXT_PROMPTS.items():
        assert names == tuple(name for name, prompt in prompts(case).items() if not prompt.get("images"))
    assert tuple(case for case in CASES if "engram.primes" in expected(case)) == ENGRAM_CASES


# One sequence


@by_prompt
def test_prefill_logits(case: str, name: str) -> None:
    assert relative_error(run(case, name).prefill, expected(case)[f"{name}.prefill_logits"]) < LIMIT


@by_prompt
def test_decode_logits_token_by_token(case: str, name: str) -> None:
    assert relative_error(run(case, name).decode, expected(case)[f"{name}.decode_logits"]) < LIMIT


@by_prompt
def test_greedy_decode_ids_are_equal(case: str, name: str) -> None:
    assert run(case, name).greedy_ids == expected(case)[f"{name}.decode_ids"].tolist()


@pytest.mark.parametrize("name", TEXT_PROMPTS["08-dspark"])
def test_hidden_states_of_the_draft_targets(name: str) -> None:
    network = model("08-dspark", "float32")
    trace = run("08-dspark", name).trace
    taps = [torch.cat(trace[f"layers.{layer}.stream_in"]).mean(1) for layer in network.config.dspark_target_layer_ids]
    assert relative_error(torch.cat(taps, dim=-1), expected("08-dspark")[f"{name}.main_hidden"]) < LIMIT


@by_case
def test_weights_kept_in_their_stored_form_give_the_same(case: str) -> None:
    network = load_model(golden_dir() / case, weights="stored")  # widened or packed: the tests above
    name = TEXT_PROMPTS[case][-1]
    ids = prompts(case)[name]["ids"]
    (logits,) = run_together(network, [ids], [[len(ids)]])
    assert relative_error(logits, expected(case)[f"{name}.prefill_logits"]) < LIMIT


# Many sequences


@by_kernels
@by_case
def test_all_prompts_in_one_ragged_prefill_and_batched_decode(case: str, kernels: str) -> None:
    ids, want = whole_prompts(case)
    steps = [[len(prompts(case)[name]["ids"])] + [1] * 16 for name in TEXT_PROMPTS[case]]
    with only(kernels):
        assert_all_close(run_together(model(case, "float32", kernels), ids, steps), want)


@pytest.mark.parametrize(("case", "size"), [("02-ratio2-odd", 3), ("06-yarn-long", 7)])  # odd: groups split
def test_chunks_of_one_prompt_beside_decodes_of_another(case: str, size: int) -> None:
    ids, want = whole_prompts(case)
    steps = []
    for number, name in enumerate(TEXT_PROMPTS[case]):
        length = len(prompts(case)[name]["ids"])
        chunks = [size] * (length // size) + ([length % size] if length % size else [])
        steps.append([0] * (2 * number) + chunks + [1] * 16)  # each starts two steps after the one before
    assert_all_close(run_together(model(case, "float32"), ids, steps), want)


# Engram hash tables


@pytest.mark.parametrize("case", ENGRAM_CASES)
def test_engram_token_map_primes_offsets_and_multipliers_are_equal(case: str) -> None:
    hashes, want = model(case, "float32").hashes, expected(case)
    assert hashes is not None
    for name in ("token_map", "primes", "offsets", "multipliers"):
        assert torch.equal(getattr(hashes, name), want[f"engram.{name}"].long()), name


@pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(case, name, id=f"{case}-{name}") for case in ENGRAM_CASES for name in TEXT_PROMPTS[case]],
)
def test_engram_rows_are_equal_in_prefill_and_decode(case: str, name: str) -> None:
    got = torch.cat(run(case, name).trace["engram_hashes"])
    assert torch.equal(got, expected(case)[f"{name}.engram_hashes"].long())


@pytest.mark.parametrize("name", ["p0", "p1"])
@pytest.mark.parametrize("split", [None, 6], ids=["one_prefill", "two_chunks"])
def test_engram_rows_stop_at_images(name: str, split: int | None) -> None:
    """The hashes of image prompts need no vision tower; the rest of their numbers does."""
    network, want = model("10-vision", "float32"), expected("10-vision")
    ids = prompts("10-vision")[name]["ids"] + want[f"{name}.decode_ids"].tolist()
    with traced(network) as trace:
        run_together(network, [ids], [[split, len(ids) - split] if split else [len(ids)]])
    assert torch.equal(torch.cat(trace["engram_hashes"]), want[f"{name}.engram_hashes"].long())


# Intermediates of 01-core-trace, prompt p0


def trace_pair(kernels: str = "picked") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    got = {name: steps[0] for name, steps in run("01-core-trace", "p0", kernels).trace.items()}  # step 0 is the prefill
    return got, load(golden_dir() / "01-core-trace" / "trace.safetensors")


@by_kernels
@pytest.mark.parametrize("layer", range(TRACE_LAYERS))
def test_trace_of_layer(layer: int, kernels: str) -> None:
    got, want = (part(tensors, f"layers.{layer}.") for tensors in trace_pair(kernels))
    candidates = want.pop("candidates", None)
    assert set(want) <= set(got)
    for name, value in want.items():
        if name in ("topk", "ffn.router_ids"):
            assert torch.equal(got[name], value.long()), name
        elif name == "index_score":
            visible = got[name].isfinite()
            within = value.isfinite()  # recorded after the candidate filter, traced before it
            assert (visible | ~within).all(), name
            assert relative_error(got[name][within], value[within]) < LIMIT, name
        else:
            assert relative_error(got[name], value) < LIMIT, name
    if candidates is not None:
        config = model("01-core-trace", "float32").config
        mask = candidate_mask(
            got["index_score"],
            torch.arange(1, len(candidates) + 1),
            block_size=config.candidate_block_size,
            topk_blocks=config.candidate_topk_blocks,
        )
        assert torch.equal(mask, candidates.bool() & got["index_score"].isfinite())


@by_kernels
def test_trace_of_the_end(kernels: str) -> None:
    got, want = trace_pair(kernels)
    end = {name: value for name, value in want.items() if not name.startswith("layers.")}
    assert set(end) == {"stream_out", "final_hidden"}
    for name, value in end.items():
        assert relative_error(got[name], value) < LIMIT, name


def test_no_traced_layer_is_left_out() -> None:
    _, want = trace_pair()
    assert {name.split(".")[1] for name in want if name.startswith("layers.")} == {str(n) for n in range(TRACE_LAYERS)}


def test_tracing_changes_no_logit() -> None:
    network = model("01-core-trace", "float32")
    ids = prompts("01-core-trace")["p0"]["ids"]
    store = Cache.for_model(network, max_num_seqs=1, num_blocks=1)
    slot = store.open()
    store.reserve(slot, len(ids))
    assert torch.equal(network.forward([Chunk(slot, 0, ids, len(ids))], store), run("01-core-trace", "p0").prefill)
