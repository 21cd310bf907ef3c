"""Starting and ending the process of an engine, for whoever owns it."""

from __future__ import annotations

import logging
import multiprocessing
import shutil
import tempfile

from deepinfer.engine.core_process import MakeCore, process_main

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0  # between SIGTERM and SIGKILL


class EngineProcess:
    """A process that starts afresh ("spawn") and serves the core that `make_core` makes there.

    endpoint: None = a socket in a directory that only this user can enter. It ends with this process.
    """

    def __init__(self, make_core: MakeCore, endpoint: str | None = None, drain_timeout: float | None = None) -> None:
        self._directory = None if endpoint is not None else tempfile.mkdtemp(prefix="deepinfer-")
        self.endpoint = f"ipc://{self._directory}/engine" if endpoint is None else endpoint
        self._process = multiprocessing.get_context("spawn").Process(
            target=process_main, args=(make_core, self.endpoint, drain_timeout), name="deepinfer-engine", daemon=True
        )
        try:
            self._process.start()
        except BaseException:
            self._remove_directory()
            raise

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process ends."""
        return self._process.sentinel

    @property
    def exitcode(self) -> int | None:
        """None while it runs; -n if signal n ended it."""
        return self._process.exitcode

    def stop(self) -> None:
        """SIGTERM, SIGKILL if that does not help, and waits for the end. Its owner has nothing to finish there."""
        self._process.terminate()
        self._process.join(PATIENCE_SECONDS)
        if self._process.exitcode is None:
            logger.warning("the engine process did not end within %g s and is killed", PATIENCE_SECONDS)
            self._process.kill()
            self._process.join()
        self._remove_directory()

    def kill(self) -> None:
        """SIGKILL, for one that may hang and would let SIGTERM wait; `stop` still has to be called."""
        self._process.kill()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
