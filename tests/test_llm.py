"""The public interface on a real model: a random V4.1 with every mechanism, in float32."""

from __future__ import annotations

import gc
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from golden import golden_dir, load
from integrity import assert_all_free

from deepinfer import LLM, InvalidRequestError, SamplingParams
from deepinfer.cache.formats import block_bytes, staging_bytes
from deepinfer.engine.arguments import EngineArguments
from deepinfer.engine.build import engine_config
from deepinfer.engine.model_core import ModelCore
from deepinfer.engine.settings import resolve_settings
from deepinfer.engine.sizing import divide_memory, fit
from deepinfer.model.presets import preset

GREEDY = SamplingParams(temperature=0, max_tokens=4)
PROMPTS = [[0, *range(3, 60)], [0, 40, 41], [0, *range(200, 219)], [0, *([77, 78] * 70)]]
SEEDED = [
    GREEDY,
    SamplingParams(seq_seed=1, max_tokens=4, top_p=0.9),
    SamplingParams(seq_seed=2, max_tokens=4, n=2, frequency_penalty=0.5),
    SamplingParams(seq_seed=3, max_tokens=4, top_k=20, min_p=0.01),
]


def ask(llm: LLM, prompts, params, **options):
    return llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False, **options)


def tokens(outputs):
    return [[completion.token_id for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def together(session_llm: LLM):
    return ask(session_llm, PROMPTS, SEEDED)


# -- speed never changes tokens ---------------------------------------------------------------------------------------


def test_golden_greedy_tokens_and_logits() -> None:
    """Text in one call equals what an independent float32 engine computed token by token."""
    case = golden_dir() / "01-core-trace"
    expected = load(case / "expected.safetensors")
    prompts = json.loads((case / "prompts.json").read_text())["prompts"]
    llm = LLM(case, verbose=False)
    outputs = ask(llm, [p["ids"] for p in prompts], SamplingParams(temperature=0, max_tokens=16))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_id == expected[f"{prompt['name']}.decode_ids"].tolist()
        logits, truth = llm.logits(prompt["ids"]), expected[f"{prompt['name']}.prefill_logits"]
        assert logits.dtype == torch.float32 and logits.shape == truth.shape
        assert (logits - truth).abs().max() < 1e-4 * truth.abs().max()


def test_tokens_do_not_depend_on_batch_mates(llm, together) -> None:
    for prompt, params, output in list(zip(PROMPTS, SEEDED, together, strict=True))[:3]:
        assert tokens(ask(llm, [prompt], params)) == tokens([output])


def test_tokens_do_not_depend_on_submission_order(llm, together) -> None:
    assert tokens(ask(llm, PROMPTS[::-1], SEEDED[::-1])) == tokens(together)[::-1]


def test_tokens_do_not_depend_on_chunk_size_slots_or_preemption(tiny_checkpoint: Path, llm, together) -> None:
    small = LLM(
        tiny_checkpoint, max_model_len=256, max_num_seqs=3, max_num_batched_tokens=101, num_blocks=3, verbose=False
    )
    assert tokens(ask(small, PROMPTS, SEEDED)) == tokens(together)
    # 125 tokens each: both cross into a second block, and there are three
    pair, params = [[0, *range(3, 127)], [0, *range(100, 224)]], GREEDY.with_changes(max_tokens=8)
    outputs = ask(small, pair, params)
    assert tokens(outputs) == tokens(ask(llm, pair, params))
    assert sum(output.metrics.preemptions for output in outputs) > 0


def test_same_seed_same_tokens_and_other_seed_other_tokens(llm) -> None:
    params = [SamplingParams(seq_seed=s, max_tokens=3) for s in (7, 7, 8)]
    first, second, third = tokens(ask(llm, PROMPTS[1:2] * 3, params))
    assert first == second != third


def test_a_script_repeats_itself_and_unseeded_requests_differ(tiny_checkpoint: Path) -> None:
    runs = []
    for _ in range(2):
        llm = LLM(tiny_checkpoint, max_model_len=256, seed=3, verbose=False)
        runs.append(tokens(ask(llm, PROMPTS[1:2] * 3, SamplingParams(max_tokens=2))))
    assert runs[0] == runs[1]
    assert len({tuple(t[0]) for t in runs[0]}) == 3


def test_children_share_the_prompt_and_the_first_equals_n_1(llm) -> None:
    params = SamplingParams(seq_seed=11, n=3, max_tokens=3)
    (many,) = tokens(ask(llm, PROMPTS[:1], params))
    (one,) = tokens(ask(llm, PROMPTS[:1], params.with_changes(n=1)))
    assert many[0] == one[0]
    assert len({tuple(t) for t in many}) == 3


LONG = [0, *(3 + i * 7 % 400 for i in range(420))]  # three full blocks and a rest


@pytest.mark.parametrize("options", [{}, {"window_store_bytes": 0}, {"overlap": True}, {"kv_format": "float32"}])
def test_a_cached_prefix_gives_the_tokens_and_probabilities_of_a_cold_run(tiny_checkpoint: Path, options) -> None:
    cold = LLM(tiny_checkpoint, max_model_len=512, enable_prefix_caching=False, verbose=False)
    hot = LLM(tiny_checkpoint, max_model_len=512, verbose=False, **options)
    for end in (421, 300, 421, 390):  # the second hits a shorter prefix, the third has seen all
        prompt = LONG[:end]
        for params in (GREEDY, SamplingParams(seq_seed=4, max_tokens=6, n=2)):
            (expected,), (got,) = ask(cold, [prompt], params), ask(hot, [prompt], params)
            for one, other in zip(expected.outputs, got.outputs, strict=True):
                assert (one.token_id, one.token_logprobs) == (other.token_id, other.token_logprobs)
            assert expected.cached_tokens == 0
    assert got.cached_tokens + got.metrics.replay_tokens == 256  # 390 - 22 rounded down to blocks
    assert (got.metrics.replay_tokens > 0) == (options == {"window_store_bytes": 0})


def test_the_next_turn_of_a_conversation_hits_the_answer_too(tiny_checkpoint: Path) -> None:
    llm = LLM(tiny_checkpoint, max_model_len=1024, verbose=False)
    (first,) = ask(llm, [LONG[:100]], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    (second,) = ask(llm, [LONG[:100] + first.outputs[0].token_id + LONG[:60]], GREEDY)
    assert second.cached_tokens == 256  # of 100 + 200, where the prompt alone fills no block


def test_a_prefix_shared_by_many_requests_is_computed_once(tiny_checkpoint: Path) -> None:
    llm = LLM(tiny_checkpoint, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=128, verbose=False)
    prompts = [LONG[:400] + [10 + i] * 20 for i in range(8)]
    outputs = ask(llm, prompts, GREEDY)
    computed = sum(output.prompt_len - output.cached_tokens for output in outputs)
    assert computed < 420 + 8 * (420 - 384 + 128)  # and not 8 x 420
    cold = LLM(tiny_checkpoint, max_model_len=512, enable_prefix_caching=False, verbose=False)
    assert tokens(outputs) == tokens(ask(cold, prompts, GREEDY))


@pytest.mark.parametrize("max_num_batched_tokens", [16, 128])
def test_the_overlapped_loop_gives_the_same_tokens(tiny_checkpoint: Path, together, max_num_batched_tokens) -> None:
    options = {"max_model_len": 256, "max_num_seqs": 3, "max_num_batched_tokens": max_num_batched_tokens}
    overlapped = LLM(tiny_checkpoint, overlap=True, num_blocks=4, verbose=False, **options)
    assert tokens(ask(overlapped, PROMPTS, SEEDED)) == tokens(together)
    stops = GREEDY.with_changes(max_tokens=40, stop_token_ids=[together[0].outputs[0].token_id[2]])
    (output,) = ask(overlapped, PROMPTS[:1], stops)
    assert output.outputs[0].token_id == together[0].outputs[0].token_id[:3]
    assert output.outputs[0].finish_reason == "stop"


# -- approximations have a name, and touch only what they say ---------------------------------------------------------


def test_truncation_and_bounded_replay_leave_logits_and_prompt_logprobs_exact(tiny_checkpoint: Path, llm) -> None:
    loose = LLM(
        tiny_checkpoint, max_model_len=512, max_num_batched_tokens=128, prefix_mode="bounded",
        yoco_truncation="compact", yoco_keep_tokens=22, window_store_bytes=0, verbose=False,
    )  # fmt: skip
    params = GREEDY.with_changes(prompt_logprobs=1)
    (warm,) = ask(loose, [LONG], GREEDY)  # now its blocks are in the cache
    (exact,), (got,) = ask(llm, [LONG], params), ask(loose, [LONG], params)
    assert got.cached_tokens == 0
    assert got.prompt_logprobs == exact.prompt_logprobs
    assert tokens([got]) == tokens([exact])
    assert torch.equal(loose.logits(LONG), llm.logits(LONG))
    # and the approximation is one: something must have been left out
    assert warm.outputs[0].token_logprobs != exact.outputs[0].token_logprobs
    assert warm.outputs[0].token_logprobs == pytest.approx(exact.outputs[0].token_logprobs, abs=1.0)


def test_a_packed_cache_gives_the_tokens_of_a_bfloat16_one(tiny_checkpoint: Path) -> None:
    options = {"dtype": "bfloat16", "max_model_len": 512, "verbose": False}
    packed, plain = LLM(tiny_checkpoint, **options), LLM(tiny_checkpoint, kv_format="bfloat16", **options)
    assert packed.engine_config.kv_format == "packed"
    for prompts, params in (([*PROMPTS, LONG], [*SEEDED, GREEDY]), ([LONG], [GREEDY])):
        expected, got = ask(plain, prompts, params), ask(packed, prompts, params)
        assert tokens(got) == tokens(expected)
        assert [o.outputs[0].token_logprobs for o in got] == [o.outputs[0].token_logprobs for o in expected]


# -- what comes back --------------------------------------------------------------------------------------------------


def test_output_holds_what_the_interface_names(llm) -> None:
    (output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=4, logprobs=2), use_tqdm=False)
    completion = output.outputs[0]
    assert output.prompt == "hello"
    assert output.prompt_len == len(llm.tokenizer.encode_prompt("hello")) == len(output.prompt_token_ids)
    assert completion.text == llm.tokenizer.decode(completion.token_id)
    assert len(completion.token_id) == len(completion.token_logprobs) == len(completion.logprobs or []) == 4
    assert completion.finish_reason == "length"
    assert sum(completion.accept_tok) <= sum(completion.draft_tok)
    assert output.cached_tokens == 0
    assert min(output.metrics.queue or 0, output.metrics.ttft or 0, output.metrics.tbt or 0) >= 0


def test_logprobs_are_those_of_the_full_forward_pass(llm) -> None:
    prompt = PROMPTS[3]
    (output,) = ask(llm, [prompt], GREEDY.with_changes(prompt_logprobs=2, logprobs=1))
    completion = output.outputs[0]
    truth = torch.log_softmax(llm.logits([*prompt, *completion.token_id]), -1)
    entries = output.prompt_logprobs or []
    assert entries[0] is None and len(entries) == len(prompt)
    for position, entry in enumerate(entries[1:]):
        assert entry is not None
        assert entry[prompt[position + 1]] == pytest.approx(truth[position, prompt[position + 1]].item(), abs=1e-3)
        assert list(entry.values())[:2] == sorted(entry.values(), reverse=True)[:2]
    for i, (token, value) in enumerate(zip(completion.token_id, completion.token_logprobs, strict=True)):
        row = truth[len(prompt) - 1 + i]
        assert token == int(row.argmax())
        assert value == pytest.approx(row[token].item(), abs=1e-3)


def test_stream_yields_the_same_text_and_leaving_it_frees_everything(llm) -> None:
    params = SamplingParams(seq_seed=5, max_tokens=3)
    (output,) = llm.generate("abc", params, use_tqdm=False)
    deltas = list(llm.stream("abc", params))
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text
    assert deltas[-1].finish_reason == "length"
    for _ in llm.stream(PROMPTS[0], params):
        break  # the fixture checks that nothing is left


def test_a_batch_in_the_middle_of_a_stream_loses_nothing(llm) -> None:
    params = SamplingParams(seq_seed=5, max_tokens=4)
    stream = llm.stream("abc", params)
    ids = next(stream).token_ids
    (batch,) = tokens(ask(llm, PROMPTS[1:2], GREEDY))
    for delta in stream:
        ids = ids + delta.token_ids
    assert [ids] == [o.token_id for o in llm.generate("abc", params, use_tqdm=False)[0].outputs]
    assert len(batch[0]) == 4


class Holder:
    """Keeps itself alive until the garbage collector comes, and something else with it."""

    def __init__(self, kept: object) -> None:
        self.kept, self.me = kept, self


LONG_ANSWER = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.mark.parametrize("place", ["_decode", "schedule", "finish"])
def test_a_stream_collected_in_the_middle_of_a_step_hurts_nobody(llm, monkeypatch, place) -> None:
    (expected,) = tokens(ask(llm, PROMPTS[:1], GREEDY))
    scheduler, collected = llm.engine.scheduler, []
    original = getattr(scheduler, place)

    def strike(*arguments):
        result = original(*arguments)
        collected.append(gc.collect())
        return result

    gc.disable()
    try:
        stream = llm.stream(PROMPTS[1], LONG_ANSWER)
        next(stream)
        holder = Holder(stream)
        del stream, holder
        monkeypatch.setattr(scheduler, place, strike)
        (got,) = tokens(ask(llm, PROMPTS[:1], GREEDY))
    finally:
        gc.enable()
    assert collected[0] > 0 and got == expected  # the fixture checks that the stream's blocks are free


def test_a_stream_that_nobody_holds_any_more_is_freed_at_once_on_an_idle_llm(llm) -> None:
    stream = llm.stream(PROMPTS[0], LONG_ANSWER)
    next(stream)
    assert llm.engine.has_unfinished
    del stream
    assert_all_free(llm.engine.cache)
    assert not llm.engine.has_unfinished and not llm._streams and not llm._abandoned


def test_a_stream_closed_while_another_thread_holds_the_engine_does_not_wait_and_is_freed_after(llm) -> None:
    stream = llm.stream(PROMPTS[0], LONG_ANSWER)
    next(stream)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with llm._turn():
            held.set()
            assert go_on.wait(60)

    with ThreadPoolExecutor(1) as threads:
        holding = threads.submit(hold)
        assert held.wait(60)
        stream.close()
        assert llm.engine.has_unfinished
        go_on.set()
        holding.result(timeout=60)
    assert not llm.engine.has_unfinished and not llm._streams


def test_a_call_from_within_a_step_is_refused_and_changes_nothing(llm, monkeypatch) -> None:
    (expected,) = tokens(ask(llm, PROMPTS[:1], GREEDY))
    scheduler, refused = llm.engine.scheduler, []
    original = scheduler.schedule

    def nested(*arguments):
        with pytest.raises(RuntimeError, match="from within one of its own steps"):
            ask(llm, PROMPTS[1:2], GREEDY)
        refused.append(True)
        return original(*arguments)

    monkeypatch.setattr(scheduler, "schedule", nested)
    assert tokens(ask(llm, PROMPTS[:1], GREEDY)) == [expected] and refused


def test_a_stream_gets_its_last_delta_though_another_thread_made_the_step(llm, monkeypatch) -> None:
    """The request is over in the engine before what it said has reached the stream."""
    stream = llm.stream(PROMPTS[0], GREEDY.with_changes(max_tokens=2))
    first = next(stream)
    stepped, go_on = threading.Event(), threading.Event()
    original = llm.engine.step

    def slow():
        deltas = original()
        stepped.set()
        assert go_on.wait(60)
        return deltas

    monkeypatch.setattr(llm.engine, "step", slow)
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(llm._step)
        assert stepped.wait(60)
        rest = threads.submit(list, stream)
        threading.Timer(0.05, go_on.set).start()
        assert other.result(timeout=60)
        assert sum(len(delta.token_ids) for delta in [first, *rest.result(timeout=60)]) == 2


def test_an_interrupted_call_frees_everything(llm, monkeypatch) -> None:
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(llm, PROMPTS, GREEDY)
    monkeypatch.undo()
    assert len(tokens(ask(llm, PROMPTS[1:2], GREEDY))[0][0]) == 4


def test_after_an_interrupt_nothing_unfinished_is_taken_for_cached(tiny_checkpoint: Path, monkeypatch) -> None:
    """Ctrl-C while the device was about to put a window away: it must not be loaded later as if it were there."""
    llm = LLM(tiny_checkpoint, max_model_len=512, verbose=False)
    cold = ask(llm, [LONG], GREEDY)  # its last window is put away at the beginning of the next step

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.core.loop._runner.storage, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(llm, PROMPTS[1:2], GREEDY)
    monkeypatch.undo()
    assert_all_free(llm.engine.cache)
    assert tokens(ask(llm, [LONG], GREEDY)) == tokens(cold)
    assert ask(llm, [LONG], GREEDY)[0].cached_tokens > 0  # and the cache works on


def test_a_progress_line_comes_each_n_steps(tiny_checkpoint: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "3")
    llm = LLM(tiny_checkpoint, max_model_len=256, verbose=False)
    ask(llm, PROMPTS[:2], GREEDY.with_changes(max_tokens=7))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("deepinfer: step")]
    assert [line.split(" | ")[0] for line in lines] == ["deepinfer: step 3", "deepinfer: step 6"]
    assert "running 2, waiting 0" in lines[0]


# -- whose a request is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "ended_before"), [("fair", 1), ("first-come", 4)])
def test_a_tenants_one_prompt_does_not_wait_for_all_of_anothers_under_the_fair_policy(
    tiny_checkpoint: Path, monkeypatch, policy: str, ended_before: int
) -> None:
    llm = LLM(tiny_checkpoint, max_model_len=256, max_num_seqs=1, queue_policy=policy, verbose=False)
    step, counted = llm._step, []

    def step_and_ask_as_another():
        monkeypatch.setattr(llm, "_step", step)
        llm._step()  # the first prompt of the many runs
        ask(llm, PROMPTS[1:2], GREEDY, tenant="one")
        counted.append(4 - len(llm.engine.outputs.unfinished()))
        return []

    monkeypatch.setattr(llm, "_step", step_and_ask_as_another)
    assert len(ask(llm, [[0, *range(i, i + 30)] for i in range(3, 7)], GREEDY, tenant="many")) == 4
    assert counted == [ended_before]


def test_a_cached_prefix_is_shared_within_a_salt_only(tiny_checkpoint: Path) -> None:
    llm = LLM(tiny_checkpoint, max_model_len=512, verbose=False)
    hits = [ask(llm, [LONG], GREEDY, salt=salt)[0].cached_tokens > 0 for salt in ("a", "b", "a", "")]
    assert hits == [False, False, True, False]
    list(llm.stream([7, *LONG], GREEDY, salt="a"))
    assert [ask(llm, [[7, *LONG]], GREEDY, salt=salt)[0].cached_tokens > 0 for salt in "ba"] == [False, True]


@pytest.mark.parametrize("field", ["tenant", "salt"])
@pytest.mark.parametrize("value", [None, 5, b"x", "x" * 257, "\ud800"])
def test_a_tenant_or_salt_that_is_no_text_is_named_and_nothing_has_run(llm, monkeypatch, field, value) -> None:
    monkeypatch.setattr(llm.model, "forward", lambda *_: pytest.fail("the engine ran"))
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        ask(llm, PROMPTS[:1], GREEDY, **{field: value})
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        llm.stream(PROMPTS[0], GREEDY, **{field: value})  # before the first step is asked for


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts: is empty"),
        ({"prompt_token_ids": []}, "prompt_token_ids: is empty"),
        ({}, "give either prompts or prompt_token_ids"),
        ({"prompts": ["a"], "prompt_token_ids": [[1]]}, "give either"),
        ({"prompts": ["good", ""]}, "prompt 1, prompt: is empty"),
        ({"prompts": ["good", 5]}, "prompt 1, prompt: must be a text or a list"),
        ({"prompt_token_ids": [[3], []]}, "prompt 1, prompt_token_ids: is empty"),
        ({"prompt_token_ids": [[3], [3, 512]]}, "prompt 1, prompt_token_ids: entry 1 must be"),
        ({"prompt_token_ids": [[3], [502]]}, "prompt 1, prompt_token_ids: entry 0: id 502 stands for a picture"),
        ({"prompt_token_ids": [[3] * 600]}, "prompt 0, prompt: has 600 tokens"),
        ({"prompts": ["a", "b"], "sampling_params": [GREEDY]}, "sampling_params: 1 given for 2 prompts"),
        ({"prompts": ["a"], "sampling_params": {"temperature": 0}}, "prompt 0, sampling_params: must be"),
        ({"prompts": ["a"], "sampling_params": SamplingParams(stop_token_ids=[999])}, "prompt 0, stop_token_ids"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_bad_input_names_the_prompt_and_nothing_has_run(llm, monkeypatch, arguments, message) -> None:
    monkeypatch.setattr(llm.model, "forward", lambda *_: pytest.fail("the engine ran"))
    with pytest.raises(InvalidRequestError) as error:
        llm.generate(**arguments, use_tqdm=False)
    assert message in str(error.value)


def test_logits_refuse_what_the_model_cannot_read(llm) -> None:
    for bad in ([], [512], [-1]):
        with pytest.raises(InvalidRequestError, match="token_ids"):
            llm.logits(bad)
    with pytest.raises(InvalidRequestError, match="more than the model's"):
        llm.logits([3] * (llm.config.max_position_embeddings + 1))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("ep", 8), ("dp", 2), ("cp", 2), ("batch_invariant", 1), ("dtype", "fp16"), ("device", "tpu"),
        ("nextn", -1), ("nextn", 1), ("nextn", 6), ("nextn", True), ("mtp_varlen", "on"),
        
        ("gpu_memory_utilization", 0), ("max_model_len", 10**9), ("max_num_seqs", 0), ("max_num_batched_tokens", 1),
        ("num_blocks", 0), ("prefix_mode", "off"), ("enable_prefix_caching", "exact"), ("kv_format", "fp8"),
        ("kv_format", "packed"), ("yoco_truncation", "on"), ("overlap", 1), ("queue_policy", "lifo"),
        ("window_store_bytes", -1), ("window_store_bytes", 100), ("window_store_bytes", 1 << 60),
        ("offload_bytes", 1.5), ("offload_bytes", 1 << 60), ("offload_bytes", 1000), ("gpu_memory_utilization", "x"),
        ("gpu_memory_utilization", None), ("gpu_memory_utilization", True), ("gpu_memory_utilization", math.nan),
        ("seed", "x"), ("seed", 1.5), ("seed", True), ("seed", -1), ("seed", 1 << 64), ("yoco_keep_tokens", "x"),
        ("yoco_keep_tokens", 1.5), ("yoco_keep_tokens", 0), ("max_num_batched_tokens", "x"),
        ("max_num_batched_tokens", 64.5),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_by_name(tiny_checkpoint: Path, argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: "):
        LLM(tiny_checkpoint, verbose=False, **{"max_model_len": 256, argument: value})  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so asking for it is no error")
def test_missing_cuda_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"device: 'cuda' cannot be used, .*; use device='cpu'"):
        LLM("nowhere", device="cuda")


def test_unreadable_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path / "nothing")):
        LLM(tmp_path / "nothing", verbose=False)


