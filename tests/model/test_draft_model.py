"""The draft model against independent engines, and against itself: alone, among others, in chunks, after rejections."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_runs import CASE, Drafts, draft_block, golden_model
from golden import golden_dir, relative_error
from golden_runs import expected, official, one_thread, only, prompts, traced  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tqdm import tqdm
from yoco import Bounds, cold_slot, draw_tokens, feed

from deepinfer.cache.storage import CacheStorage
from deepinfer.kernels import select
from deepinfer.kernels.weights import DenseWeight, PackedWeight
from deepinfer.model import Batch, Chunk, load_model
from deepinfer.model.backbone import DeepseekV41
from deepinfer.model.load import CheckpointSource
from deepinfer.model.numerics import Numerics
from deepinfer.model.presets import preset
from deepinfer.model.random_checkpoint import write_random_checkpoint
from deepinfer.model.weights import CheckpointError, CheckpointReader

LIMIT = 1e-4  # of the largest value, as for the text backbone
NAMES = ("p0", "p1")
TAPS = (3, 4, 6)  # before, at and after the last KV source of the tiny model, where steps narrow
DRAFTS = 5

by_kernels = pytest.mark.parametrize("kernels", ["reference", "picked"])
by_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drafts") / "checkpoint"
    config = dataclasses.replace(preset("tiny", drafts=True), dspark_target_layer_ids=TAPS)
    write_random_checkpoint(directory, config)
    return directory


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> DeepseekV41:
    return load_model(checkpoint, drafts=True)


def storage_for(model: DeepseekV41, drafts: int = DRAFTS) -> CacheStorage:
    return CacheStorage.for_model(model, max_num_seqs=4, num_blocks=24, drafts=drafts)


# Golden data


def cuts(length: int, size: int | None) -> list[int]:
    """Sizes of the pieces of a prompt; None = whole."""
    return [length] if size is None else [size] * (length // size) + ([length % size] if length % size else [])


def golden_drafts(network: DeepseekV41, names: Sequence[str], size: int | None) -> dict[str, Drafts]:
    """Blocks of every prompt behind its last token and behind each decode step, all prompts in the same steps as long
    as they last, anchors as recorded."""
    storage, want = CacheStorage.for_model(network, max_num_seqs=3, num_blocks=8, drafts=DRAFTS), expected(CASE)
    slots = {name: 2 - number for number, name in enumerate(names)}  # rows and slots differ
    left, blocks = {}, {name: list[Drafts]() for name in names}
    for number, name in enumerate(names):
        prompt = prompts(CASE)[name]["ids"]
        cold_slot(storage, slots[name], 128, 1 + number)
        pieces = [*cuts(len(prompt), size), *[1] * 16]
        tokens = torch.tensor(prompt + want[f"{name}.decode_ids"].tolist())
        left[name] = [piece.tolist() for piece in tokens.split(pieces)]
    while any(left.values()):
        now = [name for name in names if left[name]]
        chunks = [Chunk(slots[n], storage.length(slots[n]), left[n].pop(0)) for n in now]
        network.forward(chunks, storage)
        drafting = [name for name in now if len(left[name]) <= 16]  # the prompt is written
        if drafting:
            anchors = [int(want[f"{name}.draft_ids"][len(blocks[name]), 0]) for name in drafting]
            drawn = draft_block(network, storage, [slots[name] for name in drafting], anchors)
            for name, block in zip(drafting, drawn, strict=True):
                blocks[name].append(block)
    return {name: Drafts.stack(blocks[name]) for name in names}


def assert_as_recorded(got: Drafts, name: str) -> None:
    want = expected(CASE)
    assert torch.equal(got.ids, want[f"{name}.draft_ids"].long())
    assert relative_error(got.logits, want[f"{name}.draft_logits"]) < LIMIT
    assert relative_error(got.confidence, want[f"{name}.draft_confidence"]) < LIMIT


@by_kernels
@by_name
@pytest.mark.parametrize("size", [None, 4, 1], ids=["whole", "in_chunks", "token_by_token"])
def test_drafts_logits_and_confidences_after_the_prompt_and_every_decode_step(name, size, kernels):
    with only(kernels):
        assert_as_recorded(golden_drafts(golden_model("float32", kernels), [name], size)[name], name)


@by_kernels
@pytest.mark.parametrize("size", [None, 3], ids=["whole", "in_chunks"])
def test_prompts_of_different_lengths_draft_together(size, kernels):
    with only(kernels):
        for name, got in golden_drafts(golden_model("float32", kernels), NAMES, size).items():
            assert_as_recorded(got, name)


@by_name
def test_weights_kept_in_their_stored_form_draft_the_same(name):
    network = load_model(golden_dir() / CASE, weights="stored", drafts=True)
    assert_as_recorded(golden_drafts(network, [name], None)[name], name)


@by_kernels
@by_name
@pytest.mark.parametrize("size", [None, 1], ids=["whole", "token_by_token"])
def test_main_hidden_of_all_rows_that_a_draft_can_see(name, size, kernels):
    network = golden_model("float32", kernels)
    with only(kernels), traced(network) as trace:
        golden_drafts(network, [name], size)
    want, got = expected(CASE)[f"{name}.main_hidden"], torch.cat(trace["main_hidden"])
    length, ring = len(prompts(CASE)[name]["ids"]), network.config.sliding_window + 1 + DRAFTS
    assert len(got) == (len(want) if size else min(length, ring) + 16)
    assert relative_error(got, want[-len(got) :]) < LIMIT


# Official numerics


def blocks_fed_with_recorded_taps(name: str) -> tuple[Drafts, dict[str, Tensor]]:
    """The draft model alone: what the backbone hands over comes from the recording, the anchors as well."""
    network, want = golden_model("bfloat16"), official(CASE)
    assert network.draft is not None
    storage, length = storage_for(network), len(prompts(CASE)[name]["ids"])
    cold_slot(storage, 1, 128)
    main_hidden, blocks = want[f"{name}.main_hidden"], list[Drafts]()
    for start, end in [(0, length), *((length + i, length + i + 1) for i in range(16))]:
        view = storage.begin(Batch.from_chunks([Chunk(1, start, [3] * (end - start))], network.device))
        rows, context = view.draft_context()
        taps = main_hidden[start:end]
        network.draft.write_context(taps if rows is None else taps[rows], context)
        view.commit()
        if start:
            blocks += draft_block(network, storage, [1], [int(want[f"{name}.draft_ids"][len(blocks), 0])])
    return Drafts.stack(blocks), part_of_blocks(want, name)


def part_of_blocks(want: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: want[f"{name}.draft_{key}"] for key in ("ids", "logits", "confidence")}


@by_name
def test_official_numerics_fed_with_the_recorded_hidden_states_draft_as_recorded(name):
    """Measured: every logit equal to the last bit on one processor; on another, which adds a product's terms in another
    order, one row of 160 crosses a rounding edge and moves by 1.5e-3. 1e-3: the recording's own limit for rows that
    nothing moved."""
    got, want = blocks_fed_with_recorded_taps(name)
    assert torch.equal(got.ids, want["ids"].long())
    moved = (got.logits - want["logits"]).abs().amax(2) / want["logits"].abs().amax(2)  # [blocks, rows]
    assert (moved <= 1e-3).float().mean() >= 0.95 and moved.max() <= 1e-2
    assert relative_error(got.confidence, want["confidence"]) < 1e-3


def test_a_quarter_of_the_official_blocks_stay_end_to_end():
    """As for the text backbone: noise moves rows of these random networks. Measured: 62 %."""
    kept = []
    for name in NAMES:
        network, want = golden_model("bfloat16"), official(CASE)
        storage, ids = storage_for(network), prompts(CASE)[name]["ids"]
        cold_slot(storage, 1, 128)
        network.forward([Chunk(1, 0, ids)], storage)
        for i, token in enumerate(want[f"{name}.decode_ids"].tolist()):
            network.forward([Chunk(1, len(ids) + i, [token])], storage)
            (got,) = draft_block(network, storage, [1], [int(want[f"{name}.draft_ids"][i, 0])])
            logits = want[f"{name}.draft_logits"][i]
            kept.append((got.logits - logits).abs().amax(1) <= 1e-3 * logits.abs().amax(1))
    assert torch.cat(kept).float().mean() > 0.25


# Alone, among others, in chunks


def drafted(
    model: DeepseekV41, length: int, ends: Sequence[int] = (), mates: bool = False, keep_from: int = 0
) -> Drafts:
    """The block behind `length` tokens that were fed in chunks ending at `ends`."""
    storage = storage_for(model)
    cold_slot(storage, 1, length + 8)
    others: list[Chunk] = []
    if mates:
        cold_slot(storage, 0, 400, first_block=9)
        far = draw_tokens(2, 400)
        others = [Chunk(0, 0, far[:37]), Chunk(0, 37, far[37:38]), Chunk(0, 38, far[38:120], 0)]
    feed(model, storage, 1, draw_tokens(1, 400)[:length], ends, mates=others, bounds=Bounds(keep_from=keep_from))
    if not mates:
        return draft_block(model, storage, [1], [7])[0]
    return draft_block(model, storage, [0, 1], [9, 7])[1]


def same_drafts(model: DeepseekV41, got: Drafts, want: Drafts) -> None:
    """Bit for bit where the CPU kernels run."""
    if select.cpu_twins(model.device, model.numerics.dtype):
        assert got.equal(want)
    else:
        assert torch.equal(got.ids, want.ids)
        assert (got.logits - want.logits).abs().max() <= 1e-5 * want.logits.abs().max()


@settings(max_examples=20, deadline=None)
@given(
    length=st.integers(1, 200),
    ends=st.lists(st.integers(1, 200), max_size=6),
    near=st.lists(st.integers(-30, 0), max_size=3),
    mates=st.booleans(),
)
def test_chunk_cuts_and_batch_mates_do_not_change_a_draft(model, length, ends, near, mates):
    got = drafted(model, length, [*ends, *(length + offset for offset in near)], mates)
    same_drafts(model, got, drafted(model, length))


@pytest.mark.parametrize("length", [15, 16, 17, 21, 22, 23, 100])  # around the window and the ring
def test_prompts_fed_token_by_token_draft_the_same(model, length):
    same_drafts(model, drafted(model, length, range(length)), drafted(model, length))


@pytest.mark.parametrize("length", [28, 29, 60, 150])
@pytest.mark.parametrize("ends", [(), (20,), (100,), (119, 125), (148,)])
@pytest.mark.parametrize("mates", [False, True])
def test_taps_before_at_and_after_the_narrowing_layer_are_those_of_the_kept_rows(model, length, ends, mates):
    """28 kept rows: the window of 16 and two verify steps."""
    keep_from, seen = length - 28, list[tuple[Tensor, ...]]()
    with traced(model) as trace:
        got = drafted(model, length, ends, keep_from=keep_from)
    for name in (f"layers.{layer}.stream_in" for layer in TAPS):
        seen.append(tuple(trace[name]))
    last, before = trace["main_hidden"][-1], seen[0][-1]
    assert len(last) == min(len(before), 22, 28)
    taps = [streams[-1][-len(last) :].mean(1) for streams in seen]  # each cut by itself to the newest rows
    assert torch.equal(last, torch.cat(taps, 1))
    same_drafts(model, drafted(model, length, ends, mates, keep_from), got)


def test_a_chunk_of_which_no_row_is_kept_leaves_the_draft_windows_alone(model):
    storage = storage_for(model)
    cold_slot(storage, 1, 300)
    before = storage.windows.pool[model.config.num_hidden_layers :, : storage.windows.staging].clone()
    model.forward([Chunk(1, 0, draw_tokens(1, 100), 0, keep_from=272)], storage)
    assert torch.equal(storage.windows.pool[model.config.num_hidden_layers :, : storage.windows.staging], before)
    assert storage.length(1) == 100


# Rejected drafts


def draft_rows(storage: CacheStorage, slot: int) -> Tensor:
    """What the draft layers show of a slot: [stages, rows, D]."""
    seen = storage.begin_drafts(np.array([slot]), DRAFTS).indices[0, : storage.config.sliding_window]
    return storage.windows.pool[storage.config.num_hidden_layers :, seen[seen >= 0]]


@pytest.mark.parametrize("accepted", [(0,) * 6, (5,) * 6, (0, 3, 5, 1, 0, 4)])
def test_rejected_rows_leave_nothing_in_the_draft_windows(model, accepted):
    """Verify steps of six rows of which 1 + `accepted` stay, against a sequence that never saw the others."""
    prompt, rest = draw_tokens(1, 130), draw_tokens(5, 60)
    storage, clean = storage_for(model), storage_for(model)
    for store in (storage, clean):
        cold_slot(store, 1, 250)
        feed(model, store, 1, prompt)
    for count in accepted:
        n = storage.length(1)
        right = rest[n - 130 : n - 130 + 1 + count]
        wrong = [300 + n % 50] * (DRAFTS - count)
        model.forward([Chunk(1, n, [*right, *wrong], 6)], storage)
        storage.truncate(np.array([1]), np.array([n + 1 + count]))
        for token in right:
            model.forward([Chunk(1, clean.length(1), [token])], clean)
        assert storage.length(1) == clean.length(1)
        got, want = draft_block(model, storage, [1], [11])[0], draft_block(model, clean, [1], [11])[0]
        same_drafts(model, got, want)
        if select.cpu_twins(model.device, model.numerics.dtype):
            assert torch.equal(draft_rows(storage, 1), draft_rows(clean, 1))


def test_a_block_pass_writes_nothing_that_a_later_one_or_a_step_reads(model):
    storage = storage_for(model)
    cold_slot(storage, 1, 100)
    feed(model, storage, 1, draw_tokens(1, 40))
    rings = storage.windows.pool[:, : storage.windows.staging].clone()
    first = draft_block(model, storage, [1], [11])[0]
    other = draft_block(model, storage, [1], [12])[0]
    assert torch.equal(storage.windows.pool[:, : storage.windows.staging], rings)
    assert draft_block(model, storage, [1], [11])[0].equal(first)
    assert not torch.equal(other.logits, first.logits)


# Loading


def test_drafts_change_no_logit_of_the_backbone(checkpoint, model):
    plain = load_model(checkpoint)
    assert plain.draft is None
    got = []
    for network, drafts in ((model, DRAFTS), (model, 0), (plain, DRAFTS), (plain, 0)):
        storage = storage_for(network, drafts)
        cold_slot(storage, 1, 100)
        got.append(feed(network, storage, 1, draw_tokens(1, 90), [30, 31], num_logits=50))
    assert all(torch.equal(logits, got[0]) for logits in got)


class Recorder(CheckpointReader):
    """Remembers what was read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read_names: list[str] = []

    def read(self, name: str) -> Tensor:
        self.read_names.append(name)
        return super().read(name)


