"""A rank of a small model on a CPU: it does the steps that it says, and what it tells can be published."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

from deepinfer.bench.rank_memory import check_memory, rank_memory
from deepinfer.bench.rank_share import Rank, RankShare
from deepinfer.bench.rank_share_run import accepted_rates
from deepinfer.cli import main

CPU = torch.device("cpu")
SMALL = {"preset": "tiny", "ep": 2, "layers": 5, "sequences": 3, "context": 100, "steps": 2, "dtype": "float32"}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rank") / "rank.json"
    asked = ["--preset", "tiny", "--rank-share", "ep=2", "--layers", "5", "--seqs", "3", "--context", "100"]
    asked += ["--prefill-chunk", "150", "--steps", "2", "--device", "cpu", "--dtype", "float32"]
    with redirect_stderr(io.StringIO()) as said:
        main_or_exit(["bench", *asked, "--json", str(file)])
    file.with_suffix(".log").write_text(said.getvalue())
    return file


def main_or_exit(arguments: list[str]) -> None:
    try:
        main(arguments)
    except SystemExit as left:
        assert left.code == 0


def test_what_is_told(result: Path) -> None:
    told = json.loads(result.read_text())
    assert told["experts"] == 8 and told["layers"] == 5
    decode = told["decode"]
    assert decode["rows"] == 3 * 6, "all drafts are verified"
    assert decode["floor_ms"] == pytest.approx(sum(p["ms"] for p in decode["floor_parts"].values()), rel=0.01)
    assert decode["of_floor"] == pytest.approx(decode["step_ms"] / decode["floor_ms"], rel=0.02)
    assert 1 <= decode["random_accept_length"] <= 6
    assert {p["narrowed"] for p in told["prefill"]} == {True, False}
    assert all(p["tokens_per_s"] == pytest.approx(150e3 / p["ms"], rel=0.01) for p in told["prefill"])
    # 128 values of 4 bytes and 64 of an index key: sources 1 and 3 keep half an entry a token, source 4 a whole one
    assert told["kv"]["bytes_per_token"] == pytest.approx((128 + 64) * 4 * 2)
    assert any("network" in line for line in told["left_out"])
    assert str(result.parent) not in result.read_text()


def test_nobody_is_told_that_a_rank_takes_no_memory(result: Path) -> None:
    (built,) = [line for line in result.with_suffix(".log").read_text().splitlines() if line.startswith("built in")]
    assert built.endswith(" s")  # a CPU's memory is not counted


def test_rates_by_accept_length() -> None:
    share = RankShare(sequences=64, nextn=5)
    assert accepted_rates(share, 0.02) == {"1": 3200.0, "2.5": 8000.0, "3.2": 10240.0, "all": 19200.0}
    assert accepted_rates(RankShare(sequences=64, nextn=0), 0.02) == {"1": 3200.0, "all": 3200.0}


def test_one_rank_of_the_released_model() -> None:
    config = RankShare().config()
    assert (config.n_routed_experts, config.dspark_n_routed_experts, config.num_hidden_layers) == (48, 16, 40)
    assert config.num_experts_per_tok == 6 and config.num_drafts == 3
    assert all(rows < 3e6 for rows in config.engram_num_embeddings)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ep": 7}, "evenly among 7"),
        ({"ep": 128}, "3 experts each, a token uses 6"),
        ({"nextn": 6}, "use a number from 0 to 5"),
    ],
)
def test_what_cannot_be_shared_is_refused(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RankShare(**fields).config()  # type: ignore[arg-type]


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="sequences: must be at least 1"):
        RankShare(sequences=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rank-share", "8"), "must be ep=N"),
        (("--rank-share", "ep=0"), "must be ep=N"),
        (("--rank-share", "ep=2", "--server", "http://127.0.0.1:1"), "leave out --server"),
    ],
)
def test_refusals_of_the_command(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments])
    assert left.value.code == 2 and words in capsys.readouterr().err


def test_steps_without_drafts_and_a_packed_cache() -> None:
    """bfloat16 with the release's records: random ones are read, and nothing that is not finite comes out."""
    share = RankShare(**{**SMALL, "nextn": 0, "dtype": "bfloat16", "prefill_chunk": 40})  # type: ignore[arg-type]
    rank = Rank(share, CPU)
    assert rank.kv_format == "packed"
    rank.open_sequences()
    before = rank.storage.lengths(rank._slots).copy()
    steps = list(rank.decode_steps(4))
    assert [(step.rows, step.tokens) for step in steps] == [(3, 3)] * 4
    assert all(step.seconds > 0 for step in steps)
    assert (rank.storage.lengths(rank._slots) == before + 4).all()
    rank.close_sequences()
    for narrowed in (True, False):
        batch = rank.prefill_batch(narrowed)
        first, again = rank.prefill(batch), rank.prefill(batch)
        assert torch.equal(first, again)
        assert torch.isfinite(first).all() and first.std() > 0.1
        rank.end_prefill(batch)
    rank.manager.check_integrity()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "flash", "--rank-share", "ep=8"], "40 layers of preset flash with ep=8 take about"),
        (["--preset", "tiny", "--rank-share", "ep=2", "--nextn", "6"], "nextn: preset tiny drafts 5 tokens at once"),
        (
            ["--preset", "tiny", "--rank-share", "ep=2", "--json", "nowhere/rank.json"],
            "json: there is no directory nowhere",
        ),
        (["--preset", "nothing", "--rank-share", "ep=2"], "nothing"),
        (["--preset", "tiny", "--rank-share", "ep=7"], "ep"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_made(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("something was measured first")

    monkeypatch.setattr("deepinfer.bench.rank_share_run.measured_rates", never)
    monkeypatch.setattr("deepinfer.bench.rank_memory.available_bytes", lambda: 32 << 30)
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments, "--device", "cpu", "--dtype", "float32"])
    assert left.value.code != 0
    assert words in capsys.readouterr().err.replace("\n", " ")


def tensors() -> dict[int, torch.Tensor]:
    """One of each storage, by its address."""
    gc.collect()
    return {one.untyped_storage().data_ptr(): one for one in gc.get_objects() if type(one) is torch.Tensor}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_rank_is_said_to_take_is_what_it_takes(dtype: str) -> None:
    fields = {**SMALL, "context": 1000, "prefill_chunk": 500, "dtype": dtype}
    share = RankShare(**fields)  # type: ignore[arg-type]
    before = tensors()
    rank = Rank(share, CPU)
    held = sum(one.untyped_storage().nbytes() for at, one in tensors().items() if at not in before)
    told = rank_memory(share, CPU)
    assert told.weights + told.cache == pytest.approx(held, rel=0.01)
    assert told.tables == sum(
        config_rows * 66 for config_rows in rank.config.engram_num_embeddings
    )  # 64 codes, 2 scales
    assert told.most == told.weights + told.tables + max(told.loading, told.cache + told.working)


def test_a_machine_with_the_memory_is_not_refused_for_the_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    share = RankShare(ep=48, layers=8, sequences=2, context=1000, nextn=0, prefill_chunk=1000)
    needed = rank_memory(share, CPU).most
    monkeypatch.setattr("deepinfer.bench.rank_memory.available_bytes", lambda: needed)
    check_memory(share, CPU)
    with pytest.raises(ValueError, match=r"9 layers of preset flash with ep=48 take about .* lower --layers to 8$"):
        check_memory(dataclasses.replace(share, layers=9), CPU)
    with pytest.raises(ValueError, match="not even one layer fits"):
        check_memory(dataclasses.replace(share, ep=1), CPU)
    check_memory(RankShare(), torch.device("cuda"))  # says by itself what it lacks
