"""An engine in a process of its own: takes requests from a socket, steps, and sends each client what is its own.

Two threads: this one steps, engine/core_socket.py sends and receives. Ends by SIGTERM or a client's Drain (finishes
what it has, exit code 0), by SIGINT or a second SIGTERM (ends everything at once, 128 + signal), when the process that
started it is gone, or by an error that no request can be blamed for (exit code 1, every client told).
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from importlib.metadata import version
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from deepinfer.cache.events import EventBuffer
from deepinfer.engine import wire
from deepinfer.engine.core_routes import Routes
from deepinfer.engine.core_socket import Broken, CoreSocket, Gone, Health, Orphaned, Received, Swept
from deepinfer.engine.errors import EngineStepError, InvalidRequestError
from deepinfer.engine.step_output import StepOutput
from deepinfer.engine.stop import FinishReason
from deepinfer.metrics import EngineStats, LogLine, StepStats

if TYPE_CHECKING:
    from deepinfer.engine.core import EngineCore

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0  # without work for this long, the cache's books are checked
INPUT_SECONDS = 0.005  # longest time between two steps for letting new requests in; the rest waits for the next gap
EXIT_SECONDS = 5.0  # longest way out of the interpreter
STEP_FAILURES = 3  # in a row: it is not the requests


class Startup:
    """What the maker of a core is given: `progress` to say how far it is, `on_event` for the cache manager. It may set
    `log_every`, the number of steps between two lines of the log."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self.events = EventBuffer()
        self.on_event = self.events.append
        self.log_every = 0

    def progress(self, stage: str, fraction: float | None = None) -> None:
        """stage: words for a person, such as "weights". fraction: of this stage, 0 to 1, None if unknown."""
        self._health.stage = stage
        self._health.fraction = fraction


MakeCore = Callable[[Startup], "EngineCore"]


class Signalled(NamedTuple):
    signal: int


class StoppedWhileLoading(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} while the model was loading")
        self.exit_code = 128 + number


