"""The chat page at `/`: static files that come with the package, read once when the server starts."""

from __future__ import annotations

import mimetypes
from collections.abc import Awaitable, Callable, Iterator
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content-Security-Policy: even text of a model that some fault put into the page as HTML could run nothing, load
nothing and send nothing elsewhere."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked again each time, and answered with 304: a new release shows at once
}


def page_files() -> dict[str, Path]:
    """Path of the URL -> file."""
    return {"/" if file.name == INDEX else f"/page/{file.name}": file for file in sorted(FOLDER.iterdir())}


PAGE_PATHS = frozenset(page_files())
"""Open to everybody: the page holds nothing, and asks for the key that its requests need."""


def page_routes() -> Iterator[Route]:
    """One route per file, for GET and HEAD."""
    for path, file in page_files().items():
        yield Route(path, _answer(file), methods=["GET"], include_in_schema=False)


def _answer(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content = file.read_bytes()
    tag = f'"{sha256(content).hexdigest()[:20]}"'
    kind = TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0]

    async def answer(request: Request) -> Response:
        headers = {**HEADERS, "etag": tag}
        if tag in (one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return answer
