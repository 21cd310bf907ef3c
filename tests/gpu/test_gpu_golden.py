"""The golden cases on the GPU: in float32 against an independent float32 engine, in bfloat16 against the release's
numerics, there with plain PyTorch and with the GPU kernels.

Limits are those of the CPU's tests (tests/model/test_golden.py, test_golden_official.py) but for one that says why.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from golden import golden_dir, load, official_dir, part, relative_error
from golden_runs import TEXT_PROMPTS, Run, by_case, by_prompt, expected, official, prompts, run_together, traced
from gpu_device import CUDA, DEVICE, on_gpu
from torch import Tensor

from deepinfer.cache import Cache
from deepinfer.kernels import select
from deepinfer.model import Chunk, load_model
from deepinfer.model.backbone import DeepseekV41

pytestmark = on_gpu

LIMIT = 1e-4
NUM_BLOCKS = 16


@cache
def model(case: str, dtype: str, kernels: str) -> DeepseekV41:
    """kernels: "plain" = PyTorch on the device; "kernels" = what the engine picks there, Triton's on a Hopper GPU."""
    weights = "wide" if kernels == "plain" else "auto"
    return load_model(golden_dir() / case, device=str(DEVICE), dtype=dtype, weights=weights)


def set_of(dtype: str, case: str) -> dict[str, Tensor]:
    return expected(case) if dtype == "float32" else official(case)


@cache
def run(case: str, name: str, dtype: str, kernels: str = "plain") -> Run:
    """One prefill of the prompt, then its recorded greedy tokens one by one; everything on the CPU afterwards, the
    trace of float32 alone."""
    network, want = model(case, dtype, kernels), set_of(dtype, case)
    ids, tokens = prompts(case)[name]["ids"], want[f"{name}.decode_ids"].tolist()
    fast = kernels == "kernels" and select.gpu_twins(network.device, network.numerics.dtype)
    store = Cache.for_model(network, max_num_seqs=1, num_blocks=NUM_BLOCKS, kv_format="packed" if fast else None)
    slot = store.open()
    store.reserve(slot, len(ids) + len(tokens))
    with torch.inference_mode(), traced(network) if dtype == "float32" else nullcontext({}) as trace:
        if kernels == "plain":
            with select.reference_only():
                prefill, steps = _steps(network, store, slot, ids, tokens)
        else:
            prefill, steps = _steps(network, store, slot, ids, tokens)
    store.close(slot)
    return Run(prefill.cpu(), torch.cat(steps).cpu(), {key: [v.cpu() for v in own] for key, own in trace.items()})


def _steps(
    network: DeepseekV41, store: Cache, slot: int, ids: list[int], tokens: list[int]
) -> tuple[Tensor, list[Tensor]]:
    prefill = network.forward([Chunk(slot, 0, ids, len(ids))], store).clone()
    return prefill, [
        network.forward([Chunk(slot, len(ids) + i, [token])], store).clone() for i, token in enumerate(tokens)
    ]


# float32


@by_prompt
def test_float32_logits_and_greedy_ids(case: str, name: str) -> None:
    got, want = run(case, name, "float32"), expected(case)
    assert relative_error(got.prefill, want[f"{name}.prefill_logits"]) < LIMIT
    assert relative_error(got.decode, want[f"{name}.decode_logits"]) < LIMIT
    assert got.greedy_ids == want[f"{name}.decode_ids"].tolist()


@by_case
def test_float32_in_one_ragged_prefill_and_batched_decode(case: str) -> None:
    want, names = expected(case), TEXT_PROMPTS[case]
    sequences = [prompts(case)[name]["ids"] + want[f"{name}.decode_ids"].tolist() for name in names]
    steps = [[len(prompts(case)[name]["ids"])] + [1] * 16 for name in names]
    with torch.inference_mode(), select.reference_only():
        got = run_together(model(case, "float32", "plain"), sequences, steps)
    for name, logits in zip(names, got, strict=True):
        both = torch.cat((want[f"{name}.prefill_logits"], want[f"{name}.decode_logits"]))
        assert relative_error(logits.cpu(), both) < LIMIT, name


