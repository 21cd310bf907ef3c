"""`deepinfer serve`: from settings to a process that listens, and from a signal to its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn

from deepinfer.engine.core_process import MakeCore
from deepinfer.engine.model_core import ModelCore
from deepinfer.grammar.checker import Checker
from deepinfer.grammar.vocabulary import Vocabulary
from deepinfer.metrics.server import ServerMetrics
from deepinfer.model.config import ModelConfig
from deepinfer.server.app import whole_app
from deepinfer.server.asgi import App
from deepinfer.server.connections import ConnectionLimits, bounded_protocol
from deepinfer.server.engine_host import EngineHost
from deepinfer.server.gate import Gate
from deepinfer.server.health import probe
from deepinfer.server.keys import KeyRing
from deepinfer.server.models import ServedModel
from deepinfer.server.response_store import ResponseStore, StoreLimits
from deepinfer.server.settings import ServerSettings
from deepinfer.server.state import ServerState
from deepinfer.server.stderr import queued_stderr
from deepinfer.server.tracing import Tracing

logger = logging.getLogger(__name__)

BACKLOG = 1024
MOST_FILES = 65536
OTHER_FILES = 256  # that the server itself needs, and each new engine, whatever clients do
CLOSING_SECONDS = 2  # that connections have to close when everything is answered


def serve(core: ModelCore, settings: ServerSettings) -> int:
    """Serves until a signal; returns the exit code. ValueError or OSError for what cannot be: a file of keys, a
    checkpoint, an address in use."""
    _allow_many_files()
    model = ServedModel.load(core.path, core.settings, settings.model_names)
    listener = listen(settings.host, settings.port)
    keys = None if settings.keys is None else KeyRing.load(settings.keys)
    tracing = None if settings.trace_endpoint is None else Tracing(settings.trace_endpoint, share=settings.trace_share)
    state = make_state(core, settings, model, keys)
    try:
        with queued_stderr() as log:
            app = whole_app(state, write_log=log.write if settings.access_log else None, tracing=tracing)
            any_name = ", or any name" if model.any_name else ""
            print(f"deepinfer: serving {', '.join(model.names)}{any_name}", file=sys.stderr)
            for line in (*settings.describe(), model.describe_defaults()):
                print(f"  {line}", file=sys.stderr)
            server = Server(app, state)
            server.run([listener])
    finally:
        if tracing is not None:
            tracing.close()
    return server.exit_code


def make_state(
    core: ModelCore,
    settings: ServerSettings,
    model: ServedModel,
    keys: KeyRing | None = None,
    make_core: MakeCore | None = None,
) -> ServerState:
    """Everything that routes share; nothing of the engine has begun yet. make_core: runs in place of `core`, for
    tests and benchmarks."""
    store = ResponseStore(settings.store, StoreLimits(max_bytes=settings.store_bytes))
    end = ModelConfig.from_dir(core.path).eos_token_id
    vocabulary = Vocabulary.from_tokenizer_file(Path(core.path) / "tokenizer.json", model.vocab_size, end)
    gate = Gate(
        keys,
        max_running=settings.max_running,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
    )
    return ServerState(
        settings,
        model,
        EngineHost(make_core or core, model=model.name, hang_timeout=settings.hang_timeout),
        gate,
        # last, for it starts processes
        Checker(vocabulary, workers=settings.grammar_workers, time_limit=settings.grammar_seconds),
        ServerMetrics(model.name),
        store,
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections. OSError naming the address."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server((host, port), family=infos[0][0], backlog=BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def _allow_many_files() -> None:
    """Every connection is one; what a shell allows by default would end at a thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _most_connections() -> int:
    """As many as the limit of files leaves room for: without any more, no new engine could be started."""
    most = ConnectionLimits().max_connections
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft - OTHER_FILES))


class Server(uvicorn.Server):
    """uvicorn with our own beginning and end.

    The first SIGTERM or SIGINT makes /ready say no and refuses what is new, while connections are still accepted, so
    that balancers can see it; when all is answered, or after the drain's time, the process ends with code 0. A second
    signal ends it at once (128 + signal).
    """

    def __init__(self, app: App, state: ServerState) -> None:
        settings = state.settings
        limits = ConnectionLimits(max_connections=_most_connections(), write_seconds=settings.stall_timeout)
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=bounded_protocol(limits),
                loop="uvloop",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=CLOSING_SECONDS,
                backlog=BACKLOG,
            )
        )
        self.state = state
        self.exit_code = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drainer: asyncio.Task[None] | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets)
        if self._failure is not None:
            raise self._failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await self.state.host.start()
        await super().startup(sockets)
        address = self.servers[0].sockets[0].getsockname()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        print(f"deepinfer: listening on http://{host}:{address[1]}", file=sys.stderr)
        probing = probe(self.state, self.state.model.probe_id)
        self._tasks = [asyncio.create_task(work) for work in (self._watch_start(), probing)]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.state.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by a signal, wherever the process is."""
        self._signals += 1
        if self._signals == 1:
            self.state.draining = True
            if self._loop is None:  # nothing has begun
                self.should_exit = True
            else:
                self._loop.call_soon_threadsafe(self._begin_drain, sig)
        else:
            self.exit_code = 128 + sig
            self.force_exit = self.should_exit = True

    async def _watch_start(self) -> None:
        try:
            await self.state.host.wait_ready()
        except Exception as error:
            self._failure = error
            self.should_exit = True
            return
        gc.collect()
        gc.freeze()  # what is there now stays; collections while streams run need not look at it
        print("deepinfer: ready", file=sys.stderr)

    def _begin_drain(self, sig: int) -> None:
        self._drainer = asyncio.create_task(self._drain(signal.Signals(sig).name))

    async def _drain(self, name: str) -> None:
        settings = self.state.settings
        print(f"deepinfer: {name}, {self.state.num_open} answers to finish", file=sys.stderr)
        _, in_time = await asyncio.gather(asyncio.sleep(settings.drain_grace), self.state.drain(settings.drain_timeout))
        if not in_time:
            logger.warning("%d answers were not finished in %g s", self.state.num_open, settings.drain_timeout)
            self.force_exit = True
        self.should_exit = True