def test_effective_settings_are_printed_with_what_is_not_in_force(tiny_checkpoint: Path, capsys) -> None:
    LLM(tiny_checkpoint, device="cpu", max_model_len=256)
    shown = capsys.readouterr().err
    for part in (
        "device cpu, dtype float32", "context 256", "seed 0", "batch invariance not asked for",
        "no drafting: nextn 0 instead of 5, the checkpoint has no draft stages",
        # the dependency cone of 8 layers with windows of 16: 8 x 15
        "prefix caching exact, a hit without a stored window computes 120 tokens again; up to 64 windows kept in",
        "cache records float32, 196,608 bytes per block", "every token of a prompt runs through every layer",
        "plain loop, queue first-come, preempted sequences are computed again",
    ):  # fmt: skip
        assert part in shown


def test_settings_that_are_approximations_say_so(tiny_checkpoint: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "compact")
    LLM(
        tiny_checkpoint, device="cpu", dtype="bfloat16", max_model_len=256, prefix_mode="bounded", overlap=True,
        queue_policy="fair", window_store_bytes=0, offload_bytes=1 << 20,
    )  # fmt: skip
    shown = capsys.readouterr().err
    for part in (
        "prefix caching bounded, a hit without a stored window computes 16 tokens again, an approximation; no windows",
        "cache records packed, 27,136 bytes per block", "run on a prompt's last 140 tokens, an approximation",
        "overlapped loop, queue fair, preempted sequences of 1024 tokens or more go to 1.0 MiB",
    ):  # fmt: skip
        assert part in shown
    LLM(tiny_checkpoint, device="cpu", max_model_len=256, enable_prefix_caching=False, yoco_truncation="off")
    shown = capsys.readouterr().err
    assert "prefix caching off" in shown and "every token of a prompt runs through every layer" in shown


