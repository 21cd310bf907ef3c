"""The official SDK as the reader of an answer's bytes: what it understands is the protocol."""

from __future__ import annotations

import httpx
import openai


def client(body: bytes, media_type: str, status: int = 200, cut: int = 0) -> openai.OpenAI:
    """A client whose server answers everything with `body`, in pieces of `cut` bytes (0 = at once)."""

    def answer(request: httpx.Request) -> httpx.Response:
        pieces = [body] if not cut else [body[i : i + cut] for i in range(0, len(body), cut)]
        return httpx.Response(status, headers={"content-type": media_type}, content=iter(pieces))

    http = httpx.Client(transport=httpx.MockTransport(answer))
    return openai.OpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)
