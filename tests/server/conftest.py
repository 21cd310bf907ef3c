"""The servers that tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))  # process_cores.py, for this process and the engine's

import servers


@pytest.fixture(scope="session")
def nano_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with nano."""
    with servers.process_server(tmp_path_factory.mktemp("nano") / "log", "--model", "nano") as server:
        yield server.base_url


@pytest.fixture(scope="session")
def session_tiny_server(tiny_checkpoint: Path) -> Iterator[servers.ThreadServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepinfer.server.heart.TICK_SECONDS", 0.05)
        with servers.thread_server(tiny_checkpoint, heartbeat=0.2, request_timeout=60.0) as server:
            yield server


@pytest.fixture
def tiny_server(session_tiny_server: servers.ThreadServer) -> Iterator[servers.ThreadServer]:
    """A server in this process with the tiny model, heartbeats every 0.2 s; a test must leave its engine empty."""
    yield session_tiny_server
    session_tiny_server.wait(session_tiny_server.is_empty, 10)