def test_a_refusal_names_the_nearest_setting_that_works(tiny_checkpoint: Path) -> None:
    for arguments, advice in (
        ({"kv_format": "packed"}, 'use kv_format "float32", or dtype "bfloat16"'),
        ({"yoco_truncation": "compact", "yoco_keep_tokens": 21}, "whole number >= 22"),
        (
            {"yoco_truncation": "compact", "yoco_keep_tokens": 65537},
            "65537 is more than the model's 65536 positions, .*; use at most that",
        ),
        ({"offload_bytes": 196_607}, "196,607 bytes do not hold one block of 196,608; use at least that, or 0"),
        ({"prefix_mode": "off"}, "prefix_mode: .* enable_prefix_caching=False"),
        ({"window_store_bytes": 1000}, "do not hold one window of 65,536; use at least that, or 0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "raise the first or lower the second"),
        ({"num_blocks": 1}, r"use num_blocks >= 2 or max_model_len <= 128"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=advice):
            LLM(tiny_checkpoint, verbose=False, **{"max_model_len": 256} | arguments)


def test_context_shrinks_to_the_memory_unless_it_was_asked_for() -> None:
    options = {"context": 1 << 20, "max_num_seqs": 4, "max_num_batched_tokens": 64, "bytes_per_block": 1000}
    config = fit(**options, max_model_len=None, memory=10_000)
    assert (config.num_blocks, config.max_model_len) == (10, 1280)
    with pytest.raises(ValueError, match="max_model_len <= 1280"):
        fit(**options, max_model_len=2000, memory=10_000)
    assert fit(**options, max_model_len=200, memory=10**9).num_blocks == 8  # 4 sequences of 2 blocks


def test_memory_is_divided_so_that_no_part_starves_another() -> None:
    options = {"device_free": 800, "device_total": 1000, "gpu_memory_utilization": 0.9, "host_free": 1600}
    none = {"window_store_bytes": None, "offload_bytes": None}
    # a CPU: a quarter of the free memory for all of it, an eighth of that for windows; a GPU: the host's is extra
    assert divide_memory(**options, **none, device_type="cpu") == (350, 50, 0)
    assert divide_memory(**options, **none, device_type="cuda") == (700, 100, 100)
    asked = {"window_store_bytes": 0, "offload_bytes": 300}
    assert divide_memory(**options, **asked, device_type="cpu") == (100, 0, 300)
    with pytest.raises(ValueError, match=r"offload_bytes: 401 .* use at most 350"):
        divide_memory(**options, window_store_bytes=50, offload_bytes=401, device_type="cpu")
    with pytest.raises(ValueError, match=r"window_store_bytes: 1,601 .* use at most 1,500"):
        divide_memory(**options, window_store_bytes=1601, offload_bytes=None, device_type="cuda")


def test_no_more_windows_are_kept_than_blocks_that_they_could_belong_to() -> None:
    options = {"context": 1 << 20, "max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 64,
               "bytes_per_block": 1000, "memory": 10_000}  # fmt: skip
    assert fit(**options, bytes_per_window=100, window_memory=250).window_entries == 2
    assert fit(**options, bytes_per_window=100, window_memory=10**9).window_entries == 4
    assert fit(**options, window_memory=10**9).window_entries == 0


def test_a_cache_larger_than_the_memory_is_refused_before_it_is_made() -> None:
    options = {"context": 1 << 20, "max_model_len": 128, "max_num_batched_tokens": 64, "bytes_per_block": 1000}
    with pytest.raises(ValueError, match=r"max_num_seqs: 30 .* at most 20 fit"):
        fit(**options, max_num_seqs=30, bytes_per_slot=500, memory=10_000)
    with pytest.raises(ValueError, match=r"num_blocks: 9 .* at most 8 do"):
        fit(**options, max_num_seqs=4, bytes_per_slot=500, memory=10_000, num_blocks=9)
    assert fit(**options, max_num_seqs=4, bytes_per_slot=500, memory=10_000, num_blocks=8).num_blocks == 8


def test_what_a_step_stages_is_taken_from_the_memory_for_blocks() -> None:
    options = {"context": 1 << 20, "max_model_len": 128, "max_num_seqs": 4, "bytes_per_block": 1000,
               "bytes_per_slot": 500, "memory": 10_000, "bytes_per_step_token": 50}  # fmt: skip
    assert fit(**options, max_num_batched_tokens=100, num_blocks=3).num_blocks == 3  # 10,000 - 4 x 500 - 100 x 50
    with pytest.raises(ValueError, match=r"num_blocks: 4 .* at most 3 do"):
        fit(**options, max_num_batched_tokens=100, num_blocks=4)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens: 201 .* 10,050 bytes .* at most 200 fit"):
        fit(**options, max_num_batched_tokens=201)
    with pytest.raises(ValueError, match=r"max_num_seqs: 4 .* 1,000 are free .* at most 2 fit"):
        fit(**options, max_num_batched_tokens=180)


def test_staging_bytes_are_what_a_full_step_makes_the_pool_grow_by(tiny_checkpoint: Path) -> None:
    assert staging_bytes(preset("flash"), "packed", 32_768) == 692_060_160
    llm = LLM(tiny_checkpoint, max_model_len=512, max_num_batched_tokens=256, verbose=False)
    rings = llm.engine.core.loop._runner.storage.windows
    ask(llm, [LONG], GREEDY)  # 256 rows at once, and then fewer
    grown = rings.pool[:, rings.staging :]
    assert grown.numel() * grown.element_size() == staging_bytes(llm.config, "float32", 256)


def test_fewer_blocks_are_left_where_steps_are_larger(tiny_checkpoint: Path, monkeypatch) -> None:
    """Both engines in the same memory: the difference is the rows that the larger step stages."""
    config = preset("tiny")
    per_block = block_bytes(config, "float32")
    monkeypatch.setattr("deepinfer.engine.build.free_memory", lambda _: (1 << 28, 1 << 28))
    blocks = []
    for batched in (64, 4096):
        settings = resolve_settings(EngineArguments(device="cpu", max_num_seqs=4, max_num_batched_tokens=batched))
        blocks.append(engine_config(settings, config).num_blocks)
    difference = staging_bytes(config, "float32", 4096) - staging_bytes(config, "float32", 64)
    assert abs((blocks[0] - blocks[1]) * per_block - difference) < per_block


def test_environment_gives_the_defaults(monkeypatch) -> None:
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "cpu")
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "0")
    monkeypatch.setenv("DEEPINFER_ENABLE_MTP_VARLEN", "0")
    settings = resolve_settings(EngineArguments())
    assert (settings.device.type, settings.dtype, settings.notes) == ("cpu", "float32", ())
    assert (settings.nextn, settings.nextn_asked, settings.varlen, settings.batch_invariant) == (0, False, False, False)
    settings = resolve_settings(EngineArguments(nextn=3, mtp_varlen=True))
    assert (settings.nextn, settings.nextn_asked, settings.varlen) == (3, True, True)


