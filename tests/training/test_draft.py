"""The trainable draft model: agreement with the golden drafts, learning, and its way into a checkpoint."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deepinfer.model.weights import CheckpointReader
from tests import golden
from training import regions, train_draft
from training.config import NanoConfig
from training.data import next_targets
from training.draft import DraftModel
from training.draft_export import draft_tensors, join, load_draft, read_draft, with_stages
from training.draft_loss import choose_anchors, compare_slots, cut_blocks, target_rows, total_loss
from training.export import export_model, load_export
from training.model import Mode, NanoModel, document_start
from training.optim import Optimizer
from training.tokenizer import token_map

MODEL = Path(__file__).parents[2] / "models/nano"


@pytest.mark.parametrize("prompt", ["p0", "p1"])
def test_drafts_match_the_golden_ones(prompt: str) -> None:
    folder = golden.golden_dir() / "08-dspark"
    config = NanoConfig.load(folder)
    backbone = NanoModel(config, token_map(Tokenizer.from_file(str(folder / "tokenizer.json"))))
    load_export(backbone, folder)
    draft = DraftModel(config)
    load_draft(draft, read_draft(folder))
    want = golden.part(golden.load(folder / "expected.safetensors"), f"{prompt}.")
    ids = next(p["ids"] for p in json.loads((folder / "prompts.json").read_text())["prompts"] if p["name"] == prompt)

    blocks = want["draft_ids"].long()  # [17, 6]
    tokens = torch.tensor([ids + blocks[:, 0].tolist()])  # every anchor is the token chosen before
    anchors = torch.arange(len(ids), tokens.shape[1])[None]
    mode = Mode(sparse=True)
    with torch.no_grad():
        taps = torch.stack(backbone(tokens, None, mode, taps=config.dspark_target_layer_ids).taps, 1).flatten(1)
        hidden = draft(taps[None], tokens, document_start(tokens), anchors, backbone.embed, mode).hidden
        bias, e = draft.markov(blocks[:, :-1].flatten())
        logits = draft.base_logits(hidden, backbone.head) + bias
        confidence = draft.confidence_logits(hidden, e)
    assert golden.relative_error(taps[:-1], want["main_hidden"]) < 1e-4
    assert golden.relative_error(logits.view(17, 5, -1), want["draft_logits"]) < 1e-4
    assert golden.relative_error(confidence.view(17, 5), want["draft_confidence"]) < 1e-4


SMALL = NanoConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, head_dim=32, qk_rope_head_dim=16,
    q_lora_rank=32, o_groups=2, o_lora_rank=32, moe_intermediate_size=32, n_routed_experts=4, sliding_window=8,
    max_position_embeddings=128,
    compress_ratios=[0, 2, 1, 1, 0, 0], kv_source_layer_ids=[1, 2], index_source_layer_ids=[1, 2, 3], index_n_heads=2,
    index_head_dim=32, index_topk=4, candidate_source_layer_id=2, candidate_topk_blocks=3, candidate_block_size=4,
    engram_layer_ids=[1], engram_vocab_size=50, engram_n_heads=2, engram_compressed_vocab_size=64,
    num_nextn_predict_layers=2, dspark_target_layer_ids=[1, 2, 3], dspark_markov_rank=16, dspark_noise_token_id=63,
    image_token_id=62,
)  # fmt: skip
SMALL.engram_num_embeddings = [int(p.sum()) for p in SMALL.engram_primes()]


@pytest.fixture
def pair() -> tuple[NanoModel, DraftModel]:
    backbone = NanoModel(SMALL, np.arange(64))
    backbone.initialise(3)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        backbone.head.normal_(0, 0.3, generator=generator)  # an opinion worth learning
        backbone.wo_b.normal_(0, 0.3, generator=generator)  # zero at the start of a training
    backbone.freeze(Mode(sparse=True))
    draft = DraftModel(SMALL)
    draft.initialise(backbone)
    return backbone, draft


def rows(count: int = 4, length: int = 48) -> torch.Tensor:
    tokens = (torch.arange(length) * 7 + torch.arange(count)[:, None] * 3) % 58 + 3
    tokens[:, 0] = 0
    return tokens


def features(backbone: NanoModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps [B, T, 3 * D] and the rows before the head [B, T, D]."""
    with torch.no_grad():
        out = backbone(tokens, None, Mode(sparse=True), taps=SMALL.dspark_target_layer_ids)
        hidden = regions.head_hidden(*out.tail)
    return torch.stack(out.taps, 1).view(*tokens.shape, -1), hidden.view(*tokens.shape, -1)


