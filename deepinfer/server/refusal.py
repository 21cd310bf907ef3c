"""What the door says to a request that it does not let in: a RequestError that brings HTTP headers along."""

from __future__ import annotations

from deepinfer.codec.errors import RequestError

Headers = tuple[tuple[str, str], ...]


class Refusal(RequestError):
    """headers: to send with the answer, besides Retry-After, which whoever answers makes of `retry_after` with
    `retry_after_seconds`.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Headers = (),
    ) -> None:
        super().__init__(message, param=param, status=status, kind=kind, code=code, retry_after=retry_after)
        self.headers = headers


def retry_after_seconds(seconds: float) -> str:
    """The value of Retry-After: whole seconds, rounded up so that a client that waits as told is let in."""
    return str(max(1, -int(-seconds // 1)))


def headers_of(error: RequestError) -> Headers:
    """All headers that an error's answer carries; works for every RequestError."""
    headers: Headers = getattr(error, "headers", ())
    if error.retry_after is not None:
        headers += (("retry-after", retry_after_seconds(error.retry_after)),)
    return headers
