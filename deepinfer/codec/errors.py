"""What is wrong with a request, before it is put into a protocol's own shape."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be served, and why.

    message: for people, says what to do. param: the field, in the client's own spelling ("messages.0.content"). status:
    of the HTTP answer. kind: OpenAI's word for it; each protocol translates. code: a word that programs can test.
    retry_after: seconds after which a repetition may succeed.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.kind = kind
        self.code = code
        self.retry_after = retry_after