@pytest.mark.parametrize("layer", range(6))
def test_float32_trace_of_layer_and_all_chosen_ids(layer: int) -> None:
    trace = load(golden_dir() / "01-core-trace" / "trace.safetensors")
    own = {name: steps[0] for name, steps in run("01-core-trace", "p0", "float32").trace.items()}
    got, want = part(own, f"layers.{layer}."), part(trace, f"layers.{layer}.")
    want.pop("candidates", None)
    for name, value in want.items():
        if name in ("topk", "ffn.router_ids"):
            assert torch.equal(got[name].long(), value.long()), name
        elif name != "index_score":  # on the CPU: recorded behind a filter, compared there
            assert relative_error(got[name], value) < LIMIT, name


@pytest.mark.parametrize("case", ["01-core-trace", "04-engram-repeat", "10-vision"])
def test_float32_engram_rows_are_equal(case: str) -> None:
    for name in TEXT_PROMPTS[case]:
        got = torch.cat(run(case, name, "float32").trace["engram_hashes"])
        assert torch.equal(got, expected(case)[f"{name}.engram_hashes"].long()), name


# bfloat16


def row_errors(case: str, name: str, kernels: str) -> Tensor:
    """Of every row's logits, largest difference over the row's largest value [T + 16]."""
    got, want = run(case, name, "bfloat16", kernels), official(case)
    recorded = torch.cat((want[f"{name}.prefill_logits"], want[f"{name}.decode_logits"])).float()
    logits = torch.cat((got.prefill, got.decode))
    return (logits - recorded).abs().amax(1) / recorded.abs().amax(1)


def all_row_errors(kernels: str) -> Tensor:
    official_dir()
    pairs = [(case, name) for case, names in TEXT_PROMPTS.items() for name in names]
    return torch.cat([row_errors(case, name, kernels) for case, name in pairs])


def test_bfloat16_share_of_rows_in_plain_pytorch() -> None:
    """As on a CPU: the recording's own repeats keep 65 % within 1e-3, the least visible mistakes 26 %. Measured on an
    H200: 81 %."""
    errors = all_row_errors("plain")
    print(f"\nplain: {shares(errors)}")
    assert (errors <= 1e-3).float().mean() > 0.45


def shares(errors: Tensor) -> str:
    parts = [f"{(errors <= limit).float().mean():.3f} within {limit}" for limit in (1e-3, 1e-2, 3e-2, 1e-1)]
    return f"{', '.join(parts)}, worst {errors.max():.3f} of {len(errors)} rows"


@pytest.mark.skipif(not CUDA, reason="on a CPU the kernels of bfloat16 are the reference")
@by_case
def test_bfloat16_rows_of_what_the_engine_picks(case: str) -> None:
    """Heads of 32 or 64 values are not for every GPU kernel: those operations run the reference, the others their
    kernels. FP8 products are then summed in another order, and small random networks flip an expert at every edge, so
    the yardstick is how far the recorded float32 and bfloat16 rows of the prompts are apart. In the median of all rows,
    and in the mean of the first ones, which choose nothing, the kernels are no further from the recording; a quarter
    more is the limit, and twice as far where there are less than 25 rows (10-vision has 9: 0.24 of 0.16 was measured).
    Medians of rounding are 0.15 to 0.45 of the largest logit, those of other tokens' rows 0.95 to 1.3; rounding keeps
    the best token of 41 to 64 % of the rows, another token's row that of at most 13 %."""
    official_dir()
    got, kept, errors, rounding = [], [], [], []
    for name in TEXT_PROMPTS[case]:
        recorded, exact = (load_set[f"{name}.prefill_logits"].float() for load_set in (official(case), expected(case)))
        logits = run(case, name, "bfloat16", "kernels").prefill
        got.append(logits.argmax(1) == recorded.argmax(1))
        kept.append(exact.argmax(1) == recorded.argmax(1))
        errors.append((logits - recorded).abs().amax(1) / recorded.abs().amax(1))
        rounding.append((exact - recorded).abs().amax(1) / recorded.abs().amax(1))
    rows, limits = torch.cat(errors), torch.cat(rounding)
    first, first_limit = (torch.stack([own[0] for own in those]).mean() for those in (errors, rounding))
    same, same_kept = (torch.cat(those).float().mean() for those in (got, kept))
    print(
        f"\n{case}: median {rows.median():.3f} of {limits.median():.3f}, first rows {first:.3f} of {first_limit:.3f}, "
        f"same best {same:.3f} of {same_kept:.3f}"
    )
    assert rows.isfinite().all()
    more = 1.25 if len(rows) >= 25 else 2.0
    assert rows.median() <= more * limits.median()
    assert first <= more * first_limit
    assert same >= same_kept - 0.15
