"""A request that is sent again: one answer, computed once, for whoever asks for it."""

from __future__ import annotations

import asyncio
import random

import pytest
from asgi_calls import Answer, Call, make_scope, render, run

from deepinfer.server.access_log import AccessLog, record_of
from deepinfer.server.asgi import Message, Receive, Scope, Send
from deepinfer.server.idempotency import Idempotency, IdempotencyLimits
from deepinfer.server.keys import Principal
from deepinfer.server.quota import UNLIMITED


class App:
    """Streams `pieces`, each when the test opens its gate, and counts."""

    def __init__(self, pieces: list[bytes] | None = None, status: int = 200, held: bool = False) -> None:
        self.pieces = pieces or [b"one ", b"two ", b"three"]
        self.status = status
        self.gate = asyncio.Semaphore(0 if held else 1_000_000)
        self.started = self.finished = self.left = 0
        self.sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started += 1
        body = (await receive())["body"]
        gone = asyncio.create_task(self.until_left(receive))
        try:
            head = [(b"content-type", b"text/plain"), (b"x-run", b"%d" % self.started)]
            await send({"type": "http.response.start", "status": self.status, "headers": head})
            for piece in [body, *self.pieces]:
                opening = asyncio.create_task(self.gate.acquire())
                await asyncio.wait({opening, gone}, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    opening.cancel()
                    self.left += 1
                    return
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                self.sent += 1
            await send({"type": "http.response.body", "body": b""})
            self.finished += 1
        finally:
            gone.cancel()

    async def until_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def open(self, count: int = 1_000_000) -> None:
        for _ in range(count):
            self.gate.release()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def middleware(app: App, **limits) -> Idempotency:  # type: ignore[no-untyped-def]
    return Idempotency(app, IdempotencyLimits(**limits), render)


def ask(app, key: str = "k", body: bytes = b"ask ", tenant: str = "", path: str = "/v1/x", **more) -> Call:  # type: ignore[no-untyped-def]
    scope = make_scope(path, headers={"idempotency-key": key})
    scope["state"]["principal"] = Principal(tenant, "", UNLIMITED, "id")
    return Call(app, body, scope=scope, **more)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


WHOLE = b"ask one two three"


def test_a_repeated_request_gets_the_same_answer_and_is_not_computed_again() -> None:
    async def work() -> None:
        app = App()
        server = middleware(app)
        first, second = await ask(server), await ask(server)
        assert (first.status, first.body, app.started) == (200, WHOLE, 1)
        assert (second.status, second.body, second.complete) == (200, WHOLE, True)
        assert second.headers.pop("idempotency-replayed") == "true"
        assert second.headers == first.headers

    run(work())


def test_a_request_without_a_key_is_computed_each_time() -> None:
    async def work() -> None:
        app = App()
        server = middleware(app)
        assert [(await Call(server, b"ask ")).headers["x-run"] for _ in range(3)] == ["1", "2", "3"]
        assert [(await Call(server, b"ask ", method="GET", headers={"idempotency-key": "k"})).status for _ in (1, 2)]
        assert app.started == 5

    run(work())


def test_who_comes_while_it_runs_joins_and_misses_nothing() -> None:
    async def work() -> None:
        app = App(held=True)
        server = middleware(app)
        first = ask(server)
        app.open(2)
        await settle()
        second = ask(server)
        await settle()
        assert first.answer.body == second.answer.body == b"ask one "
        app.open()
        assert (await first).body == (await second).body == WHOLE
        assert app.started == 1 and second.answer.headers["idempotency-replayed"] == "true"

    run(work())


def test_the_request_goes_on_when_its_first_client_leaves_and_another_has_joined() -> None:
    async def work() -> None:
        app = App(held=True)
        server = middleware(app)
        first = ask(server)
        app.open(1)
        await settle()
        second = ask(server)
        await settle()
        first.leave()
        await first
        assert not first.answer.complete and app.left == 0
        app.open()
        assert (await second).body == WHOLE and app.started == 1
        assert (await ask(server)).body == WHOLE and app.started == 1

    run(work())


def test_the_request_ends_when_the_last_client_leaves_and_the_key_is_free_again() -> None:
    async def work() -> None:
        app = App(held=True)
        server = middleware(app)
        calls = [ask(server), ask(server)]
        app.open(1)
        await settle()
        for call in calls:
            call.leave()
            await call
        await settle()
        assert (app.started, app.left, app.finished) == (1, 1, 0)
        app.open()
        again = await ask(server)
        assert (again.body, app.started) == (WHOLE, 2) and "idempotency-replayed" not in again.headers
        assert not server._tasks

    run(work())


def test_another_body_or_path_with_the_same_key_is_refused() -> None:
    async def work() -> None:
        app = App()
        server = middleware(app)
        await ask(server)
        for other in (ask(server, body=b"something else"), ask(server, path="/v1/y")):
            answer = await other
            assert (answer.status, answer.json["code"], answer.json["param"]) == (
                422, "idempotency_key_reused", "Idempotency-Key",
            )  # fmt: skip
        assert app.started == 1

    run(work())


def test_another_body_is_refused_while_the_first_runs_too() -> None:
    async def work() -> None:
        app = App(held=True)
        server = middleware(app)
        first = ask(server)
        await settle()
        assert (await ask(server, body=b"something else")).status == 422
        app.open()
        assert (await first).body == WHOLE

    run(work())


def test_tenants_do_not_meet_under_one_key() -> None:
    async def work() -> None:
        app = App()
        server = middleware(app)
        answers = [await ask(server, tenant=tenant, body=tenant.encode()) for tenant in ("a", "b", "a")]
        assert [answer.body[:1] for answer in answers] == [b"a", b"b", b"a"] and app.started == 2

    run(work())


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_an_error_is_not_kept_so_that_the_retry_is_tried(status: int) -> None:
    async def work() -> None:
        app = App(status=status)
        server = middleware(app)
        assert [(await ask(server)).status for _ in range(3)] == [status] * 3
        assert app.started == 3

    run(work())


@pytest.mark.parametrize("finish", ["error", "deadline", "abort"])
def test_a_stream_that_failed_on_its_way_is_not_kept(finish: str) -> None:
    async def work() -> None:
        app = App()

        async def failing(scope: Scope, receive: Receive, send: Send) -> None:
            record_of(scope).finish = finish
            await app(scope, receive, send)

        server = AccessLog(Idempotency(failing, IdempotencyLimits(), render), None)
        await ask(server)
        await ask(server)
        assert app.started == 2

    run(work())


def test_an_app_that_breaks_is_told_to_all_who_wait_and_the_key_is_free() -> None:
    async def work() -> None:
        broken = True
        go = asyncio.Event()
        app = App()

        async def breaking(scope: Scope, receive: Receive, send: Send) -> None:
            if broken:
                await go.wait()
                raise ValueError("broken")
            await app(scope, receive, send)

        server = Idempotency(breaking, IdempotencyLimits(), render)
        calls = [ask(server), ask(server)]
        await settle()
        go.set()
        for call in calls:
            with pytest.raises(RuntimeError) as caught:
                await call
            assert isinstance(caught.value.__cause__, ValueError)
        broken = False
        assert (await ask(server)).body == WHOLE

    run(work())


def test_an_app_that_stops_in_the_middle_hangs_nobody() -> None:
    async def work() -> None:
        async def half(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})

        call = ask(Idempotency(half, IdempotencyLimits(), render))
        with pytest.raises(RuntimeError):
            await call

    run(work())


