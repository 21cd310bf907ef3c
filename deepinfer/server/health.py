"""Is this server of use? Alive: its event loop answers. Ready: its engine has proved lately that it makes tokens."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

from deepinfer.engine.client import AsyncEngineClient, EngineDeadError, EngineDrainingError
from deepinfer.engine.errors import EngineStepError, InvalidRequestError
from deepinfer.engine.sampling_params import SamplingParams
from deepinfer.server.state import ServerState

logger = logging.getLogger(__name__)

PROBE_SECONDS = 20.0  # without a token for so long: one is asked for
PROOF_SECONDS = 60.0  # older proof of life is none
STEP_SECONDS = 10.0  # a step that takes longer hangs
FIRST = -(1 << 31)  # priority: before everybody


def problems(state: ServerState) -> list[str]:
    """Why no traffic should come here; nothing if it should."""
    if state.draining:
        return ["draining"]
    client = state.host.current
    if client is None or client.state != "ready":
        return [state.host.describe()]
    found = []
    if client.last_step_age >= STEP_SECONDS:
        found.append(f"no step of the engine has ended for {client.last_step_age:.0f} s, though there is work")
    if client.last_output_age >= PROOF_SECONDS:
        found.append(f"the engine has made no token for {client.last_output_age:.0f} s, though it was asked for one")
    return found


def readiness(state: ServerState) -> tuple[int, dict[str, Any]]:
    """Status and body of /ready."""
    found = problems(state)
    body: dict[str, Any] = {"ready": not found, "engine": state.host.state, "open_answers": state.num_open}
    if found:
        body["reasons"] = found
    if state.host.error is not None:
        body["last_error"] = str(state.host.error)
    return (503 if found else 200), body


async def probe(state: ServerState, bos: int) -> None:
    """As long as the server runs: has the engine make a token when it has made none for a while."""
    params = SamplingParams(temperature=0.0, max_tokens=1, priority=FIRST, deadline=PROOF_SECONDS)
    while True:
        client = state.host.current
        if client is not None and client.state == "ready" and client.last_output_age >= PROBE_SECONDS:
            try:
                await _one_token(client, bos, params)
            except (EngineDeadError, EngineDrainingError, EngineStepError, InvalidRequestError) as error:
                logger.warning("the engine did not answer a probe: %s", error)
        await asyncio.sleep(1.0)


async def _one_token(client: AsyncEngineClient, bos: int, params: SamplingParams) -> None:
    deltas = client.generate([bos], params, counted=False, salt="deepinfer-probe")
    async with aclosing(deltas):  # type: ignore[type-var]
        async for _ in deltas:
            pass
