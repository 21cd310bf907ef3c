"""Engram: hashed n-gram memory added to the stream before some blocks."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.config import NanoConfig


class EngramHasher(torch.nn.Module):
    """Turns token rows into table rows; all buffers are int64."""

    def __init__(self, config: NanoConfig, token_map: np.ndarray):
        super().__init__()
        shape = (len(config.engram_layer_ids), config.engram_max_ngram_size - 1, config.engram_n_heads)
        primes = torch.from_numpy(np.array(config.engram_primes(), dtype=np.int64).reshape(shape))
        self.max_ngram = config.engram_max_ngram_size
        self.register_buffer("map", torch.from_numpy(np.asarray(token_map, dtype=np.int64)), persistent=False)
        self.register_buffer("primes", primes, persistent=False)
        flat = primes.flatten(1)
        self.register_buffer("offsets", (flat.cumsum(1) - flat).view_as(primes), persistent=False)
        multipliers = torch.from_numpy(np.array(config.engram_multipliers(), dtype=np.int64))
        self.register_buffer("multipliers", multipliers, persistent=False)  # [layers, max_ngram]
        self.pad = int(token_map[config.engram_pad_token_id])

    @torch.no_grad()
    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """tokens, start [B, T] (row position where the document begins) -> rows [layers, B*T, columns]."""
        if not len(self.primes):
            return tokens.new_zeros(0)
        ids, position = self.map[tokens], torch.arange(tokens.shape[1], device=tokens.device)
        layers = []
        for layer in range(len(self.primes)):
            mixed, columns = ids * self.multipliers[layer, 0], []
            for shift in range(1, self.max_ngram):
                past = F.pad(ids, (shift, 0), value=self.pad)[:, : ids.shape[1]]
                past = torch.where(position - shift >= start, past, self.pad)
                mixed = mixed ^ (past * self.multipliers[layer, shift])
                order = shift - 1
                columns.append(mixed[..., None] % self.primes[layer, order] + self.offsets[layer, order])
            layers.append(torch.cat(columns, -1).flatten(0, 1))
        return torch.stack(layers)


def engram_inject(x: Tensor, e: Tensor, wkv: Tensor, qw: Tensor, kw: Tensor, eps: float) -> Tensor:
    """Stream [N, H, D] and looked-up rows e [N, columns * width] -> stream plus gated value.

    wkv is [(H + 1) * D, columns * width]: H keys, then one value that the copies share.
    """
    n, h, d = x.shape
    kv = e @ wkv.t()
    key, value = kv[:, : h * d].view(n, h, d).float(), kv[:, h * d :].float()
    xf = x.float()
    rho = torch.rsqrt(xf.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (xf * (qw.float() * kw.float()) * key).sum(-1) * rho * d**-0.5  # [N, H]
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
    return (xf + gate[..., None] * value[:, None, :]).to(x.dtype)