def test_an_answer_is_forgotten_ten_minutes_after_its_end() -> None:
    async def work() -> None:
        clock, app = Clock(), App()
        server = Idempotency(app, IdempotencyLimits(), render, now=clock)
        await ask(server)
        clock.now += 599
        await ask(server)
        assert app.started == 1
        clock.now += 2
        await ask(server)
        assert app.started == 2

    run(work())


def test_an_answer_too_long_to_keep_reaches_its_readers_and_says_so_to_later_ones() -> None:
    async def work() -> None:
        pieces = [b"%04d" % number * 256 for number in range(100)]  # 1 KiB each
        app = App(pieces, held=True)
        server = middleware(app, max_answer=10_000, max_lag=4096)
        first = ask(server)
        app.open(5)
        await settle()
        second = ask(server)
        app.open()
        await settle()
        late = await ask(server)
        assert (await first).body == (await second).body == b"ask " + b"".join(pieces)
        assert (late.status, late.json["code"]) == (409, "idempotency_answer_not_kept")
        assert (await ask(server)).status == 409 and app.started == 1
        (recording,) = server._recordings.values()
        assert recording.size == 0

    run(work())


def test_a_slow_reader_holds_a_long_answer_back_instead_of_filling_memory() -> None:
    async def work() -> None:
        app = App([b"x" * 1024] * 200)
        server = middleware(app, max_answer=10_000, max_lag=4096)
        slow, quick = ask(server, send_delay=0.001), ask(server)
        largest = 0
        while not slow.task.done():
            for recording in server._recordings.values():
                largest = max(largest, recording.size)
            await asyncio.sleep(0)
        assert len((await slow).body) == len((await quick).body) == 4 + 200 * 1024
        assert largest <= 10_000 + 1024

    run(work())


