"""What a caller reads of a request, whatever the engine core says and however late it says it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Letters, drain, make_engine, tokens

from deepinfer.engine.admission import check_token_ids
from deepinfer.engine.errors import InvalidRequestError
from deepinfer.engine.frontend import OutputProcessor
from deepinfer.engine.messages import EngineRequest
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.engine.step_output import FINISH_CODE, NO_TOKEN, PromptScores, Rounds, SequenceEvent, StepOutput
from deepinfer.engine.stop import FinishReason


class Spelling:
    """A text stream in which an id is its character; '!' breaks it, as a damaged tokenizer would."""

    def push(self, token_id: int) -> str:
        if chr(token_id) == "!":
            raise KeyError("no such piece")
        return chr(token_id)

    def finish(self) -> str:
        return ""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def processor(clock: Clock | None = None) -> OutputProcessor:
    return OutputProcessor(lambda skip: Spelling(), clock or Clock())


def submit(front: OutputProcessor, number: int, prompt: str = "ab", **params) -> None:
    own = SamplingParams(**params)
    ids = np.array([ord(c) for c in prompt], np.int32)
    front.add(
        EngineRequest(
            number=number, request_id=f"r{number}", prompt_token_ids=ids, params=own, max_tokens=own.max_tokens or 99
        ),
        prompt=prompt,
    )


def said(*rows: tuple, events=(), scores=(), top=None, rounds=()) -> StepOutput:
    """rows: (number, index, character or None, reason or None). rounds: (number, index, drafted, accepted)."""
    predicted = [[0.5] * drafted + [float("nan")] * (5 - drafted) for _, _, drafted, _ in rounds]
    return StepOutput(
        numbers=np.array([row[0] for row in rows], np.int64),
        indices=np.array([row[1] for row in rows], np.int32),
        token_ids=np.array([NO_TOKEN if row[2] is None else ord(row[2]) for row in rows], np.int64),
        logprobs=np.array([-0.5 for _ in rows], np.float32),
        finish=np.array([FINISH_CODE[row[3]] if row[3] else 0 for row in rows], np.int8),
        top=top,
        events=list(events),
        prompt_scores=list(scores),
        rounds=Rounds(
            numbers=np.array([row[0] for row in rounds], np.int64),
            indices=np.array([row[1] for row in rounds], np.int32),
            drafted=np.array([row[2] for row in rounds], np.int64),
            accepted=np.array([row[3] for row in rounds], np.int64),
            predicted=np.array(predicted, np.float32).ravel(),
        )
        if rounds
        else None,
    )


def test_a_reader_of_deltas_need_not_have_the_answer_kept() -> None:
    """An answer of 100,000 tokens with 20 log-probabilities each would take 300 MB beside what was sent."""
    clock = Clock()
    fronts = [OutputProcessor(None, clock, keep=keep) for keep in (True, False)]
    for front in fronts:
        clock.now = 0.0
        submit(front, 1, logprobs=1)
        for step in range(600):
            clock.now = float(step)
            said_now = said(
                (1, 0, "a", None), (1, 0, "b", None), top=[{97: -0.5}] * 2, rounds=[(1, 0, step % 6, min(step % 6, 1))]
            )
            ((delta,), _) = front.process(said_now)
            assert (delta.token_ids, delta.logprobs) == ([97, 98], [{97: -0.5}] * 2)
            completion = front._answers[1].completions[0]
            assert front is fronts[0] or not completion.token_ids + completion.logprobs + completion.top_logprobs
            assert front is fronts[0] or len(completion.draft_tok) < 300
        front.process(said((1, 0, "c", FinishReason.LENGTH), top=[{99: -0.5}]))
    kept, counted = (front.pop_output("r1") for front in fronts)
    assert counted.outputs[0].num_tokens == kept.outputs[0].num_tokens == len(kept.outputs[0].token_id) == 1201
    assert counted.metrics == kept.metrics and counted.metrics.drafts.rounds == 600
    assert counted.outputs[0].finish_reason == "length" and counted.prompt_token_ids == []


def test_rounds_of_drafts_are_counted_per_step_and_per_completion() -> None:
    front = processor()
    submit(front, 1, n=2)
    front.process(said((1, 0, "a", None), (1, 1, "A", None)))
    deltas, _ = front.process(
        said(*((1, 0, character, None) for character in "bcd"), (1, 1, "B", None), rounds=[(1, 0, 4, 2), (1, 1, 3, 0)])
    )
    assert [(delta.index, delta.text) for delta in deltas] == [(0, "bcd"), (1, "B")]
    front.process(
        said((1, 0, "e", "length"), (1, 1, "C", None), (1, 1, "D", "stop"), rounds=[(1, 0, 0, 0), (1, 1, 1, 1)])
    )
    output = front.pop_output("r1")
    first, second = output.outputs
    assert (first.draft_tok, first.accept_tok) == ([4, 0], [2, 0])
    assert (second.draft_tok, second.accept_tok) == ([3, 1], [0, 1])
    drafts = output.metrics.drafts
    assert (drafts.rounds, drafts.drafted, drafts.accepted) == (4, 8, 3)
    assert drafts.verified_at == [3, 2, 2, 1, 0] and drafts.accepted_at == [2, 1, 0, 0, 0]
    assert drafts.calibration_error == pytest.approx(abs(8 * 0.5 - 3) / 8)


def test_drafts_behind_a_stop_string_were_verified_but_are_no_output_and_later_rounds_do_not_count() -> None:
    front = processor()
    submit(front, 1, stop="xy")
    front.process(said((1, 0, "a", None)))
    _, aborts = front.process(said(*((1, 0, character, None) for character in "xyzzz!"), rounds=[(1, 0, 5, 5)]))
    assert aborts == [(1, 0)]  # the core does not know, and what breaks the stream behind the end is never read
    front.process(said((1, 0, "q", None), rounds=[(1, 0, 5, 0)]))
    output = front.pop_output("r1")
    assert output.outputs[0].text == "a" and output.outputs[0].token_id == [ord(c) for c in "axy"]
    assert (output.outputs[0].draft_tok, output.outputs[0].accept_tok) == ([5], [2])


def test_all_completions_may_end_in_one_step_and_one_of_them_badly() -> None:
    front = processor()
    submit(front, 1, n=3)
    deltas, aborts = front.process(
        said((1, 0, "a", "stop"), (1, 1, "!", "length"), (1, 2, "c", None), rounds=[(1, 0, 2, 0), (1, 1, 1, 0)])
    )
    assert aborts == [(1, None)]
    output = front.pop_output("r1")
    assert [c.finish_reason for c in output.outputs] == ["stop", "error", "error"]
    assert not front.has_unfinished and {delta.index for delta in deltas} == {0, 1, 2}


def test_a_stop_string_ends_the_sequence_here_and_asks_the_core_to_stop_it() -> None:
    front = processor()
    submit(front, 1, stop="xy")
    shown, asked = "", []
    for character in "12xy34":  # the core is some steps ahead and does not know
        deltas, aborts = front.process(said((1, 0, character, None)))
        shown += "".join(delta.text for delta in deltas)
        asked += aborts
    output = front.pop_output("r1").outputs[0]
    assert shown == output.text == "12"
    assert asked == [(1, 0)]
    assert output.token_id == [ord(c) for c in "12xy"]
    assert (output.finish_reason, output.stop_reason) == ("stop", "xy")


def test_a_stop_string_that_the_last_token_completes_wins_over_the_length() -> None:
    front = processor()
    submit(front, 1, stop="2", max_tokens=2)
    deltas, aborts = front.process(said((1, 0, "1", None), (1, 0, "2", FinishReason.LENGTH)))
    assert deltas[0].finish_reason == "stop"
    assert aborts == []  # the core ended it itself
    assert not front.has_unfinished


def test_a_stop_token_leaves_no_text_and_a_stop_string_in_it_does_not_count() -> None:
    front = processor()
    submit(front, 1, stop="b", stop_token_ids=[ord("b")])
    front.process(said((1, 0, "a", None), (1, 0, "b", FinishReason.STOP)))
    output = front.pop_output("r1").outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", ord("b"))


def test_held_back_text_comes_out_when_something_else_ends_the_sequence() -> None:
    for reason in (FinishReason.LENGTH, FinishReason.DEADLINE):
        front = processor()
        submit(front, 1, stop="123")
        front.process(said((1, 0, "1", None)))
        deltas, _ = front.process(said((1, 0, "2" if reason is FinishReason.LENGTH else None, reason)))
        assert deltas[0].text == ("12" if reason is FinishReason.LENGTH else "1")
        assert front.pop_output("r1").outputs[0].finish_reason == str(reason)


def test_an_error_in_one_requests_text_ends_that_request_alone(caplog) -> None:
    front = processor()
    submit(front, 1, n=2)
    submit(front, 2)
    deltas, aborts = front.process(
        said((1, 0, "a", None), (2, 0, "b", None), (1, 1, "!", None), (1, 0, "c", None), (2, 0, "d", None))
    )
    assert aborts == [(1, None)]
    assert {(d.request_id, d.index): (d.text, d.finish_reason) for d in deltas} == {
        ("r1", 0): ("a", "error"),
        ("r1", 1): ("", "error"),
        ("r2", 0): ("bd", None),
    }
    output = front.pop_output("r1")
    assert output.error == "KeyError: 'no such piece'" and output.outputs[0].text == "a"
    assert "r1" in caplog.text and "no such piece" in caplog.text
    assert front.unfinished() == ["r2"]
    front.process(said((2, 0, "e", FinishReason.LENGTH)))
    assert front.pop_output("r2").outputs[0].text == "bde"


class Unfinishable(Spelling):
    def finish(self) -> str:
        raise RuntimeError("half a character")


def test_an_error_while_an_aborted_request_is_closed_leaves_nothing_behind() -> None:
    front = OutputProcessor(lambda skip: Unfinishable(), Clock())
    submit(front, 1, n=2)
    assert [delta.finish_reason for delta in front.end("r1", FinishReason.ABORT)] == ["error", "error"]
    assert not front.has_unfinished and front.pop_output("r1").error == "RuntimeError: half a character"


def test_what_the_core_says_of_strangers_is_passed_over() -> None:
    front = processor()
    submit(front, 1)
    assert front.end("r1", FinishReason.ABORT)[0].finish_reason == "abort"
    late = said((1, 0, "x", None), (9, 3, "y", None), events=[SequenceEvent(9, 0, "admitted")],
                scores=[PromptScores(9, [{}])])  # fmt: skip
    assert front.process(late) == ([], [])
    assert front.pop_output("r1").outputs[0].token_id == []


def test_several_tokens_of_a_step_make_one_delta() -> None:
    front = processor()
    submit(front, 1, logprobs=1)
    (delta,), _ = front.process(
        said((1, 0, "a", None), (1, 0, "b", None), (1, 0, "c", FinishReason.LENGTH), top=[{97: -1.0}, {98: -2.0}, {}])
    )
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("abc", [97, 98, 99], "length")
    assert delta.logprobs == [{97: -1.0}, {98: -2.0}, {}] == front.pop_output("r1").outputs[0].logprobs
    assert delta.token_logprobs == [-0.5] * 3


def test_times_and_counts_are_those_of_the_caller() -> None:
    clock = Clock()
    front = processor(clock)
    clock.now = 10.0
    submit(front, 1, prompt_logprobs=0)
    clock.now = 12.0
    front.process(said((1, 0, "a", None), events=[SequenceEvent(1, 0, "admitted", 256, 128, 1.5)],
                       scores=[PromptScores(1, [{98: -3.0}])]))  # fmt: skip
    clock.now = 13.0
    front.process(said((1, 0, "b", None), events=[SequenceEvent(1, 0, "preempted")]))
    clock.now = 16.0
    front.process(said((1, 0, "c", FinishReason.LENGTH), events=[SequenceEvent(1, 0, "admitted", 128, 16, 9.0)]))
    output = front.pop_output("r1")
    metrics = output.metrics
    assert (metrics.queue, metrics.ttft, metrics.tbt) == (1.5, 2.0, 2.0)
    assert (output.cached_tokens, metrics.replay_tokens, metrics.preemptions) == (256, 144, 1)
    assert output.prompt_logprobs == [None, {98: -3.0}]
    with pytest.raises(KeyError):
        front.pop_output("r1")


def test_an_id_in_use_is_refused_until_its_output_is_taken() -> None:
    front = processor()
    submit(front, 1)
    with pytest.raises(ValueError, match="already in use"):
        submit(front, 1)
    front.process(said((1, 0, "a", FinishReason.LENGTH)))
    with pytest.raises(ValueError, match="already in use"):
        submit(front, 1)
    front.forget("r1")
    submit(front, 1)


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("ab", max_size=12),
    stop=st.text("ab", min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 4), max_size=12),
)
def test_steps_of_any_size_give_the_same_text(text: str, stop: str, cuts: list[int]) -> None:
    """Drafting brings several tokens in a step, and the overlapped loop tokens after the end."""
    front = processor()
    submit(front, 1, stop=stop)
    shown, at = "", 0
    for size in [*cuts, *[1] * len(text)]:
        deltas, _ = front.process(said(*((1, 0, character, None) for character in text[at : at + size])))
        shown += "".join(delta.text for delta in deltas)
        at += size
    shown += "".join(delta.text for delta in front.end("r1", FinishReason.ABORT))
    before, found, _ = text.partition(stop)
    output = front.pop_output("r1").outputs[0]
    assert shown == output.text == before
    assert output.finish_reason == ("stop" if found else "abort")
    assert len(output.token_id) == len(before + found)


# -- behind it, a real engine core -------------------------------------------------------------------------------------


class Damaged(Letters):
    """Text that breaks at the third token."""

    def __init__(self) -> None:
        self.pushed = 0

    def push(self, token_id: int) -> str:
        self.pushed += 1
        if self.pushed == 3:
            raise ZeroDivisionError("damaged")
        return super().push(token_id)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_broken_text_ends_its_request_frees_it_and_leaves_the_others_their_tokens(overlap: bool, n: int) -> None:
    engine = make_engine(overlap=overlap, detokenizer=lambda skip: Letters() if skip else Damaged())
    greedy = SamplingParams(temperature=0, max_tokens=12)
    engine.add_request("bad", [3, 4], greedy.with_changes(skip_special_tokens=False, n=n, seq_seed=1, temperature=1))
    engine.add_request("good", [5, 6], greedy)
    engine.add_request("alone", [5, 6], greedy)
    while engine.is_unfinished("bad"):
        engine.step()
    assert engine.cache.num_free_slots >= engine.cache.max_num_seqs - 2  # only the two others hold one
    drain(engine)
    bad = engine.pop_output("bad")
    assert bad.error == "ZeroDivisionError: damaged"
    assert {completion.finish_reason for completion in bad.outputs} == {"error"}
    good = tokens([engine.pop_output("good"), engine.pop_output("alone")])
    assert good[0] == good[1] and len(good[0][0]) == 12
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


@pytest.mark.parametrize(
    ("field", "given"), [("request_id", 7), ("request_id", "x" * 257), ("tenant", "a\ud800"), ("salt", None)]
)
def test_a_name_that_cannot_be_sent_is_refused_at_the_door(field: str, given: object) -> None:
    engine = make_engine()
    options = {"request_id": "a"} | {field: given}
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        engine.add_request(options.pop("request_id"), [3], SamplingParams(), **options)  # type: ignore[arg-type]
    assert not engine.has_unfinished


def test_a_request_that_the_core_refuses_leaves_no_trace() -> None:
    engine = make_engine()
    engine.core.drain()
    with pytest.raises(InvalidRequestError, match="shutting down"):
        engine.add_request("a", [3], SamplingParams())
    assert not engine.has_unfinished and not engine.outputs.is_known("a")


def test_a_million_ids_pass_the_door_in_a_blink_and_the_wrong_one_is_named() -> None:
    ids = [7] * 1_000_000
    begin = time.perf_counter()
    check_token_ids("prompt_token_ids", ids, 129_280, {})
    assert time.perf_counter() - begin < 1.0  # 60 ms on an idle core
    for wrong, said_of_it in ((129_280, "must be a whole number"), (True, "got True"), (5, "id 5 stands for")):
        ids[777_777] = wrong
        with pytest.raises(InvalidRequestError, match=f"entry 777777.*{said_of_it}"):
            check_token_ids("prompt_token_ids", ids, 129_280, {5: "stands for a picture"})


def test_requests_of_another_salt_share_no_prefix() -> None:
    """A tenant must not learn from the speed of an answer what somebody else has asked."""
    engine = make_engine(prefix_caching="exact", window_entries=8)
    cached = []
    for name, salt in (("a", "mine"), ("b", "mine"), ("c", "yours"), ("d", "")):
        engine.add_request(name, [3, 4] * 150, SamplingParams(temperature=0, max_tokens=2), salt=salt)
        drain(engine)
        cached.append(engine.pop_output(name).cached_tokens)
    assert cached == [0, 256, 0, 0]


def test_ending_one_completion_leaves_the_others_and_a_second_end_says_nothing() -> None:
    front = processor()
    submit(front, 1, n=2)
    front.process(said((1, 0, "a", None), (1, 1, "A", None)))
    (end,) = front.end("r1", FinishReason.STOP, 0)
    assert (end.index, end.finish_reason) == (0, "stop")
    assert front.end("r1", FinishReason.STOP, 0) == [] and front.is_unfinished("r1")
    deltas, aborts = front.process(said((1, 0, "b", None), (1, 1, "B", "length")))
    assert [(delta.index, delta.text) for delta in deltas] == [(1, "B")] and aborts == []
    output = front.pop_output("r1")
    assert [(c.text, c.finish_reason) for c in output.outputs] == [("a", "stop"), ("AB", "length")]
