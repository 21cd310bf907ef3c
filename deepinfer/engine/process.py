"""What happens to a sampled token: append, detokenise, test for an end (spec/engine.md 4.8)."""

from collections.abc import Set

from deepinfer.engine.outputs import SequenceDelta
from deepinfer.engine.request import Sequence
from deepinfer.engine.stop import FinishReason


def accept_token(
    sequence: Sequence,
    token_id: int,
    logprob: float,
    top: dict[int, float] | None,
    now: float,
    eos_token_ids: Set[int],
) -> SequenceDelta:
    """Adds a token and ends the sequence if it must end; the caller frees it when finish_reason is set.

    Order of the tests: stop token or end token, stop strings in the text, length. A stop or end token stays in
    token_id and leaves no text unless include_stop_str_in_output. min_tokens needs no test here for tokens: the
    sampler may not draw them before it.
    """
    params = sequence.request.params
    sequence.token_ids.append(token_id)
    sequence.logprobs.append(logprob)
    if top is not None:
        sequence.top_logprobs.append(top)
    if sequence.history is not None:
        sequence.history.add(token_id)
    if sequence.first_token_time is None:
        sequence.first_token_time = now
    sequence.last_token_time = now

    is_stop = token_id in params.stop_token_ids
    if is_stop or (token_id in eos_token_ids and not params.ignore_eos):
        sequence.stop_reason = token_id if is_stop else None
        shown = ""
        if params.include_stop_str_in_output and sequence.detokenizer is not None:
            shown, _ = sequence.text.push(sequence.detokenizer.push(token_id), may_stop=False)
        return end(sequence, FinishReason.STOP, shown, [token_id])

    text = ""
    if sequence.detokenizer is not None:
        may_stop = sequence.num_output > params.min_tokens  # a stop comes after min_tokens tokens, as a stop token does
        text, stopped = sequence.text.push(sequence.detokenizer.push(token_id), may_stop)
        if stopped is not None:
            sequence.stop_reason = stopped
            sequence.finish_reason = FinishReason.STOP
            return _delta(sequence, text, [token_id])
    if sequence.num_output >= sequence.request.max_tokens:
        return end(sequence, FinishReason.LENGTH, text, [token_id])
    return _delta(sequence, text, [token_id])


def end(sequence: Sequence, reason: FinishReason, text: str = "", token_ids: list[int] | None = None) -> SequenceDelta:
    """Gives the sequence its finish reason and releases the text that was held back."""
    sequence.finish_reason = reason
    if sequence.detokenizer is not None:
        released, _ = sequence.text.push(sequence.detokenizer.finish(), may_stop=False)
        text += released
    text += sequence.text.finish()
    return _delta(sequence, text, token_ids or [])


def _delta(sequence: Sequence, text: str, token_ids: list[int]) -> SequenceDelta:
    reason = sequence.finish_reason
    return SequenceDelta(
        sequence.request.request_id, sequence.index, text, token_ids, None if reason is None else str(reason)
    )
