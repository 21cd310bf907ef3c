"""Ten thousand cancellations in whatever state: nothing stays behind."""

from __future__ import annotations

import random

import pytest
from integrity import assert_all_free
from scripted import ScriptedModel, make_engine

from deepinfer.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True}, {"overlap": True, "drafts": 5, "varlen": True}],
    ids=["plain", "overlapped", "overlapped with drafts"],
)
def test_ten_thousand_aborts_leave_no_block_in_use(options: dict) -> None:
    draw = random.Random(7)
    engine = make_engine(
        ScriptedModel(),
        **options,
        max_num_seqs=16,
        num_blocks=24,
        max_num_batched_tokens=256,
        prefix_caching="exact",
        window_entries=3,
        offload_bytes=8 * 1024,
        offload_tokens=100,
    )
    live: list[str] = []
    aborted = number = 0
    while aborted < 10_000:
        for _ in range(draw.randrange(60)):
            prompt = [3 + (i * (number % 3 + 1)) % 50 for i in range(draw.choice([1, 5, 100, 130, 260]))]
            params = SamplingParams(n=draw.choice([1, 1, 1, 3]), max_tokens=draw.choice([1, 4, 200]), seq_seed=number)
            engine.add_request(str(number), prompt, params)
            live.append(str(number))
            number += 1
        for _ in range(draw.randrange(3)):
            engine.step()
        draw.shuffle(live)
        for _ in range(draw.randrange(60)):
            if live:
                aborted += engine.abort(live.pop())
        live = [name for name in live if engine.is_unfinished(name)]
        if aborted % 10 == 0:
            engine.cache.check_integrity()
    for name in live:
        engine.abort(name)
    engine.step()
    assert not engine.has_unfinished and not engine.scheduler.running and not len(engine.scheduler.waiting)
    assert engine.scheduler.prefixes.shared.is_empty()
    assert_all_free(engine.cache)
    assert engine.cache.num_used_blocks == 0 and engine.cache.num_offloaded == 0
    engine.core.shutdown()
