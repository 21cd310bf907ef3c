"""One step three ways on the GPU: as the host plans it, padded launch by launch, and as a graph: the same bits; and the
GPU kernels beside plain PyTorch in bfloat16 on the same device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_device import DEVICE, free_gpu, on_gpu, twins_alone
from nano_engine import NANO, TEXTS, kv_format, model
from torch import Tensor

from deepinfer.cache.edits import OpenSlot, SetTable
from deepinfer.cache.storage import CacheStorage
from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.engine.graphs import GraphedModel, PaddedStep
from deepinfer.kernels import select
from deepinfer.model import Batch, Chunk, load_model
from deepinfer.model.backbone import DeepseekV41

LONGEST = 400
PREFILLED = (130, 31, 256)
STEPS = ((1, 1, 1), (6, 1, 3), (2, 6, 6), (1, 0, 6), (1, 1, 1), (0, 2, 0))


def storage_of(network: DeepseekV41, form: str | None = None, sequences: int = 3) -> CacheStorage:
    storage = CacheStorage.for_model(
        network, max_num_seqs=sequences, num_blocks=12, kv_format=form or kv_format(), drafts=5, padded_rows=600
    )
    for slot in range(sequences):
        storage.apply([OpenSlot(slot), SetTable(slot, 0, tuple(range(1 + 4 * slot, 5 + 4 * slot)))])
    return storage


def text_ids() -> list[int]:
    ids = Tokenizer.from_directory(NANO).encode_prompt(" ".join(TEXTS) * 4, add_bos=True)
    assert len(ids) > 300
    return ids[:300]


def random_ids() -> list[int]:
    return torch.randint(3, 400, (300,), generator=torch.Generator().manual_seed(1)).tolist()


def step_of(ids: list[int], lengths: list[int], sizes: tuple[int, ...]) -> Batch:
    chunks = [Chunk(i, lengths[i], ids[lengths[i] : lengths[i] + n], n) for i, n in enumerate(sizes) if n]
    return Batch.from_chunks(chunks, DEVICE)


def prefill(network: DeepseekV41, storage: CacheStorage, ids: list[int]) -> None:
    network.forward(Batch.from_chunks([Chunk(i, 0, ids[:n], 0) for i, n in enumerate(PREFILLED)], DEVICE), storage)


def kept(storage: CacheStorage) -> list[Tensor]:
    """All that three sequences have left in the cache."""
    blocks = [pool[1:13].clone() for records in storage.records.values() for pool in records.blocks()]
    return [*(storage.window_rows(slot) for slot in range(3)), *blocks]


class TestPadding:
    pytestmark = twins_alone

    @pytest.mark.parametrize("checkpoint", ["nano", "tiny"])
    def test_planned_padded_and_graphed_steps_give_the_same_bits(self, checkpoint: str, request) -> None:
        """Also in what they leave in the cache; steps of one row each, of drafts, and with sequences that wait."""
        if checkpoint == "nano":
            network, ids = model(), text_ids()
        else:
            folder = request.getfixturevalue("draft_checkpoint")
            network, ids = load_model(folder, device="cuda", dtype="bfloat16", drafts=True), random_ids()
        with torch.inference_mode():
            planned, eager, graphed = (storage_of(network) for _ in range(3))
            graphs = GraphedModel(network, graphed, rows=18, longest=LONGEST)
            graphs.capture()
            for storage in (planned, eager, graphed):
                prefill(network, storage, ids)
            lengths = list(PREFILLED)
            for sizes in STEPS:
                batch = step_of(ids, lengths, sizes)
                chosen = graphs.step_for(batch.num_rows, sum(n > 0 for n in sizes))
                assert chosen is not None
                step = PaddedStep(network, eager, chosen.rows.rows, LONGEST, chosen.rows.chunks)
                one = network.forward(batch, planned).clone()
                two = step.run(step_of(ids, lengths, sizes)).clone()
                three = graphs.forward(step_of(ids, lengths, sizes), graphed).clone()
                assert torch.equal(two, three), f"padded and graphed steps of {sizes}"
                assert torch.equal(one, two), f"planned and padded steps of {sizes}"
                lengths = [length + n for length, n in zip(lengths, sizes, strict=True)]
            for a, b, c in zip(kept(planned), kept(eager), kept(graphed), strict=True):
                assert torch.equal(b, c)
                assert torch.equal(a, b)
        free_gpu()


def all_logits(network: DeepseekV41, ids: list[int], form: str) -> Tensor:
    storage = storage_of(network, form, sequences=1)
    return network.forward(Batch.from_chunks([Chunk(0, 0, ids, len(ids))], DEVICE), storage).float().cpu()


def row_errors(got: Tensor, plain: Tensor) -> Tensor:
    return (got - plain).abs().amax(1) / plain.abs().amax(1)


class TestPlainPyTorch:
    pytestmark = on_gpu

    def test_nano_on_text_is_as_good_as_in_plain_pytorch(self) -> None:
        """A trained network is not thrown off by a value on the other side of a rounding edge. Measured on an H200, and
        allowed: the loss differs by 0.0004 nats a token (0.01; all of bfloat16 and FP4 cost 0.02 against float32), 99 %
        of the rows have the same best token (95 %), 79 % stay within 5 % of their largest logit (60 %)."""
        ids = text_ids()
        with torch.inference_mode():
            got = all_logits(model(), ids, kv_format())
            plain_model = load_model(NANO, device=DEVICE.type, dtype="bfloat16", weights="stored", drafts=True)
            with select.reference_only():
                plain = all_logits(plain_model, ids, "packed")
        targets = torch.tensor(ids[1:])
        losses = [torch.nn.functional.cross_entropy(one[:-1], targets).item() for one in (got, plain)]
        errors, same = row_errors(got, plain), (got.argmax(1) == plain.argmax(1)).float().mean()
        shares = [round(float((errors <= limit).float().mean()), 3) for limit in (1e-3, 1e-2, 3e-2, 5e-2, 1e-1)]
        print(f"\nnano: losses {losses}, rows {shares}, worst {errors.max():.3f}, same best {same:.3f}")
        assert abs(losses[0] - losses[1]) <= 0.01
        assert same >= 0.95
        assert (errors <= 0.05).float().mean() >= 0.6

    def test_a_random_network_is_that_of_plain_pytorch(self, draft_checkpoint: Path) -> None:
        """Random experts flip at every edge, so two correct roundings are as far apart as a rounded network and an
        exact one: in the median 0.195 of a row's largest logit was measured between the GPU kernels and plain PyTorch,
        0.201 between plain bfloat16 and float32; 72 and 73 % of the rows keep their best token. A quarter more is the
        limit. Rows of other tokens are 1.3 apart, none less than 0.78, and 1 % share the best token."""
        ids = random_ids()
        with torch.inference_mode():
            fast = load_model(draft_checkpoint, device=DEVICE.type, dtype="bfloat16", drafts=True)
            got = all_logits(fast, ids, kv_format())
            stored = load_model(draft_checkpoint, device=DEVICE.type, dtype="bfloat16", weights="stored", drafts=True)
            exact = load_model(draft_checkpoint, device=DEVICE.type, dtype="float32", weights="stored", drafts=True)
            with select.reference_only():
                plain, unrounded = all_logits(stored, ids, "packed"), all_logits(exact, ids, "float32")
        errors, rounding = row_errors(got, plain), row_errors(plain, unrounded)
        same = (got.argmax(1) == plain.argmax(1)).float().mean()
        kept = (plain.argmax(1) == unrounded.argmax(1)).float().mean()
        print(f"\ntiny: median {errors.median():.3f} of {rounding.median():.3f}, same best {same:.3f} of {kept:.3f}")
        assert errors.median() <= 1.25 * rounding.median()
        assert errors.max() <= 0.6
        assert same >= kept - 0.1
