"""Turn the errors that a user can mend into one message on stderr and exit status 2; anything else keeps its
traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from deepinfer.env import EnvironmentVariableError
from deepinfer.model.config import ConfigError
from deepinfer.model.hub import ModelNotFoundError
from deepinfer.model.random_checkpoint import OutputError
from deepinfer.model.safetensors_header import CheckpointError

USER_ERRORS = (ConfigError, CheckpointError, ModelNotFoundError, OutputError, EnvironmentVariableError, OSError)


@contextmanager
def user_errors() -> Iterator[None]:
    """Print `error: ...` and leave with status 2 for USER_ERRORS raised inside."""
    try:
        yield
    except USER_ERRORS as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
