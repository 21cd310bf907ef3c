"""Buckets and accounts, on a clock that the test turns."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.server.quota import Account, Bucket, KeyLimits


def test_a_minute_gives_no_more_than_its_quota_however_requests_are_spread() -> None:
    bucket = Bucket(60, now=0.0)
    let_in = 0
    for tick in range(601):  # a minute, ten attempts a second
        now = tick / 10
        if bucket.wait(1, now) == 0:
            bucket.take(1, now)
            let_in += 1
    assert let_in == 60 + 60  # what was saved up, and what flowed in


def test_who_waits_as_told_is_let_in() -> None:
    bucket = Bucket(90, now=0.0)
    bucket.take(90, 0.0)
    wait = bucket.wait(30, 0.0)
    assert wait == pytest.approx(20.0)
    assert bucket.wait(30, wait - 0.1) > 0
    assert bucket.wait(30, wait) == 0


def test_a_request_larger_than_a_minutes_quota_is_let_in_once_and_paid_off() -> None:
    bucket = Bucket(100, now=0.0)
    assert bucket.wait(250, 0.0) == 0
    bucket.take(250, 0.0)
    assert bucket.level(0.0) == -150
    assert bucket.wait(1, 0.0) == pytest.approx(151 * 0.6)
    assert bucket.wait(250, 60.0) > 0  # not before it is full
    assert bucket.wait(250, 150.0) == 0


def test_what_was_reserved_too_much_comes_back_but_never_more_than_the_quota() -> None:
    bucket = Bucket(100, now=0.0)
    bucket.take(80, 0.0)
    bucket.take(-50, 0.0)
    assert bucket.level(0.0) == 70
    bucket.take(-500, 0.0)
    assert bucket.level(0.0) == 100


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bucket = Bucket(60, now=10.0)
    bucket.take(60, 10.0)
    assert bucket.level(5.0) == 0
    assert bucket.level(10.0) == 0
    assert bucket.level(11.0) == pytest.approx(1.0)


steps = st.lists(st.tuples(st.floats(0, 120), st.integers(0, 400)), max_size=60)


@given(rate=st.integers(1, 300), attempts=steps)
def test_the_rate_holds_in_the_mean_whatever_comes(rate: int, attempts: list[tuple[float, int]]) -> None:
    bucket = Bucket(rate, now=0.0)
    now, taken = 0.0, 0
    for pause, amount in attempts:
        now += pause
        if bucket.wait(amount, now) == 0:
            # Before this request at most a full bucket and what flowed in since the start had been spent.
            assert taken <= rate + rate * now / 60 + 1e-6
            bucket.take(amount, now)
            taken += amount
        else:
            later = now + bucket.wait(amount, now) + 1e-6
            assert copy.copy(bucket).wait(amount, later) == 0  # of a copy: asking moves a bucket's clock
        assert bucket.level(now) <= rate + 1e-9


def test_the_quota_that_takes_longest_is_the_one_that_is_named() -> None:
    account = Account(KeyLimits(60, 600, 6000), now=0.0)
    account.take({"requests": 60, "input_tokens": 600}, 0.0)
    assert account.shortage({"requests": 1, "input_tokens": 300}, 0.0) == ("input_tokens", pytest.approx(30.0))
    assert account.shortage({"requests": 1}, 0.0) == ("requests", pytest.approx(1.0))


def test_a_key_without_limits_is_never_short() -> None:
    account = Account(KeyLimits(), now=0.0)
    for _ in range(100):
        account.take({"requests": 1, "input_tokens": 1e9, "output_tokens": 1e9}, 0.0)
    assert account.shortage({"requests": 1, "input_tokens": 1e9}, 0.0) is None
    assert account.headers(0.0) == ()
    assert account.is_idle(0.0)


def test_a_limit_that_is_raised_in_the_file_counts_from_where_the_key_stands() -> None:
    account = Account(KeyLimits(requests_per_minute=10), now=0.0)
    account.take({"requests": 5}, 0.0)
    account.change_limits(KeyLimits(requests_per_minute=100, input_tokens_per_minute=50), 0.0)
    assert dict(account.headers(0.0))["x-ratelimit-remaining-requests"] == "50"
    assert dict(account.headers(0.0))["x-ratelimit-remaining-input-tokens"] == "50"


def test_the_headers_say_what_is_left_and_when_it_is_full() -> None:
    account = Account(KeyLimits(60, None, 1200, concurrency=4), now=0.0)
    account.take({"requests": 15, "output_tokens": 1500}, 0.0)
    account.running = 3
    assert dict(account.headers(0.0)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "45",
        "x-ratelimit-reset-requests": "15.0s",
        "x-ratelimit-limit-output-tokens": "1200",
        "x-ratelimit-remaining-output-tokens": "0",
        "x-ratelimit-reset-output-tokens": "75.0s",
        "x-ratelimit-limit-concurrency": "4",
        "x-ratelimit-remaining-concurrency": "1",
    }


def test_a_default_budget_of_many_thousand_tokens_does_not_use_up_the_output_quota() -> None:
    account = Account(KeyLimits(output_tokens_per_minute=10_000), now=0.0)
    assert account.expected(0, 65_536) == (0, 256)
    assert account.expected(0, 20) == (0, 20)
    for _ in range(100):
        account.learn(10, 10, 1000)
    assert account.expected(0, 65_536)[1] == pytest.approx(1000, rel=0.01)


def test_what_is_reserved_for_a_prompt_follows_what_the_cache_had_of_earlier_ones() -> None:
    account = Account(KeyLimits(input_tokens_per_minute=10_000), now=0.0)
    assert account.expected(1000, 0)[0] == 1000
    for _ in range(100):
        account.learn(1000, 40, 1)
    assert account.expected(1000, 0)[0] == pytest.approx(40, rel=0.01)
    before = account.expected(1000, 1000)
    account.learn(0, 0, 0)  # it never ran
    assert account.expected(1000, 1000) == before
