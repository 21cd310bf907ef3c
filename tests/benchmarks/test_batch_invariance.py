"""The benchmark of batch invariance compares rows with themselves alone: on a CPU, whose kernels keep the promise, and
on a rank that does not."""

from __future__ import annotations

import shlex

import pytest
import torch
from batch_invariance import NO_GPU, main, measure

from deepinfer.bench.rank_share import RankShare
from deepinfer.kernels import select
from deepinfer.model.backbone import DeepseekV41

CPU = torch.device("cpu")
SMALL = {"preset": "tiny", "ep": 2, "layers": 5, "sequences": 3, "context": 100, "steps": 1, "prefill_chunk": 0}


@pytest.mark.skipif(not select.cpu_twins(CPU, torch.float32), reason="needs the CPU kernels")
def test_rows_alone_are_compared_with_rows_together(monkeypatch) -> None:
    share = RankShare(**SMALL, nextn=2, dtype="float32", batch_invariant=True)
    found = measure(share, CPU)
    assert (found.rows, found.rows_alone_differ) == (9, 0) and found.milliseconds > 0
    plain = measure(RankShare(**SMALL, nextn=2, dtype="float32"), CPU)
    assert plain.rows_alone_differ is None

    forward = DeepseekV41.forward

    def moved(model: DeepseekV41, batch: object, cache: object) -> torch.Tensor:
        return forward(model, batch, cache) + 1  # type: ignore[arg-type]

    monkeypatch.setattr(DeepseekV41, "forward", moved)
    assert measure(share, CPU).rows_alone_differ == 6  # of two sequences, three rows each


def test_a_machine_without_a_gpu_is_told_so_and_the_command_that_it_is_told_works(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    said = capsys.readouterr()
    assert "no GPU" in said.err and not said.out
    _, _, command = NO_GPU.partition("say ")
    assert main([*shlex.split(command), "--steps", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "18 rows, not invariant",
        "18 rows, batch invariant",
        "3 rows, not invariant",
        "3 rows, batch invariant",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "tiny", "--ep", "2", "--nextn", "5", "6"], "nextn: preset tiny drafts 5 tokens at once, got 6"),
        (["--ep", "8"], "GiB are available; run it on a GPU"),
        (["--device", "gpu"], "device: 'gpu' is not one of"),
    ],
)
def test_what_the_last_of_several_runs_would_fail_for_is_said_before_the_first(
    arguments: list[str], words: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("batch_invariance.measure", lambda *_: pytest.fail("something was measured first"))
    monkeypatch.setattr("deepinfer.bench.rank_memory.available_bytes", lambda: 8 << 30)
    assert main(["--device", "cpu", *arguments]) == 2
    assert words in capsys.readouterr().err
