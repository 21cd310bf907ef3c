"""A server asked from outside: HTTP, streams of Chat Completions, figures of /metrics."""

from deepinfer.client.chat import Chunk, ServerRefusal, stream_chat
from deepinfer.client.http import Address, Connection, ServerUnreachable
from deepinfer.client.metrics import Exposition, scrape
from deepinfer.client.models import model_names

__all__ = [
    "Address",
    "Chunk",
    "Connection",
    "Exposition",
    "ServerRefusal",
    "ServerUnreachable",
    "model_names",
    "scrape",
    "stream_chat",
]
