"""Structured output under everything that the engine does to a sequence: the toy grammar of toy_grammar.py, a model
without weights, the real cache, the real runner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integrity import assert_all_free
from scripted import DEFAULTS, EOS, ScriptedModel, drain, make_engine, noise_row, run, tokens
from torch import Tensor
from toy_grammar import GATE, EmptyPairs, FailingPairs, Pairs, ToyCompiler, is_sentence, pairs

from deepinfer.engine.engine import Engine
from deepinfer.engine.errors import InvalidRequestError
from deepinfer.engine.grammars import Grammars
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.grammar.structure import Structure


@pytest.fixture(autouse=True, params=["plain", "overlapped", "drafts", "overlapped with drafts"], scope="module")
def loop(request) -> Iterator[str]:
    """Every test holds under both loops, with drafts and without."""
    DEFAULTS["overlap"] = "overlapped" in request.param
    DEFAULTS["drafts"] = 5 if "drafts" in request.param else 0
    yield request.param
    DEFAULTS["overlap"], DEFAULTS["drafts"] = False, 0


def gated_row(token: int, position: int) -> Tensor:
    """Logits of a model that closes its reasoning now and then."""
    row = noise_row(token, position)
    row[GATE] = 8.0 if position % 7 == 0 else -30.0
    return row


def engine_of(compiler: ToyCompiler | None = None, **options) -> Engine:
    return make_engine(ScriptedModel(gated_row), grammars=Grammars(compiler or ToyCompiler()), **options)


def asks(count: int, thinking: bool = False, **fields) -> SamplingParams:
    return SamplingParams(structure=pairs(count, thinking), **{"max_tokens": 100} | fields)


PROMPTS = [[5, 6], [9], [11, 12, 13], [30, 31, 32, 33], [8] * 20, [40]]
ASKED = [
    asks(3, temperature=0),
    asks(2, True, seq_seed=1),
    asks(9, True, temperature=0, frequency_penalty=0.4),
    asks(0, True, seq_seed=2, top_p=0.8),
    asks(6, seq_seed=3, n=3, min_p=0.02),
    asks(4, seq_seed=4, logit_bias={EOS: -50.0}, min_tokens=30),  # both give way
]
FREE = SamplingParams(seq_seed=9, max_tokens=25, repetition_penalty=1.2)


def assert_whole(outputs) -> None:
    for output, params in zip(outputs, ASKED, strict=True):
        for completion in output.outputs:
            assert params.structure is not None and params.structure.content is not None
            count, thinking = int(params.structure.content.source), params.structure.thinking
            assert completion.finish_reason == "stop"
            assert is_sentence(completion.token_id, count, thinking), completion.token_id


@pytest.fixture(scope="module")
def lone(loop) -> list[list[list[int]]]:
    """Each request in an engine of its own, without drafts, in the plain loop."""
    engines = (engine_of(drafts=0, overlap=False) for _ in PROMPTS)
    return [tokens(run(engine, [p], own))[0] for engine, p, own in zip(engines, PROMPTS, ASKED, strict=True)]


def test_every_answer_is_a_sentence_and_drafts_batch_mates_and_loops_change_no_token(lone) -> None:
    engine = engine_of(max_num_seqs=5)
    outputs = run(engine, [*PROMPTS, [7, 7]], [*ASKED, FREE])
    assert_whole(outputs[:-1])
    assert tokens(outputs[:-1]) == lone
    assert_all_free(engine.cache)
    engine.core.shutdown()


def test_a_neighbour_without_a_structure_says_what_it_says_alone() -> None:
    engine = engine_of(max_num_seqs=8)
    mixed = tokens(run(engine, [*PROMPTS, [7, 7], [5, 6]], [*ASKED, FREE, FREE]))[-2:]
    assert mixed == tokens(run(engine_of(), [[7, 7], [5, 6]], FREE))
    engine.core.shutdown()


@pytest.mark.parametrize("blocks", [3, 4])
@pytest.mark.parametrize("mode", ["recomputed", "offloaded"])
def test_a_preempted_answer_goes_on_where_it_was(mode: str, blocks: int) -> None:
    """Prompts of 110 tokens and sentences of 41: all need a second block, and there are not enough."""
    prompts = [[10 + i] * 110 for i in range(4)]
    params = [asks(20 - i, seq_seed=i, temperature=0 if i == 0 else 1) for i in range(4)]
    offload = {"offload_bytes": 8192, "offload_tokens": 1} if mode == "offloaded" else {}
    tight, roomy = (engine_of(num_blocks=count, max_model_len=256, **offload) for count in (blocks, 16))
    outputs = run(tight, prompts, params)
    assert tokens(outputs) == tokens(run(roomy, prompts, params))
    for i, output in enumerate(outputs):
        assert is_sentence(output.outputs[0].token_id, 20 - i)
    assert tight.scheduler.num_preemptions > 0 and roomy.scheduler.num_preemptions == 0
    assert (tight.scheduler.num_offloaded > 0) == (mode == "offloaded")
    assert_all_free(tight.cache)
    for engine in (tight, roomy):
        engine.core.shutdown()


def test_prefix_hits_leave_the_structure_to_the_output() -> None:
    engine = engine_of(prefix_caching="exact", window_entries=4, max_num_seqs=2, max_model_len=400)
    prompt = [10, 11] * 150
    cold = run(engine, [prompt], asks(8, True, seq_seed=1))[0]
    hot = run(engine, [prompt, prompt], asks(8, True, seq_seed=1))
    assert all(output.cached_tokens > 0 for output in hot)
    for output in (cold, *hot):
        assert output.outputs[0].token_id == cold.outputs[0].token_id
        assert is_sentence(output.outputs[0].token_id, 8, True)
    engine.core.shutdown()


def test_completions_that_find_no_room_beside_their_prompt_have_the_structure_too() -> None:
    engine = engine_of(max_num_seqs=2)
    (output,) = run(engine, [[5, 6]], asks(5, True, n=7, seq_seed=3))
    assert all(is_sentence(completion.token_id, 5, True) for completion in output.outputs)
    assert tokens([output]) == tokens(run(engine_of(max_num_seqs=8), [[5, 6]], asks(5, True, n=7, seq_seed=3)))
    engine.core.shutdown()


def test_a_limit_cuts_an_answer_short_and_says_so() -> None:
    engine = engine_of()
    (output,) = run(engine, [[5, 6]], asks(20, temperature=0, max_tokens=9))
    assert output.outputs[0].finish_reason == "length"
    assert is_sentence([*output.outputs[0].token_id[:8], EOS], 4)
    engine.core.shutdown()


# -- while it is compiled ---------------------------------------------------------------------------------------------


def test_who_waits_for_a_grammar_is_passed_by_and_starts_when_it_is_there() -> None:
    compiler = ToyCompiler(held=True)
    engine = engine_of(compiler)
    engine.add_request("slow", [5, 6], asks(3, temperature=0))
    engine.add_request("free", [7, 7], FREE)
    while engine.is_unfinished("free"):
        engine.step()
        assert engine.core.stats().totals.waiting_by_reason == {"grammar": 1}
    assert engine.is_unfinished("slow")
    compiler.finish()
    drain(engine)
    assert is_sentence(engine.pop_output("slow").outputs[0].token_id, 3)
    engine.core.shutdown()


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_is_aborted_while_its_grammar_is_compiled_leaves_nothing(n: int) -> None:
    compiler = ToyCompiler(held=True)
    engine = engine_of(compiler)
    engine.add_request("a", [5, 6], asks(3, n=n))
    engine.step()
    assert engine.abort("a") and not engine.core.has_unfinished
    compiler.finish()
    assert not engine.core.step().numbers.size
    assert_all_free(engine.cache)
    engine.core.shutdown()


def test_a_deadline_ends_a_request_whose_grammar_is_not_ready() -> None:
    now = [0.0]
    compiler = ToyCompiler(held=True)
    engine = engine_of(compiler, clock=lambda: now[0])
    engine.add_request("a", [5, 6], asks(3, deadline=2.0))
    engine.add_request("b", [5, 6], asks(3, ttft_deadline=1.0))
    engine.step()
    now[0] = 3.0
    drain(engine)
    for name in "ab":
        output = engine.pop_output(name).outputs[0]
        assert output.finish_reason == "deadline" and output.token_id == []
    compiler.finish()
    assert_all_free(engine.cache)
    engine.core.shutdown()


@pytest.mark.parametrize("n", [1, 3])
def test_a_grammar_that_cannot_be_compiled_is_refused_by_name_and_nobody_else_notices(n: int) -> None:
    compiler = ToyCompiler(held=True)
    engine = engine_of(compiler)
    engine.add_request("bad", [5, 6], SamplingParams(regex="(", n=n))
    engine.add_request("good", [5, 6], asks(3, temperature=0))
    core_refused = []
    take = engine.core.take_refused
    engine.core.take_refused = lambda: core_refused.extend(out := take()) or out  # type: ignore[method-assign]
    engine.step()
    compiler.finish()
    drain(engine)
    ((number, name, error),) = core_refused
    assert (number, name, error.field) == (0, "bad", "regex") and "is not a number" in error.message
    assert [c.finish_reason for c in engine.pop_output("bad").outputs] == ["error"] * n
    assert is_sentence(engine.pop_output("good").outputs[0].token_id, 3)
    assert_all_free(engine.cache)
    engine.core.shutdown()


def test_an_engine_without_a_tokenizer_refuses_structure_at_the_door() -> None:
    engine = make_engine()
    for fields, name in (({"structure": pairs(3)}, "structure"), ({"json_schema": {}}, "json_schema")):
        with pytest.raises(InvalidRequestError, match=f"{name}: cannot be enforced: this engine has no tokenizer"):
            engine.add_request("a", [5], SamplingParams(**fields))
    run(engine, [[5]], SamplingParams(structure=Structure(), max_tokens=2))
    engine.core.shutdown()


# -- constraints that fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FailingPairs, EmptyPairs])
def test_a_constraint_that_fails_costs_its_own_sequence_and_nothing_else(kind: type[Pairs]) -> None:
    engine = engine_of(ToyCompiler(kind=kind), max_num_seqs=6)
    outputs = run(engine, [[5, 6], [5, 6], [7, 7]], [asks(1, temperature=0), asks(5, temperature=0), FREE])
    whole, cut, free = (output.outputs[0] for output in outputs)
    if kind is FailingPairs:
        assert whole.finish_reason == "stop" and is_sentence(whole.token_id, 1)
    said = cut.token_id
    assert cut.finish_reason == "error" and 2 <= len(said) <= 8
    assert all(token >= 4 and token % 2 == at % 2 for at, token in enumerate(said))
    assert free.token_id == tokens(run(engine_of(), [[7, 7]], FREE))[0][0]
    totals = engine.core.stats().totals
    assert totals.fsm_errors == 1 + (whole.finish_reason == "error") and totals.corrupted == 0
    assert_all_free(engine.cache)
    engine.core.shutdown()


def test_a_row_without_numbers_is_not_blamed_on_the_grammar() -> None:
    def row(token: int, position: int) -> Tensor:
        return gated_row(token, position) * (float("nan") if position >= 4 else 1.0)

    engine = make_engine(ScriptedModel(row), grammars=Grammars(ToyCompiler()))
    (output,) = run(engine, [[5, 6]], asks(9, temperature=0))
    assert output.outputs[0].finish_reason == "error"
    totals = engine.core.stats().totals
    assert (totals.fsm_errors, totals.corrupted) == (0, 1)
    engine.core.shutdown()
