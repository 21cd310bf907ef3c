"""EngineConfig refuses what an engine cannot run, by name."""

from __future__ import annotations

import pytest

from deepinfer.config import VERIFY_ROWS, EngineConfig

GOOD = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 16, "num_blocks": 4}


def test_as_many_drafts_as_a_verify_step_can_check_and_no_more() -> None:
    assert EngineConfig(**GOOD, drafts=VERIFY_ROWS - 1).drafts == 5
    with pytest.raises(ValueError, match=r"^drafts: 6 is more than a verify step of 6 rows .* use at most 5$"):
        EngineConfig(**GOOD, drafts=VERIFY_ROWS)
    with pytest.raises(ValueError, match=r"^drafts: "):
        EngineConfig(**GOOD, drafts=-1)


@pytest.mark.parametrize("name", ["varlen", "batch_invariant"])
def test_a_switch_is_true_or_false(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: must be True or False, got 1"):
        EngineConfig(**GOOD, **{name: 1})
