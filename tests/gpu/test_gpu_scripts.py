"""What benchmarks/gpu_soak.py and gpu_sanitizer.py make of what they see; no GPU is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpu_sanitizer import FAMILIES, FOUND, judge
from gpu_soak import PINNED_SPREAD, problems

ROOT = Path(__file__).parents[2]


def sample(step: int, **changes: int) -> dict[str, int]:
    sizes = {"allocated_bytes": 1000, "reserved_bytes": 4096, "pinned_bytes": 512, "resident_bytes": 1 << 30}
    return {"step": step, "graphs": 3, **sizes, **changes}


def test_flat_memory_has_no_problems_and_a_leak_of_one_byte_has() -> None:
    """What the last copy took of page-locked memory is no leak: some numbers a sequence."""
    flat = [sample(step, pinned_bytes=512 + 13 * (step % 2)) for step in range(8)]
    assert problems(flat) == []
    for name, leak in (("allocated_bytes", 1), ("pinned_bytes", PINNED_SPREAD + 1)):
        leaking = [sample(step, **{name: 1000 + leak * (step // 4)}) for step in range(8)]
        (line,) = problems(leaking)
        assert name in line
    growing = [sample(step, resident_bytes=step * (20 << 20)) for step in range(8)]
    assert "resident_bytes grew" in problems(growing)[0]


def test_a_graph_that_is_recorded_late_is_no_leak() -> None:
    samples = [sample(step, graphs=3 + (step > 3), allocated_bytes=1000 + 500 * (step > 3)) for step in range(8)]
    assert problems(samples) == []
    assert problems([*samples, sample(8, graphs=4, allocated_bytes=1501)])


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "3 passed in 2 s\n========= ERROR SUMMARY: 0 errors", ("clean", 0)),
        (0, "3 passed in 2 s\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", ("clean", 0)),
        (FOUND, "3 passed\n========= ERROR SUMMARY: 12 errors", ("found", 12)),
        (1, "1 failed, 2 passed\n========= ERROR SUMMARY: 0 errors", ("failed", 0)),
        (0, "3 passed in 2 s", ("failed", 0)),  # the tool says nothing: it was not there
        (5, "no tests ran\n========= ERROR SUMMARY: 0 errors", ("failed", 0)),
        (1, "========= Error: Device not supported. Please refer to the list", ("refused", 0)),
    ],
)
def test_what_a_run_under_the_sanitizer_says(code: int, output: str, verdict: tuple[str, int]) -> None:
    assert judge(code, output) == verdict


def test_racecheck_leaves_out_what_mbarriers_order_and_synccheck_takes_it() -> None:
    assert all(family.takes("memcheck") for family in FAMILIES.values())
    assert FAMILIES["cuda_attention"].takes("synccheck") and not FAMILIES["cuda_attention"].takes("racecheck")
    assert FAMILIES["records"].takes("racecheck") and not FAMILIES["records"].takes("synccheck")


def test_every_family_of_kernels_is_checked_by_tests_that_exist() -> None:
    folder = ROOT / "tests" / "kernels" / "gpu"
    triton = {path.stem.removeprefix("test_") for path in folder.glob("test_triton_*.py")} - {"triton_compile"}
    assert {family.file for family in FAMILIES.values()} == triton | {"cuda_attention"}
    for family in FAMILIES.values():
        names = re.findall(r"^def (test_\w+)", (folder / f"test_{family.file}.py").read_text(), re.MULTILINE)
        for word in family.tests.split(" or "):
            assert any(word in name for name in names), f"{family.file}: no test is called like {word}"
