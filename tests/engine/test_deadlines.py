"""Who is told that his time is over, and that nobody else is remembered for it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.deadlines import SPARE, Deadlines

times = st.floats(0.1, 100)


def test_a_busy_hour_is_not_remembered_request_by_request() -> None:
    deadlines = Deadlines(128)
    for number in range(10_000):
        deadlines.add(number, 0.1 * number, 3600.0, 60.0)
        if number >= 20:
            deadlines.forget(number - 20)
        assert len(deadlines._by_end) <= 2 * 21 + SPARE
    assert list(deadlines.over(4000.0)) == []
    assert list(deadlines.over(1e6)) == list(range(9980, 10_000))
    assert list(deadlines.over(1e9)) == [] and not deadlines._ends


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(times, times, st.booleans()), max_size=150), st.lists(times, max_size=5))
def test_each_request_that_is_late_and_has_not_ended_is_told_of_once_in_order(
    requests: list[tuple[float, float, bool]], looks: list[float]
) -> None:
    deadlines = Deadlines(128)
    for number, (arrival, deadline, _) in enumerate(requests):
        deadlines.add(number, arrival, deadline, None)
    for number, (_, _, ended) in enumerate(requests):
        if ended:
            deadlines.forget(number)
    told = [number for now in sorted(looks) for number in deadlines.over(now)]
    ends = {number: arrival + deadline for number, (arrival, deadline, ended) in enumerate(requests) if not ended}
    expected = sorted((end, number) for number, end in ends.items() if looks and end <= max(looks))
    assert told == [number for _, number in expected]
