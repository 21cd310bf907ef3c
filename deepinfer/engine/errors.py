"""The two ways a request can go wrong: at the door (the caller's fault), or inside a step (ours)."""


class InvalidRequestError(ValueError):
    """A request was refused before it entered the engine; nothing was allocated and no other request is touched.

    `field` names the input that is wrong, so that a server can point at it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class OutOfMemoryStepError(RuntimeError):
    """A step found no memory on the device. Says which settings to lower; the cause is chained."""

    def __init__(self, tokens: int) -> None:
        super().__init__(
            f"out of memory in a step of {tokens} tokens: lower max_num_batched_tokens, or gpu_memory_utilization or "
            f"num_blocks, so that the cache leaves more"
        )


class EngineStepError(RuntimeError):
    """A step failed; every sequence it held was ended and its blocks were freed. The cause is chained."""