def test_keep_tokens_without_truncation_are_said_to_be_without_effect(tiny_checkpoint: Path, capsys) -> None:
    LLM(tiny_checkpoint, device="cpu", max_model_len=256, yoco_keep_tokens=1 << 30)
    assert 'yoco_keep_tokens 1073741824 without effect: yoco_truncation is "off"' in capsys.readouterr().err


def test_who_wants_no_settings_printed_is_still_told_which_have_no_effect(
    tiny_checkpoint: Path, caplog, capsys
) -> None:
    wish = {"device": "cpu", "max_model_len": 256, "yoco_keep_tokens": 1 << 30, "wide_outputs": True}
    expected = [
        'yoco_keep_tokens 1073741824 without effect: yoco_truncation is "off"',
        "wide_outputs without effect: no GPU kernels read it",
    ]
    LLM(tiny_checkpoint, verbose=False, **wish)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == expected
    assert capsys.readouterr().err == ""
    caplog.clear()
    ModelCore.of(tiny_checkpoint, **wish)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == expected
    caplog.clear()
    LLM(tiny_checkpoint, verbose=True, **wish)  # prints them
    assert not caplog.records


def test_decode_perplexity_comes_from_the_token_logprobs(llm) -> None:
    (output,) = ask(llm, PROMPTS[:1], GREEDY)
    values = output.outputs[0].token_logprobs
    assert math.exp(-sum(values) / len(values)) >= 1


