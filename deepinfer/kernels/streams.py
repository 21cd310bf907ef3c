"""What a GPU does beside the host, for parts of the engine that ask for no device: events, streams, recorded graphs.

On a CPU everything runs where it is called, so there a caller has no stream and no event (None), and `beside(None)` is
the thread it runs in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

Event = torch.cuda.Event
Stream = torch.cuda.Stream
Graph = torch.cuda.CUDAGraph
OutOfMemory = torch.cuda.OutOfMemoryError

T = TypeVar("T")


def new_stream(device: torch.device) -> Stream | None:
    """A stream of its own on a GPU; None elsewhere."""
    return Stream(device) if device.type == "cuda" else None


def beside(stream: Stream | None) -> AbstractContextManager[Any]:
    """Inside, work goes to that stream."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def follow(stream: Stream | None) -> None:
    """What the stream gets from here on begins when the current stream has done what it has now."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))


_helpers: dict[torch.device, Stream] = {}


def fork(device: torch.device) -> Stream | None:
    """While a graph is recorded: a stream whose work, from what the current stream has recorded so far to `join`, goes
    beside that of the current one. Elsewhere None, and all runs in turn: there the host is what launches wait for.

    What that work reads must be kept until the join; what it makes lies in memory of its own stream, which the next
    work after a fork may take.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    if device not in _helpers:
        _helpers[device] = Stream(device)
    stream = _helpers[device]
    follow(stream)
    return stream


def join(stream: Stream | None) -> None:
    """The current stream goes on when that one has done what it has."""
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


def mark(stream: Stream) -> Event:
    """An event that comes when the stream has done what it has now."""
    event = Event()
    event.record(stream)
    return event


def wait(event: Event | None) -> None:
    """The current stream, not the host, waits for the event."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def keep_for_current_stream(tensor: Tensor) -> None:
    """The memory of a tensor made on another stream is not given away before the current stream has read it."""
    tensor.record_stream(torch.cuda.current_stream(tensor.device))


def new_memory_pool() -> Any:
    """Memory that several graphs share."""
    return torch.cuda.graph_pool_handle()


def record(work: Callable[[], T], memory_pool: Any) -> tuple[Graph, T]:
    """Records `work` on the current device -> its graph, and what it returned: tensors that every replay writes anew.
    `work` has to have run once, so that what is compiled or made at first use is there."""
    torch.cuda.synchronize()
    graph = Graph()
    # thread_local: other threads of the process, such as those that gather Engram rows, go on with what they do.
    with torch.cuda.graph(graph, pool=memory_pool, capture_error_mode="thread_local"):
        result = work()
    return graph, result


def page_lock(tensor: Tensor) -> Callable[[], Any]:
    """Locks a host tensor's memory to its pages and maps it for the GPU -> what unlocks it. RuntimeError with CUDA's
    error number where the system refuses."""
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    code = int(runtime.cudaHostRegister(address, tensor.nbytes, 0))
    if code:
        raise RuntimeError(
            f"{tensor.nbytes / 2**30:.1f} GiB of host memory could not be page-locked (CUDA error {code}; ulimit -l)"
        )
    return lambda: runtime.cudaHostUnregister(address)
