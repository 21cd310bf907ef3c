"""Training machinery on a model of a few thousand weights."""

import copy

import numpy as np
import pytest
import torch

from training import regions
from training.config import NanoConfig
from training.data import Mixer, Stream, next_targets
from training.marks import ANSWER, ANSWER_WEIGHT, SKIP
from training.model import Mode, NanoModel, document_start
from training.optim import Optimizer, balance_experts, orthogonalise, rate_factor
from training.sinkhorn import sinkhorn
from training.train import PHASES, Guard, mixing_bound

CONFIG = NanoConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, head_dim=32, qk_rope_head_dim=16,
    q_lora_rank=32, o_groups=2, o_lora_rank=32, moe_intermediate_size=32, n_routed_experts=4, sliding_window=8,
    max_position_embeddings=128,
    compress_ratios=[0, 2, 1, 1], kv_source_layer_ids=[1, 2], index_source_layer_ids=[1, 2, 3], index_n_heads=2,
    index_head_dim=32,
    index_topk=4, candidate_source_layer_id=2, candidate_topk_blocks=3, candidate_block_size=4, engram_layer_ids=[1],
    engram_vocab_size=50, engram_n_heads=2, engram_compressed_vocab_size=64,
)  # fmt: skip
CONFIG.engram_num_embeddings = [int(p.sum()) for p in CONFIG.engram_primes()]


@pytest.fixture
def model() -> NanoModel:
    torch.manual_seed(0)
    model = NanoModel(CONFIG, np.arange(64))
    model.initialise(0)
    return model


def batch(rows: int = 4, length: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = (torch.arange(length) * 7 + torch.arange(rows)[:, None] * 3) % 60 + 3
    tokens[:, 0] = 0
    return tokens, next_targets(tokens)


@pytest.mark.parametrize("mode", [Mode(), Mode(sparse=True), Mode(sparse=True, quant=True, teach_rows=16)])
def test_loss_falls(model: NanoModel, mode: Mode) -> None:
    optimizer, losses = Optimizer(model), []
    tokens, targets = batch()
    for _ in range(30):
        out = model(tokens, targets, mode)
        loss = out.nll.sum() / (targets >= 0).sum()
        (loss + 0.1 * out.index_loss).backward()
        optimizer.step(1.0)
        balance_experts(model, out.loads, 1e-3)
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_every_weight_learns(model: NanoModel) -> None:
    optimizer = Optimizer(model)
    tokens, targets = batch()
    for _ in range(2):  # output projections start at zero, so what lies behind them moves in the second step
        before = copy.deepcopy(model.state_dict())
        out = model(tokens, targets, Mode(sparse=True, teach_rows=32))
        (out.nll.sum() + out.index_loss).backward()
        optimizer.step(1.0)
    for name, value in model.named_parameters():
        assert not torch.equal(value, before[name]), name


def test_the_indexer_does_not_move_the_backbone(model: NanoModel) -> None:
    tokens, _ = batch()
    model(tokens, tokens, Mode(teach_rows=16)).index_loss.backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moved and all(name.startswith("idx_") for name in moved)


def test_documents_do_not_see_each_other(model: NanoModel) -> None:
    tokens, _ = batch(1, 64)
    tokens[0, 32] = 0
    for mode in (Mode(), Mode(sparse=True)):
        joined = model.logits(tokens, mode)[0, 32:]
        alone = model.logits(tokens[:, 32:], mode)[0]
        assert torch.allclose(joined, alone, atol=1e-4)


def test_later_tokens_change_nothing_before(model: NanoModel) -> None:
    tokens, _ = batch(1, 50)
    changed = tokens.clone()
    changed[0, 31:] = 9
    a, b = (model.logits(x, Mode(sparse=True))[0, :31] for x in (tokens, changed))
    assert torch.allclose(a, b, atol=1e-5)


def test_guard_takes_a_blown_up_model_back(model: NanoModel) -> None:
    guard = Guard(model, Optimizer(model))
    guard.losses = [torch.tensor(2.0)]
    assert not guard.check("a")
    good = model.embed.detach().clone()
    with torch.no_grad():
        model.embed.mul_(100)
    guard.losses = [torch.tensor(float("nan"))]
    assert guard.check("a") and guard.scale < 1
    assert torch.equal(model.embed, good)


def test_orthogonalise() -> None:
    singular = torch.linalg.svdvals(orthogonalise(torch.randn(3, 16, 40)))
    assert singular.min() > 0.5 and singular.max() < 1.4


def test_sinkhorn_is_doubly_stochastic() -> None:
    c = sinkhorn(torch.randn(10, 4, 4), 20, 1e-6)
    assert torch.allclose(c.sum(-1), torch.ones(10, 4), atol=1e-4) and torch.allclose(
        c.sum(-2), torch.ones(10, 4), atol=1e-4
    )


def test_schedule_and_phases() -> None:
    assert rate_factor(0.0) < rate_factor(0.1) == 1.0 > rate_factor(0.9) > rate_factor(1.0) > 0
    assert [p.until for p in PHASES] == sorted(p.until for p in PHASES) and PHASES[-1].until > 1


def test_mixer_keeps_shares_and_row_counts() -> None:
    device = torch.device("cpu")
    streams = {k: Stream(np.random.default_rng(1).integers(3, 60, 5000).astype(np.uint16), device) for k in ("a", "b")}
    streams["look64"] = Stream(np.full(640, 7, dtype=np.uint16), device, record=64)
    mixer, counts = Mixer(streams, device), {"a": 0, "b": 0, "look64": 0}
    for _ in range(50):
        made = mixer.batch({"a": 0.5, "b": 0.3, "look64": 0.2, "absent": 0.1}, 8, 64)
        assert made.tokens.shape == (8, 64)
        for kind in made.kinds:
            counts[kind] += 1
    assert abs(counts["a"] - 200) <= 1 and abs(counts["look64"] - 80) <= 1
    assert "look64" not in mixer.batch({"a": 0.5, "look64": 0.5}, 8, 32).kinds


def test_document_start() -> None:
    assert document_start(torch.tensor([[5, 0, 6, 7, 0, 8]])).tolist() == [[0, 1, 1, 1, 4, 4]]


def test_marks_become_weights() -> None:
    row = np.array([0, 5, 6 | SKIP, 7 | ANSWER, 8, 1, 2, 2], dtype=np.uint16)
    made = Mixer({"look8": Stream(row, torch.device("cpu"), record=8)}, torch.device("cpu")).batch({"look8": 1.0}, 1, 8)
    assert made.tokens.tolist() == [[0, 5, 6, 7, 8, 1, 2, 2]]
    assert made.targets.tolist() == [[5, -100, 7, 8, 1, -100, -100, -100]]
    assert made.weights.tolist() == [[1, 0, ANSWER_WEIGHT, 1, 1, 0, 0, 0]]


def test_aligned_rows_begin_at_a_document() -> None:
    data = np.random.default_rng(2).integers(3, 60, 6000).astype(np.uint16)
    data[::37] = 0
    stream = Stream(data, torch.device("cpu"), aligned=True)
    for _ in range(20):
        starts = stream.starts(8, 64)
        assert (data[starts] == 0).all() and (starts + 64 <= len(data)).all()


def test_mixing_bound_bounds_the_logits(model: NanoModel) -> None:
    logits = []
    original = regions.sinkhorn
    regions.sinkhorn = lambda x, *rest: logits.append(x) or original(x, *rest)
    try:
        model(batch()[0], None, Mode())
    finally:
        regions.sinkhorn = original
    assert 0 < max(x.abs().max().item() for x in logits) <= mixing_bound(model)
