"""Optimiser: Muon for weight matrices (batched over whole stacks), AdamW for everything else, and the schedule."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# fmt: off
MUON = (
    "wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w13", "w2", "sw13", "sw2", "comp_wkv", "comp_wgate", "idx_wk", "idx_wq_b",
    "engram_wkv", "main_proj",
)
# fmt: on
# AdamW learning rates; parameters not named take the last.
ADAM_RATES = {
    "embed": 0.015,
    "head": 0.004,
    "tables": 0.01,
    "gate": 0.001,
    # The mixing logits of mHC must stay small: rates ten times these let them grow past 100 within 2,000 steps.
    "hc_fn": 0.00005,
    "hc_base": 0.0005,
    "hc_scale": 0.0002,
    "idx_weights": 0.002,
    "sink": 0.003,
    "markov_embed": 0.003,
    "markov_head": 0.002,
    "confidence": 0.0002,  # its input, the stream before the norm, is large
    "": 0.003,  # norms, Engram gate weights
}


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """[n, r, c] -> nearest semi-orthogonal matrices (approximately), by a quintic Newton-Schulz iteration in bf16."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.transpose(1, 2)
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return x.transpose(1, 2) if tall else x


class Optimizer:
    """Both optimisers over the parameters of a backbone or a draft model; state is a plain dict of tensors."""

    def __init__(self, model: nn.Module, muon_rate: float = 0.015, decay: float = 0.1, momentum: float = 0.95):
        self.model, self.muon_rate, self.decay, self.momentum = model, muon_rate, decay, momentum
        named = dict(model.named_parameters())
        self.matrices = {name: named[name] for name in MUON if name in named}
        self.buffers = {name: torch.zeros_like(p) for name, p in self.matrices.items()}
        self.groups: dict[float, list[Tensor]] = {}
        for name, p in named.items():
            if name not in self.matrices:
                rate = ADAM_RATES.get(name.split(".")[0], ADAM_RATES[""])
                self.groups.setdefault(rate, []).append(p)
        fused = next(model.parameters()).is_cuda
        self.adam = torch.optim.AdamW(
            [{"params": params, "lr": rate, "rate": rate} for rate, params in self.groups.items()],
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=fused,
        )

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update; `factor` scales every learning rate."""
        for group in self.adam.param_groups:
            group["lr"] = group["rate"] * factor
        self.adam.step()
        waiting: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for name, p in self.matrices.items():
            if p.grad is None:  # untaught indexer: no decay either
                continue
            buffer = self.buffers[name]
            buffer.lerp_(p.grad, 1 - self.momentum)
            nesterov = p.grad.lerp(buffer, self.momentum)
            shape = p.shape[-2:]
            waiting.setdefault(shape, []).append((p, nesterov.view(-1, *shape)))
        for shape, pairs in waiting.items():
            update = orthogonalise(torch.cat([g for _, g in pairs]))
            rate = self.muon_rate * factor * max(1.0, shape[0] / shape[1]) ** 0.5
            at = 0
            for p, g in pairs:
                p.mul_(1 - self.muon_rate * factor * self.decay)
                p.add_(update[at : at + len(g)].view_as(p), alpha=-rate)
                at += len(g)
        for p in self.model.parameters():
            p.grad = None

    def state_dict(self) -> dict:
        return {"adam": self.adam.state_dict(), "muon": self.buffers}

    def load_state_dict(self, state: dict) -> None:
        self.adam.load_state_dict(state["adam"])
        for name, buffer in self.buffers.items():
            buffer.copy_(state["muon"][name])


@torch.no_grad()
def balance_experts(model: nn.Module, loads: Tensor, speed: float) -> None:
    """Moves the selection bias of each expert towards even load; loads [layers, experts] counts."""
    load = loads.float()
    model.gate_bias += speed * torch.sign(load.mean(1, keepdim=True) - load)


def rate_factor(progress: float, warmup: float = 0.015, decay_from: float = 0.35, floor: float = 0.02) -> float:
    """Warm-up, constant, linear decay to `floor`, as a function of the fraction of the time budget."""
    if progress < warmup:
        return max(progress / warmup, 0.02)
    if progress < decay_from:
        return 1.0
    return floor + (1 - floor) * max(0.0, 1 - progress) / (1 - decay_from)
