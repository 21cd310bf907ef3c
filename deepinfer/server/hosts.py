"""Whose name a request calls the server by: a guard for servers that ask nobody for a key.

A page from anywhere may have its own name resolved to 127.0.0.1 (DNS rebinding), and is then of one origin with the
server of whoever looks at it: it could use the model and read stored answers. Its requests still name its host.
"""

from __future__ import annotations

from collections.abc import Collection

from deepinfer.codec.errors import RequestError
from deepinfer.server.access_log import note_error
from deepinfer.server.asgi import App, Receive, Scope, Send, header, refuse_unread
from deepinfer.server.door import Render
from deepinfer.server.settings import is_loopback


class HostGuard:
    """The middleware: lets in what is sent to this machine by its own names, or by one of `allowed`."""

    def __init__(self, app: App, allowed: Collection[str], render: Render) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)
        self._render = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = host_name(header(scope, b"host") or "")
            if not is_loopback(host) and host not in self._allowed:
                error = RequestError(
                    f"host: {host!r:.100} is no name of this server; name it with --allowed-host, or use keys",
                    status=421,
                    param="host",
                    code="misdirected_request",
                )
                note_error(scope, error)
                return await refuse_unread(receive, send, error, self._render(scope["path"], error))
        await self._app(scope, receive, send)


def host_name(value: str) -> str:
    """Of a Host header: without port and brackets, in lower case."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0]
