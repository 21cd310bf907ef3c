"""What every test of an engine ends with."""

from __future__ import annotations


def assert_all_free(cache) -> None:  # type: ignore[no-untyped-def]
    """Nothing is in use: every block and every slot came back."""
    cache.check_integrity()
    assert cache.num_free_blocks == cache.num_blocks
    assert cache.num_free_slots == cache.max_num_seqs