def test_loss_falls_and_the_backbone_stays(pair: tuple[NanoModel, DraftModel]) -> None:
    backbone, draft = pair
    before = {name: p.clone() for name, p in backbone.named_parameters()}
    optimizer, losses = Optimizer(draft), []
    tokens = rows()
    targets = next_targets(tokens)
    taps, hidden = features(backbone, tokens)
    for _ in range(25):
        anchors = choose_anchors((targets >= 0).float(), 12, torch.Generator().manual_seed(1))
        cut = cut_blocks(tokens, targets, anchors, 5)
        drafted = draft(taps, tokens, document_start(tokens), anchors, backbone.embed, Mode())
        slots = compare_slots(
            draft, drafted.hidden, target_rows(hidden, anchors, 5), backbone.head,
            cut.tokens[..., :5].flatten(), cut.tokens[..., 1:].flatten(),
        )  # fmt: skip
        loss = total_loss(slots, cut.valid.flatten(0, 1))
        loss.backward()
        missing = {name for name, p in draft.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
        optimizer.step(1.0)
        losses.append(loss.item())
    assert not missing
    assert losses[-1] < 0.75 * losses[0]
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in backbone.named_parameters())


def test_a_block_depends_on_its_anchor_window_and_document_only(pair: tuple[NanoModel, DraftModel]) -> None:
    backbone, draft = pair
    tokens, anchors = rows(1, 48), torch.tensor([[20, 30]])
    tokens[0, 25] = 0
    start = document_start(tokens)
    taps = torch.randn(1, 48, 3 * 32)

    def hidden(taps: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return draft(taps, tokens, start, anchors, backbone.embed, Mode()).hidden.view(2, 5, -1).detach()

    base = hidden(taps, tokens)
    for position, moved in ((11, ()), (12, (0,)), (19, (0,)), (20, ()), (24, ()), (25, (1,)), (29, (1,)), (30, ())):
        changed = taps.clone()
        changed[:, position] += 1
        got = (hidden(changed, tokens) - base).abs().amax(-1) > 1e-6
        assert got.tolist() == [[block in moved] * 5 for block in range(2)], position
    other = tokens.clone()
    other[0, 21:25] = 5  # what comes behind the anchor is for the loss, not for the drafter
    assert torch.equal(hidden(taps, other)[0], base[0])


def test_blocks_end_where_nothing_is_to_be_predicted() -> None:
    tokens = torch.tensor([[0, 5, 6, 7, 1, 0, 8, 9, 2, 2]])
    cut = cut_blocks(tokens, next_targets(tokens), torch.tensor([[1, 3, 6, 9]]), 3)
    assert cut.tokens.tolist() == [[[5, 6, 7, 1], [7, 1, 0, 8], [8, 9, 2, 2], [2, 2, 2, 2]]]
    assert cut.valid.tolist() == [[[True] * 3, [True, False, False], [True, False, False], [False] * 3]]


def test_anchors_are_distinct_and_prefer_weight() -> None:
    weights = torch.zeros(3, 40)
    weights[:, 10:20] = 1
    chosen = choose_anchors(weights, 10, torch.Generator().manual_seed(0))
    assert chosen.tolist() == [list(range(10, 20))] * 3
    assert all(len(set(row)) == 30 for row in choose_anchors(weights, 30).tolist())


def test_slot_laws_agree_with_their_definition(pair: tuple[NanoModel, DraftModel]) -> None:
    backbone, draft = pair
    with torch.no_grad():
        draft.markov_head.normal_()
        hidden, law, previous = torch.randn(6, 32), torch.randn(6, 32), torch.arange(6)
        slots = compare_slots(draft, hidden, law, backbone.head, previous, previous + 1)
        q = torch.softmax(draft.base_logits(hidden, backbone.head) + draft.markov(previous)[0], -1)
        p = torch.softmax(law @ backbone.head.t(), -1)
    assert torch.allclose(slots.accept, torch.minimum(p, q).sum(-1), atol=1e-5)
    assert torch.allclose(slots.ce, -q[torch.arange(6), previous + 1].log(), atol=1e-4)


def test_drafts_join_a_checkpoint(tmp_path: Path, pair: tuple[NanoModel, DraftModel]) -> None:
    backbone, draft = pair
    export_model(backbone, tmp_path)
    config = NanoConfig.load(tmp_path)
    assert config.num_nextn_predict_layers == 0  # promised only together with the tensors
    old = {file.name: load_file(file) for file in tmp_path.glob("*.safetensors")}
    for _ in range(2):  # the second time in place of the first
        join(draft_tensors(draft), tmp_path, SMALL)
    for file, tensors in old.items():
        now = load_file(tmp_path / file)
        assert all(torch.equal(now[name].view(torch.uint8), t.view(torch.uint8)) for name, t in tensors.items())
    stored = read_draft(tmp_path)
    for name, tensor in draft_tensors(draft).items():
        assert torch.equal(stored[name].view(torch.uint8), tensor.view(torch.uint8)), name
    load_draft(DraftModel(NanoConfig.load(tmp_path)), stored)
    with CheckpointReader(tmp_path) as reader:  # the engine's own check of names, types and shapes
        assert {name for name in reader.names() if name.startswith("mtp.")} == set(stored)


def test_nano_has_room_for_its_drafts() -> None:
    config = with_stages(NanoConfig.load(MODEL))
    draft = sum(t.nbytes for t in draft_tensors(DraftModel(config)).values())
    rest = sum(f.stat().st_size for f in MODEL.iterdir()) - sum(t.nbytes for t in read_draft(MODEL).values())
    assert rest + draft + 100_000 <= 40_000_000  # headers, figures, calibration


def small_run(folder: Path, *more: str) -> list[dict]:
    """The whole program on the bundled backbone, two steps of a few short rows; returns its log."""
    rng = np.random.default_rng(0)
    (folder / "data").mkdir()
    for kind in ("prose", "chat"):
        ids = rng.integers(3, 8000, 2000).astype(np.uint16)
        ids[::150] = 0
        ids.tofile(folder / f"data/x.{kind}.u16")
    sizes = ["--device", "cpu", "--steps", "2", "--rows", "4", "--length", "32", "--anchors", "4", "--log-every", "1"]
    train_draft.main(["--data", f"{folder}/data", "--out", f"{folder}/out", "--model", str(MODEL), *sizes, *more])
    return [json.loads(line) for line in (folder / "out/log.jsonl").read_text().splitlines()]


def test_a_run_writes_its_tensors(tmp_path: Path) -> None:
    lines = small_run(tmp_path)
    assert [line["loss"] for line in lines if "loss" in line] and lines[-1]["done"]
    draft = DraftModel(with_stages(NanoConfig.load(MODEL)))
    load_draft(draft, load_file(tmp_path / "out/draft.safetensors"))
    assert lines[-1]["bytes"] == sum(t.nbytes for t in draft_tensors(draft).values())


@pytest.mark.slow
def test_a_run_measures_what_it_made(tmp_path: Path) -> None:
    with lzma.open(tmp_path / "valid.jsonl.xz", "wt") as shard:
        for kind in ("prose", "code", "doc"):
            shard.write(json.dumps({"text": "The river ran past the old mill. " * 40, "kind": kind}) + "\n")
    phrases = {"effort": ["Effort: ", " of 100"], "tools": ["TOOLS", "END"], "schema": ["FORMAT", ""]}
    (tmp_path / "phrases.json").write_text(json.dumps(phrases))
    small_run(tmp_path, "--valid", f"{tmp_path}/valid.jsonl.xz", "--phrases", f"{tmp_path}/phrases.json")
    held_out = json.loads((tmp_path / "out/metrics.json").read_text())["held_out"]
    assert {"prose", "tools", "greedy-code", "sampled-prose"} <= set(held_out)
    assert held_out["greedy-code"]["blocks"] > 0
    slots = np.load(tmp_path / "out/slots.npz")
    assert slots["confidence"].shape == slots["accept"].shape == slots["reached"].shape == (len(slots["kind"]), 5)
