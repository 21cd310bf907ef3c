"""The chain that draws greedy drafts: what a draft block cannot know, the token before, is added draft by draft."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.argmax import argmax
from deepinfer.kernels.reference.linear import linear


def markov_chain(anchors: Tensor, embed: Tensor, head: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """k drafts one after the other: each the largest of its logits plus embed[token before it] @ head^T.

    anchors int64 [R], embed [V, rank], head float32 [V, rank], logits float32 [R, k, V] -> drafts int64 [R, k], and the
    embeddings of the tokens before them, float32 [R, k, rank]. The first of equal values is the largest; a NaN counts
    as larger than any number.
    """
    drafts, embeddings = [anchors], []
    for own in logits.unbind(1):
        embeddings.append(F.embedding(drafts[-1], embed).float())
        drafts.append(argmax(own + linear(embeddings[-1], head)))
    return torch.stack(drafts[1:], 1), torch.stack(embeddings, 1)