def test_threads_share_an_llm_and_get_what_they_would_get_alone(llm, together) -> None:
    """Four callers at once: their requests are batched, nobody's tokens change, nothing is left behind."""
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(ask, llm, [p], params) for p, params in zip(PROMPTS, SEEDED, strict=True)]
        answers = [call.result(timeout=120)[0] for call in calls]
    assert tokens(answers) == tokens(together)


@pytest.mark.parametrize(
    "given, named",
    [
        ({"prompts": "a\ud800b"}, "prompt 0, prompt: character 1 is a lone surrogate"),
        ({"prompt_token_ids": "hello"}, "prompt_token_ids: holds text"),
        ({"prompt_token_ids": ["hello"]}, "prompt_token_ids: holds text"),
    ],
)
def test_text_that_is_no_text_and_text_in_place_of_ids_are_named(llm, given, named) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        llm.generate(**given, use_tqdm=False)


@pytest.mark.parametrize("name", ["max_num_seqs", "num_blocks", "max_model_len"])
@pytest.mark.parametrize("value", [0, -5, 1.5, "a", True])
def test_a_size_that_is_no_whole_number_is_named_before_anything_is_loaded(tiny_checkpoint: Path, name, value) -> None:
    with pytest.raises(ValueError, match=f"^{name}: must be a whole number >= 1"):
        LLM(tiny_checkpoint, **{name: value}, verbose=False)


def test_switches_that_do_nothing_yet_are_named_at_start(tiny_checkpoint: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("DEEPINFER_MOE_LB_STAT_INTERVAL", "1")
    LLM(tiny_checkpoint, device="cpu", max_model_len=256)
    assert "without effect, not built yet: DEEPINFER_MOE_LB_STAT_INTERVAL" in capsys.readouterr().err