def test_the_oldest_answers_make_room_for_new_ones() -> None:
    async def work() -> None:
        app = App([b"x" * 1000])
        server = middleware(app, max_kept=3500)
        for key in "abcd":
            await ask(server, key)
        await settle()
        for key in "bcd":
            await ask(server, key)
        assert app.started == 4
        await ask(server, "a")
        assert app.started == 5

    run(work())


def test_too_many_running_ones_are_refused_and_kept_ones_make_room() -> None:
    async def work() -> None:
        app = App(held=True)
        server = middleware(app, max_requests=2)
        calls = [ask(server, key) for key in "ab"]
        await settle()
        refused = await ask(server, "c")
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        app.open()
        for call in calls:
            await call
        await settle()
        assert (await ask(server, "c")).status == 200

    run(work())


@pytest.mark.parametrize("key", ["", " ", "x" * 256, "a b", "\xe9"])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    async def work() -> None:
        app = App()
        answer = await ask(middleware(app), key)
        assert (answer.status, answer.json["code"], app.started) == (400, "invalid_idempotency_key", 0)

    run(work())


def test_a_client_that_leaves_within_its_body_starts_nothing() -> None:
    async def work() -> None:
        app = App()
        server = middleware(app)
        call = ask(server, body=b"")
        call._pieces = []
        call.leave()
        await call
        assert app.started == 0 and not server._recordings

    run(work())


def test_nothing_is_left_of_a_thousand_clients_that_come_and_vanish() -> None:
    async def one(server: Idempotency, app: App, choice: random.Random) -> Answer:
        call = ask(server, str(choice.randrange(40)), send_delay=0.001 * choice.random())
        await asyncio.sleep(0.01 * choice.random())
        if choice.random() < 0.6:
            call.leave()
        app.open(choice.randrange(8))
        return await call

    async def work() -> None:
        choice = random.Random(2)
        app = App([b"piece"] * 20, held=True)
        server = middleware(app, max_answer=60, max_lag=20)
        tasks = [asyncio.create_task(one(server, app, choice)) for _ in range(1000)]
        await asyncio.sleep(0.05)
        app.open()
        answers = await asyncio.gather(*tasks)
        await settle()
        assert not server._tasks and app.started == app.finished + app.left
        assert all(
            answer.body == b"ask " + b"piece" * 20 for answer in answers if answer.complete and answer.status == 200
        )
        assert {answer.status for answer in answers} <= {0, 200, 409}
        assert sum(answer.complete and answer.status == 200 for answer in answers) > 10

    run(work())


def test_what_one_reader_does_to_the_messages_no_other_sees() -> None:
    async def work() -> None:
        app = App()
        server = middleware(app)

        async def spoil(scope: Scope, receive: Receive, send: Send) -> None:
            async def spoiling(message: Message) -> None:
                await send(message)
                message.clear()

            await server(scope, receive, spoiling)

        await ask(spoil)
        assert (await ask(server)).body == WHOLE

    run(work())
