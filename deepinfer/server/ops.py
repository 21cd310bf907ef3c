"""/metrics: the engine's numbers, those of its requests, and the server's own, in one exposition."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from deepinfer.engine.client import AsyncEngineClient, EngineDeadError, EngineDrainingError
from deepinfer.server.state import ServerState

STATS_SECONDS = 2.0  # an engine whose step takes longer is shown with its numbers of the last scrape


async def exposition(state: ServerState, accept: str) -> tuple[bytes, str]:
    """All metrics and their content type. Without an engine: the server's alone."""
    registry = CollectorRegistry(auto_describe=False)
    client = state.host.current
    if client is not None:
        await _take_totals(client)
        registry.register(client.metrics)
    gate = state.gate.stats()
    state.metrics.restarts = state.host.restarts
    state.metrics.refused = dict(gate.refused)
    state.metrics.queued, state.metrics.queued_tokens = gate.queued, gate.queued_tokens
    registry.register(state.metrics)
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


async def _take_totals(client: AsyncEngineClient) -> None:
    try:
        async with asyncio.timeout(STATS_SECONDS):
            client.metrics.take_totals(await client.stats())
    except (TimeoutError, EngineDeadError, EngineDrainingError):
        client.metrics.stats.last_step_age = client.last_step_age
