"""Device check before a long run: kernels against plain references, then speed and hot kernels of chosen phases.

python -m training.smoke kernels
python -m training.smoke speed PHASE BATCH_TOKENS STEPS DATA
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time

import torch

from training import attention, moe
from training.model import document_start
from training.sinkhorn import sinkhorn, sinkhorn_reference


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b."""
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def check_kernels() -> None:
    """Prints relative errors of outputs and gradients; float32 kernels near 1e-6, bf16 near 1e-2."""
    torch.manual_seed(0)
    logits = torch.randn(1000, 4, 4, device="cuda", requires_grad=True)
    grad = torch.randn(1000, 4, 4, device="cuda")
    results = [(f(logits, 20, 1e-6), f) for f in (sinkhorn, sinkhorn_reference)]
    grads = [torch.autograd.grad(out, logits, grad)[0] for out, _ in results]
    print("sinkhorn", relative(results[0][0], results[1][0]), relative(grads[0], grads[1]), flush=True)

    flex = torch.compile(attention.attend_flex, dynamic=False)
    b, h, t, d = 3, 8, 512, 128
    tokens = torch.randint(0, 200, (b, t), device="cuda")
    start = document_start(tokens)
    for ratio in (0, 1, 2):
        n = t // ratio if ratio else 0
        for chosen in (None, torch.rand(b, t, max(n, 1), device="cuda") < 0.3) if ratio else (None,):
            q = torch.randn(b, h, t, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            keys = torch.randn(b, t + n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            dense = attention.visible(start, ratio, 128)
            if chosen is not None:
                dense = torch.cat([dense[..., :t], dense[..., t:] & chosen], -1)
            out, lse = flex(q, keys, attention.build_block_mask(start, ratio, 128, chosen))
            want, want_lse = attention.attend_reference(q, keys, dense)
            g, gl = torch.randn_like(out), torch.randn_like(lse)
            got_grads = torch.autograd.grad([out, lse], [q, keys], [g, gl])
            want_grads = torch.autograd.grad([want, want_lse], [q, keys], [g, gl])
            errors = [
                relative(a, b) for a, b in zip((out, lse, *got_grads), (want, want_lse, *want_grads), strict=True)
            ]
            print("flex", ratio, chosen is not None, [f"{e:.1e}" for e in errors], flush=True)

    n, dim, f, e = 4096, 256, 192, 16
    x = torch.randn(n, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w13 = (torch.randn(e, 2 * f, dim, device="cuda") / 16).bfloat16().requires_grad_()
    w2 = (torch.randn(e, dim, f, device="cuda") / 14).bfloat16().requires_grad_()
    ids = torch.rand(n, e, device="cuda").topk(2).indices
    weights = torch.rand(n, 2, device="cuda", requires_grad=True)
    leaves = [x, w13, w2, weights]
    out = torch.compile(moe.experts, dynamic=False)(
        x, weights, moe.dispatch(ids, e), w13, w2, w13[0].detach(), w2[0].detach(), 10.0, False
    )
    dense = moe.swiglu(torch.einsum("nd,efd->nef", x, w13), 10.0)
    mix = torch.zeros(n, e, device="cuda").scatter(1, ids, weights)
    want = torch.einsum("nef,edf->nd", dense * mix[..., None], w2.float())
    want = want + (moe.swiglu(x @ w13[0].detach().t(), 10.0).bfloat16() @ w2[0].detach().t()).float()
    g = torch.randn_like(out)
    got_grads, want_grads = torch.autograd.grad(out, leaves, g), torch.autograd.grad(want, leaves, g.float())
    errors = [relative(a, b) for a, b in zip((out, *got_grads), (want, *want_grads), strict=True)]
    print("experts", [f"{e:.1e}" for e in errors], flush=True)


def check_speed(phase: str, batch_tokens: int, steps: int, data: str, profile: bool) -> None:
    """Runs one phase and prints tokens per second after warm-up, peak memory and the hottest kernels."""
    from training.train import Trainer

    args = argparse.Namespace(
        data=data, out=tempfile.mkdtemp(), tokenizer="models/nano", seconds=1e6, began=0, steps=5, phase=phase,
        batch_tokens=batch_tokens, max_length=4096, muon_rate=0.02, log_every=5, save_every=1e9, seed=1, device="cuda",
        resume=False, compile=True, dtype=torch.bfloat16, flex=True,
    )  # fmt: skip
    trainer = Trainer(args)
    trainer.save = lambda: None
    began = time.time()
    trainer.run()
    torch.cuda.synchronize()
    print(f"{phase} {batch_tokens}: first 5 steps {time.time() - began:.1f} s", flush=True)
    args.steps, began, tokens = 5 + steps, time.time(), trainer.tokens
    trainer.run()
    torch.cuda.synchronize()
    spent = time.time() - began
    print(
        f"{phase} {batch_tokens}: {(trainer.tokens - tokens) / spent:,.0f} tokens/s incl. one export, "
        f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB",
        flush=True,
    )
    if profile:
        args.steps += 2
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            trainer.run()
            torch.cuda.synchronize()
        print(prof.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=60)[:9000])


def main() -> None:
    if sys.argv[1] == "kernels":
        check_kernels()
    else:
        _, _, phase, batch, steps, data, *rest = sys.argv
        check_speed(phase, int(batch), int(steps), data, "profile" in rest)


if __name__ == "__main__":
    main()
