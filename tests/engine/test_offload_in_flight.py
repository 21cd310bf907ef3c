"""A sequence preempted while a chunk of its prompt is in flight is not copied with windows already overwritten."""

from __future__ import annotations

from pathlib import Path

from integrity import assert_all_free
from real_engine import cold, finish, make_real_engine, text

from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.model import load_model


def test_a_prompt_preempted_in_the_middle_of_a_chunk_goes_on_with_the_right_tokens(tiny_checkpoint: Path) -> None:
    model = load_model(tiny_checkpoint)
    options = {"overlap": True, "offload_bytes": 12_000, "offload_tokens": 1}
    engine = make_real_engine(
        model, num_blocks=9, max_num_seqs=3, window_entries=2, max_num_batched_tokens=200, **options
    )
    prompts = {"short": text(10)[:89], "long": text(0)[:256] + text(10)[:1]}
    params = SamplingParams(temperature=0, max_tokens=12)
    for name, prompt in prompts.items():
        engine.add_request(name, list(prompt), params.with_changes(priority=int(name == "short")))
    for _ in range(2):
        engine.step()
    for _ in range(2):
        engine.scheduler._preempt(engine.scheduler.running[0])
    finish(engine)
    for name, prompt in prompts.items():
        assert engine.pop_output(name).outputs[0].token_id == cold(model, prompt, params)[0]
    assert_all_free(engine.cache)
    engine.core.shutdown()
