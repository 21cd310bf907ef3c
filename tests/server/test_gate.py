"""Admission: quotas of keys, the bound on what waits, and that everything comes back whatever happens."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from asgi_calls import run

from deepinfer.codec.generation import Usage
from deepinfer.server.gate import Gate
from deepinfer.server.keys import NOBODY, KeyRing, Principal, add_key
from deepinfer.server.quota import UNLIMITED, KeyLimits
from deepinfer.server.refusal import Refusal, headers_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def caller(limits: KeyLimits = UNLIMITED, key_id: str = "k1") -> Principal:
    return Principal("team", "salt", limits, key_id)


async def refused(gate: Gate, who: Principal, **sizes) -> Refusal:  # type: ignore[no-untyped-def]
    with pytest.raises(Refusal) as caught:
        async with gate.admit(who, **sizes):
            raise AssertionError("it was let in")
    return caught.value


async def pass_through(gate: Gate, who: Principal, prompt: int = 10, output: int = 10, cached: int = 0) -> None:
    async with gate.admit(who, prompt_tokens_estimate=prompt, max_tokens=output) as admission:
        admission.started()
        admission.settle(Usage(prompt, cached, output))


def test_without_keys_everybody_gets_in_and_with_keys_only_who_has_one(tmp_path: Path) -> None:
    async def check() -> None:
        async with Gate().admit({}) as admission:
            assert admission.principal == NOBODY and (admission.tenant, admission.salt) == ("", "")
        key, entry = add_key(tmp_path / "keys.json", "team-a", UNLIMITED)
        gate = Gate(KeyRing.load(tmp_path / "keys.json"))
        assert gate.has_keys and not Gate().has_keys
        async with gate.admit({"x-api-key": key}) as admission:
            assert (admission.tenant, admission.key_id) == ("team-a", entry.id)
            assert admission.cache_salt("x") == admission.principal.cache_salt("x")
        with pytest.raises(Refusal) as caught:
            async with gate.admit({"x-api-key": "wrong"}):
                pass
        assert caught.value.status == 401
        assert gate.stats().refused == {"authentication": 1}

    run(check())


def test_a_key_without_limits_in_the_file_has_the_servers(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    plain, _ = add_key(path, "team-a", UNLIMITED)
    limited, _ = add_key(path, "team-a", KeyLimits(concurrency=1))
    gate = Gate(KeyRing.load(path), default_limits=KeyLimits(requests_per_minute=7, concurrency=9))
    assert gate.authenticate({"x-api-key": plain}).limits == KeyLimits(7, None, None, 9)
    assert gate.authenticate({"x-api-key": limited}).limits == KeyLimits(7, None, None, 1)


def test_the_request_over_the_quota_gets_429_and_when_to_come_back() -> None:
    async def check() -> None:
        clock = Clock()
        gate = Gate(now=clock)
        who = caller(KeyLimits(requests_per_minute=2))
        await pass_through(gate, who)
        await pass_through(gate, who)
        error = await refused(gate, who)
        headers = dict(headers_of(error))
        assert (error.status, error.kind, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert headers["retry-after"] == "30" and headers["x-ratelimit-remaining-requests"] == "0"
        assert "2 requests a minute" in error.message
        assert gate.stats().refused == {"requests": 1}
        clock.now += float(headers["retry-after"])
        await pass_through(gate, who)

    run(check())


def test_another_keys_quota_is_untouched() -> None:
    async def check() -> None:
        gate = Gate(now=Clock())
        limits = KeyLimits(requests_per_minute=1, concurrency=1)
        await pass_through(gate, caller(limits, "k1"))
        await refused(gate, caller(limits, "k1"))
        await pass_through(gate, caller(limits, "k2"))

    run(check())


def test_cached_prompt_tokens_do_not_count() -> None:
    async def check() -> None:
        gate = Gate(now=Clock())
        who = caller(KeyLimits(input_tokens_per_minute=1000))
        for _ in range(20):
            await pass_through(gate, who, prompt=1000, cached=960)
        # 20 x 40 computed tokens; a reservation of what is cached would have let one request through.
        async with gate.admit(who) as admission:
            assert dict(admission.headers())["x-ratelimit-remaining-input-tokens"] == "200"

    run(check())


def test_a_long_output_is_paid_off_before_the_next_request() -> None:
    async def check() -> None:
        clock = Clock()
        gate = Gate(now=clock)
        who = caller(KeyLimits(output_tokens_per_minute=600))
        await pass_through(gate, who, output=1800)
        error = await refused(gate, who, max_tokens=10)
        assert error.retry_after == pytest.approx(121.0)
        clock.now += 121.0
        await pass_through(gate, who)

    run(check())


def test_what_a_request_took_is_counted_once() -> None:
    async def check() -> None:
        gate = Gate(now=Clock())
        async with gate.admit(caller(KeyLimits(None, 1000, 1000))) as admission:
            for _ in range(3):
                admission.settle(Usage(300, 100, 50))
            admission.settle(Usage(1000, 0, 1000))
            headers = dict(admission.headers())
        assert headers["x-ratelimit-remaining-input-tokens"] == "800"
        assert headers["x-ratelimit-remaining-output-tokens"] == "950"

    run(check())


def test_the_exact_number_of_tokens_replaces_the_estimate() -> None:
    async def check() -> None:
        gate = Gate(now=Clock())
        async with gate.admit(caller(KeyLimits(input_tokens_per_minute=1000)), prompt_tokens_estimate=900) as admission:
            assert gate.stats().queued_tokens == 900
            admission.resize(120, 50)
            assert gate.stats().queued_tokens == 120
            assert dict(admission.headers())["x-ratelimit-remaining-input-tokens"] == "880"
            admission.started()
            admission.resize(150)
            assert gate.stats().queued_tokens == 0
        assert gate.stats()[:3] == (0, 0, 0)

    run(check())


def test_a_request_that_failed_before_its_first_token_costs_no_tokens() -> None:
    async def check() -> None:
        gate = Gate(now=Clock())
        who = caller(KeyLimits(10, 1000, 1000))
        with pytest.raises(ValueError, match="broken"):
            async with gate.admit(who, prompt_tokens_estimate=800, max_tokens=500):
                raise ValueError("broken")
        async with gate.admit(who) as admission:
            headers = dict(admission.headers())
        assert headers["x-ratelimit-remaining-requests"] == "8"
        assert headers["x-ratelimit-remaining-input-tokens"] == "1000"
        assert headers["x-ratelimit-remaining-output-tokens"] == "1000"

    run(check())


def test_more_at_a_time_than_allowed_is_refused_until_one_ends() -> None:
    async def check() -> None:
        gate = Gate(now=Clock())
        who = caller(KeyLimits(concurrency=2))
        async with gate.admit(who):
            async with gate.admit(who):
                error = await refused(gate, who)
                assert error.status == 429 and dict(headers_of(error))["retry-after"] == "1"
            await pass_through(gate, who)

    run(check())


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    async def check() -> None:
        gate = Gate(max_queued_requests=2, max_queued_tokens=1000, now=Clock())
        async with gate.admit(caller(), prompt_tokens_estimate=600) as first:
            error = await refused(gate, caller(), prompt_tokens_estimate=600)
            assert (error.status, error.code, error.kind) == (503, "overloaded", "overloaded_error")
            assert int(dict(headers_of(error))["retry-after"]) >= 1
            async with gate.admit(caller(), prompt_tokens_estimate=300):
                await refused(gate, caller(), prompt_tokens_estimate=1)
                first.started()  # it runs: it waits no more
                async with gate.admit(caller(), prompt_tokens_estimate=700):
                    pass
        assert gate.stats().refused == {"queue_tokens": 1, "queue": 1}

    run(check())


def test_a_prompt_longer_than_the_whole_queue_is_served_when_nobody_waits() -> None:
    async def check() -> None:
        gate = Gate(max_queued_tokens=1000, now=Clock())
        async with gate.admit(caller(), prompt_tokens_estimate=50_000) as admission:
            await refused(gate, caller(), prompt_tokens_estimate=1)
            admission.started()
            await pass_through(gate, caller())

    run(check())


def test_messages_are_overloaded_in_their_own_words() -> None:
    async def check() -> None:
        gate = Gate(max_running=1)
        async with gate.admit(caller()) as admission:
            admission.started()
            assert (await refused(gate, caller(), kind="messages")).status == 529
            assert (await refused(gate, caller(), kind="chat")).status == 503

    run(check())


def test_who_is_refused_for_the_servers_sake_pays_nothing() -> None:
    async def check() -> None:
        gate = Gate(max_running=1, now=Clock())
        who = caller(KeyLimits(requests_per_minute=5))
        async with gate.admit(caller(key_id="other")):
            for _ in range(50):
                assert (await refused(gate, who)).status == 503
        async with gate.admit(who) as admission:
            assert dict(admission.headers())["x-ratelimit-remaining-requests"] == "4"

    run(check())


def test_retry_after_follows_how_long_requests_have_waited() -> None:
    async def check() -> None:
        clock = Clock()
        gate = Gate(max_queued_requests=1, now=clock)
        for _ in range(60):
            async with gate.admit(caller()) as admission:
                clock.now += 20.0
                admission.started()
        async with gate.admit(caller()):
            assert (await refused(gate, caller())).retry_after == pytest.approx(20.0, rel=0.01)

    run(check())


def test_nothing_is_left_of_a_thousand_requests_that_end_in_any_way() -> None:
    async def one(gate: Gate, choice: random.Random) -> None:
        async with gate.admit(
            caller(key_id=str(choice.randrange(5))), prompt_tokens_estimate=choice.randrange(500)
        ) as a:
            await asyncio.sleep(0)
            if choice.random() < 0.5:
                a.resize(choice.randrange(500), choice.randrange(500))
            if choice.random() < 0.2:
                raise RuntimeError
            await asyncio.sleep(0)
            if choice.random() < 0.7:
                a.started()
                a.started()
            await asyncio.sleep(0.001 * choice.random())
            if choice.random() < 0.7:
                a.settle(Usage(100, 50, 20))
                a.settle(Usage(100, 50, 20))
                a.resize(7)

    async def check() -> None:
        choice = random.Random(1)
        gate = Gate()
        tasks = [asyncio.create_task(one(gate, choice)) for _ in range(1000)]
        await asyncio.sleep(0)
        for task in choice.sample(tasks, 200):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.stats() == (0, 0, 0, {})
        assert all(account.running == 0 for account in gate._accounts.values())

    run(check())


def test_keys_that_are_idle_take_no_memory_for_ever() -> None:
    async def check() -> None:
        clock = Clock()
        gate = Gate(now=clock)
        for number in range(5000):
            clock.now += 60.0
            await pass_through(gate, caller(KeyLimits(requests_per_minute=5), str(number)))
        assert len(gate._accounts) <= 1001

    run(check())


@pytest.mark.parametrize("name", ["max_running", "max_queued_requests", "max_queued_tokens"])
def test_a_limit_of_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Gate(**{name: 0})