@pytest.mark.parametrize("vision", [False, True])
def test_every_draft_tensor_is_read_exactly_once(tmp_path, vision):
    write_random_checkpoint(tmp_path / "m", preset("tiny", drafts=True, vision=vision, layers=5))
    with Recorder(tmp_path / "m") as reader:
        source = CheckpointSource(reader, "wide", torch.device("cpu"), tqdm(disable=True))
        DeepseekV41(reader.config, source, Numerics.named("float32"), tmp_path / "m" / "tokenizer.json", drafts=True)
        wanted = [name for name in reader.names() if name.startswith("mtp.")]
        assert wanted and sorted(name for name in reader.read_names if name.startswith("mtp.")) == sorted(wanted)


def test_a_checkpoint_without_draft_stages_is_refused_when_drafts_are_asked_for(tiny_checkpoint):
    with pytest.raises(CheckpointError, match=r"has no draft stages \(num_nextn_predict_layers is 0\).*drafts=False"):
        load_model(tiny_checkpoint, drafts=True)


def test_markov_matrices_stay_exact_and_embedding_and_head_are_the_backbones(checkpoint, model):
    draft, last = model.draft, f"mtp.{model.config.num_drafts - 1}.markov_head"
    with CheckpointReader(checkpoint) as reader:
        embed, head = reader.read(f"{last}.embed.weight"), reader.read(f"{last}.head.weight")
    assert isinstance(draft.markov_head, DenseWeight | PackedWeight)
    assert torch.equal(draft.markov_head.dense(), head.float())
    bias, embedding = draft.markov(torch.tensor([5, 400]))
    assert torch.equal(embedding, embed[[5, 400]].float())
    assert relative_error(bias, embedding @ head.float().t()) < 1e-5
    assert draft.embed is model.embed and draft.head is model.head


@pytest.mark.parametrize(("layers", "taps"), [(8, (5, 6, 7)), (5, (2, 3, 4)), (2, (0, 1)), (1, (0,))])
def test_presets_of_any_depth_draft_from_their_last_layers(tmp_path, layers, taps):
    config = preset("tiny", layers=layers, drafts=True)
    assert config.dspark_target_layer_ids == taps
    write_random_checkpoint(tmp_path / "m", config)
    network = load_model(tmp_path / "m", drafts=True)
    storage = storage_for(network)
    cold_slot(storage, 0, 40)
    feed(network, storage, 0, draw_tokens(1, 30))
    (got,) = draft_block(network, storage, [0], [5])
    assert got.logits.isfinite().all() and got.logits.std() > 0.1 and got.confidence.isfinite().all()