class CoreProcess:
    """The loop: what clients say -> the core -> what each of them is to know."""

    def __init__(
        self,
        core: EngineCore,
        socket: CoreSocket,
        inbox: SimpleQueue,
        health: Health,
        startup: Startup,
        *,
        drain_timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self._socket = socket
        self._inbox = inbox
        self._health = health
        self._events = startup.events
        self._log = LogLine(startup.log_every)
        self._last_step: StepStats | None = None
        self._num_events = 0
        self._drain_timeout = drain_timeout
        self._clock = clock
        self._routes = Routes()
        self._new: OrderedDict[tuple[bytes, int], wire.Add] = OrderedDict()  # requests not let in yet
        self._subscribers: set[bytes] = set()
        self._rejections: dict[str, int] = {}
        self._asked_to_drain = False
        self._draining = False  # what arrives from now on is refused
        self._deadline: float | None = None  # of the drain
        self._exit_code: int | None = None
        self._failures = 0  # steps in a row
        self._fruitless = 0  # steps in a row that did nothing
        self._checked = True  # the cache's books, since the last step

    def serve(self) -> int:
        """Until the process is to end; returns its exit code."""
        self._health.state, self._health.stage, self._health.fraction = "ready", "", None
        while self._exit_code is None:
            self._take_input()
            if self._exit_code is not None:
                break
            if self._deadline is not None and self._clock() >= self._deadline:
                logger.warning("drain: %d requests were not finished in time", len(self._routes))
                self._exit_code = 0
            elif self.core.has_unfinished:
                self._step()
            elif self._draining and not self._new:
                self._exit_code = 0
        self._end_everything()
        for client in self._routes.clients:
            self._socket.send(client, wire.Drained())
        return self._exit_code

    # -- input --------------------------------------------------------------------------------------------------------

    def _take_input(self) -> None:
        """Everything that has come, without waiting while there is work. New requests cost the most (checks, hashes of
        long prompts), so only as many are let in as fit between two steps; aborts never queue behind them."""
        try:
            if not self.core.has_unfinished and not self._new and not self._draining:
                self._health.rest()
                self._take(self._inbox.get(timeout=IDLE_SECONDS))
            elif self._fruitless > 1 and not self._new:
                # all wait for something that is prepared elsewhere: no need to ask a million times a second
                self._take(self._inbox.get(timeout=0.001))
            for _ in range(self._inbox.qsize()):  # not what comes meanwhile: steps must go on
                self._take(self._inbox.get_nowait())
        except Empty:
            pass
        if self._new:
            until = self._clock() + INPUT_SECONDS
            while self._new and self._clock() < until:
                (client, _), message = self._new.popitem(last=False)
                self._add(client, message)
        elif not self.core.has_unfinished and not self._checked:
            self.core.manager.check_integrity()
            self._checked = True

    def _take(self, item: object) -> None:
        match item:
            case Received(client, message):
                self._take_message(client, message)
            case Gone(client, reason):
                self._forget_client(client, reason)
            case Signalled(number):
                self._take_signal(number)
            case Swept():
                self._begin_drain()
            case Orphaned():
                logger.warning("the process that started this engine is gone")
                self._exit_code = 1
            case Broken(error):
                raise RuntimeError("the engine's socket failed") from error

    def _take_message(self, client: bytes, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Hello):
            self._routes.join(client)
            self._socket.send(client, self._ready())
        elif not self._routes.knows(client):
            return  # taken for dead meanwhile
        elif isinstance(message, wire.Add):
            if self._draining:
                text = "the engine is draining and takes no new requests; send it to another one"
                self._refuse(client, message.number, "engine", text, draining=True)
            elif self._new.setdefault((client, message.number), message) is not message:
                self._refuse(client, message.number, "number", f"{message.number} is in use")
        elif isinstance(message, wire.Abort):
            self._abort(client, message)
        elif isinstance(message, wire.Drain):
            self._drain("a client asked for it", message.timeout)
        elif isinstance(message, wire.StatsRequest):
            self._socket.send(client, wire.Stats(tag=message.tag, stats=self._stats()))
        elif isinstance(message, wire.Subscribe):
            self._subscribers.add(client)

    def _ready(self) -> wire.Ready:
        config = self.core.config
        return wire.Ready(
            build=version("deepinfer"),
            pid=os.getpid(),
            max_model_len=config.max_model_len,
            settings=dataclasses.asdict(config),
        )

    def _stats(self) -> EngineStats:
        """The core's numbers, with what only the process knows."""
        stats = self.core.stats()
        stats.rejections = dict(self._rejections)
        stats.last_step_age = self._health.last_step_age(self._clock())
        return stats

    def _add(self, client: bytes, message: wire.Add) -> None:
        theirs = message.number
        if theirs < 0 or self._routes.find(client, theirs) is not None:
            self._refuse(client, theirs, "number", f"{theirs} is negative or in use")
            return
        try:
            request = wire.request_of(message)
            max_tokens = self.core.check(request.prompt_token_ids, request.params)
            number = self._routes.next_number()
            self.core.add(msgspec.structs.replace(request, number=number, max_tokens=max_tokens))
        except InvalidRequestError as error:
            self._refuse(client, theirs, error.field, error.message)
            return
        except (ValueError, RecursionError) as error:
            cause = error.__cause__
            if isinstance(cause, InvalidRequestError):  # a field's own check, wrapped by the decoder
                self._refuse(client, theirs, cause.field, cause.message)
            else:
                self._refuse(client, theirs, "request", str(error))
            return
        self._routes.add(client, theirs, number, request.params.n)
        self._checked = False

    def _refuse(self, client: bytes, number: int, field: str, message: str, draining: bool = False) -> None:
        reason = "draining" if draining else field
        self._rejections[reason] = self._rejections.get(reason, 0) + 1
        self._socket.send(client, wire.Refused(number=number, field=field, message=message, draining=draining))

    def _abort(self, client: bytes, message: wire.Abort) -> None:
        waiting = self._new.pop((client, message.number), None)
        if waiting is not None:
            if message.index is None:
                return
            self._add(client, waiting)  # one completion of it goes, the others stay
        number = self._routes.find(client, message.number)
        if number is not None:  # else it has ended meanwhile
            self.core.abort(number, message.index)
            self._routes.end(number, None if message.index is None else (message.index,))

    def _forget_client(self, client: bytes, reason: str) -> None:
        left = self._routes.leave(client)
        for key in [key for key in self._new if key[0] == client]:
            del self._new[key]
        logger.info("client %s %s; %d requests of it aborted", client.hex(), reason, len(left))
        self._subscribers.discard(client)
        for number in left:
            self.core.abort(number)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        began = self._clock()
        self._health.work(began)
        self._checked = False
        try:
            output = self.core.step()
        except EngineStepError as error:
            self._health.stepped(self._clock())
            self._fail_requests(error)
            return
        now = self._clock()
        self._health.stepped(now)
        self._failures = 0
        for refusal in self.core.take_refused():
            if (route := self._routes.take(refusal.number)) is not None:
                self._refuse(*route, refusal.error.field, refusal.error.message)
        nothing = not len(output) and not output.events and now - began < 0.0002
        self._fruitless = self._fruitless + 1 if nothing else 0
        self._deliver(output)
        self._publish_events()
        if len(output):
            self.core.stats().add_output(self._clock() - now)
        step = self.core.meter.last
        if step is not self._last_step:  # under the overlapped loop not every turn settles a step
            self._last_step = step
            if (line := self._log.observe(step)) is not None:
                print(line, file=sys.stderr, flush=True)

    def _deliver(self, output: StepOutput) -> None:
        """One message to each client that the step brought something."""
        if len(output) or output.events or output.prompt_scores:
            for client, share in self._routes.divide(output):
                self._socket.send(client, wire.Outputs(output=share))

    def _publish_events(self) -> None:
        events = self._events.take()
        if events:
            for client in self._subscribers:
                self._socket.send(client, wire.Events(first=self._num_events, events=events))
            self._num_events += len(events)

    def _fail_requests(self, error: EngineStepError) -> None:
        """Everything under way was lost with the step. RuntimeError if that is all that steps do any more."""
        logger.error("a step failed; %d requests with it", len(self._routes), exc_info=error)
        for client, numbers in self._routes.take_all().items():
            self._socket.send(client, wire.Failed(numbers=numbers, message=str(error)))
        self._failures += 1
        if self._failures == STEP_FAILURES:
            raise RuntimeError(f"{STEP_FAILURES} steps failed in a row: {error}") from error

    # -- the end ------------------------------------------------------------------------------------------------------

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGTERM and not self._asked_to_drain:
            self._drain("SIGTERM", self._drain_timeout)
        else:
            logger.warning("%s: ending at once", signal.Signals(number).name)
            self._exit_code = 128 + number

    def _drain(self, reason: str, timeout: float | None) -> None:
        """What was sent before this may still lie in the socket: it is let in first."""
        logger.info("draining (%s): %d requests to finish", reason, len(self._routes) + len(self._new))
        timeout = self._drain_timeout if timeout is None else timeout
        self._deadline = None if timeout is None else self._clock() + timeout
        self._asked_to_drain = True
        self._socket.sweep()

    def _begin_drain(self) -> None:
        self._draining = True
        self._health.state = "draining"

    def _end_everything(self) -> None:
        """Aborts what is left; its clients get the end of it, with what they have."""
        numbers, output = self._routes.ends(FinishReason.ABORT)
        for number in numbers:
            self.core.abort(number)
        self._deliver(output)


def run_core(make_core: MakeCore, endpoint: str, *, drain_timeout: float | None = None) -> int:
    """Makes a core and serves it at an endpoint ("ipc:///path" or "tcp://127.0.0.1:port") until the process is to end;
    returns the exit code. Call it from a process's main thread: it takes SIGTERM and SIGINT over.

    drain_timeout: seconds that SIGTERM leaves to what runs; None = as long as it takes. ValueError for an endpoint that
    cannot be bound.
    """
    inbox: SimpleQueue = SimpleQueue()
    health = Health()
    parent = multiprocessing.parent_process()
    socket = CoreSocket(endpoint, health, inbox, orphan_sentinel=None if parent is None else parent.sentinel)
    interruptible = True

    def on_signal(number: int, frame: object) -> None:
        nonlocal interruptible
        if interruptible:
            interruptible = False
            raise StoppedWhileLoading(number)
        socket.hurry()
        inbox.put(Signalled(number))  # SimpleQueue.put may interrupt another one in the same thread

    socket.start()
    try:
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, on_signal)
            startup = Startup(health)
            core = make_core(startup)
            gc.collect()
            gc.freeze()  # what is loaded stays; collections between steps need not look at it
        finally:
            interruptible = False  # a signal must not strike what follows
        process = CoreProcess(core, socket, inbox, health, startup, drain_timeout=drain_timeout)
        code = process.serve()
        core.shutdown()
        socket.close()
        return code
    except StoppedWhileLoading as stopped:
        socket.close(wire.Fatal(message=str(stopped)))
        return stopped.exit_code
    except Exception as error:
        refused = health.state == "loading" and isinstance(error, ValueError | OSError)  # it says itself what is wrong
        logger.critical("the engine ends with an error: %s", error, exc_info=None if refused else error)
        socket.close(wire.Fatal(message=f"{type(error).__name__}: {error}"))
        return 1


def process_main(make_core: MakeCore, endpoint: str, drain_timeout: float | None) -> None:
    """`run_core` as the target of a process."""
    code = run_core(make_core, endpoint, drain_timeout=drain_timeout)
    # A thread that hangs in the device must not keep the process.
    watchdog = threading.Timer(EXIT_SECONDS, os._exit, (code,))
    watchdog.daemon = True
    watchdog.start()
    sys.exit(code)
