"""Kernels of a cubin on torch's devices and streams, through the driver's C interface.

A launch costs the host a few microseconds: what does not change from one to the next is laid out once a thread, and the
driver is called by ctypes alone, so a machine that compiles with nvcc needs no Python package for it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading

import torch

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
EARLY_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class CudaError(RuntimeError):
    """The driver refused something."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, as far as a cluster's shape and a flag need it."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("cluster", ctypes.c_uint * 3),
                ("rest", ctypes.c_char * 52))  # fmt: skip


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)),
                ("attribute_count", ctypes.c_uint))  # fmt: skip


@functools.cache
def driver() -> ctypes.CDLL:
    """libcuda, which comes with the GPU's driver. CudaError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the driver's library cannot be loaded: {error}") from error


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{what}: {(text.value or b'unknown error').decode()} (CUDA error {code})")


class _Call(threading.local):
    """What a thread hands over in a launch. Its own: another thread may write while the driver still reads."""

    def __init__(self, size: int, threads: int, shared_bytes: int, early: bool) -> None:
        """size: bytes of the parameters. early: see `Kernel`."""
        _enter()
        self.params = (ctypes.c_char * size)()
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        flag = Attribute(id=EARLY_LAUNCH, cluster=(early, 0, 0))
        self.attributes = (Attribute * 2)(flag, Attribute(id=CLUSTER_DIMENSION, cluster=(1, 1, 1)))
        self.config = Config((1, 1, 1), (threads, 1, 1), shared_bytes, None, self.attributes, 1)
        self.config_at = ctypes.byref(self.config)
        self.grid, self.cluster = self.config.grid, self.attributes[1].cluster  # views: to write them is to write these


class Kernel:
    """One kernel of a cubin. Its parameters are one structure by value; blocks and clusters have one dimension."""

    def __init__(
        self, image: bytes, name: str, *, params: str, threads: int, shared_bytes: int, early: bool = False
    ) -> None:
        """params: the structure as `struct` writes it. shared_bytes: dynamic, of a block. Nothing is loaded yet.

        early: its blocks start while the kernel before it on the stream still ends. They must wait for that
        (`griddepcontrol.wait`) before they read or write what another kernel touches.
        """
        self.name = name
        self._image, self._shared_bytes = image, shared_bytes
        self._pack, self._size = struct.Struct(params).pack_into, struct.calcsize(params)
        self._threads, self._early = threads, early
        self._call: _Call | None = None
        self._functions: dict[int, ctypes.c_void_p] = {}

    def load(self, device: int) -> None:
        """Onto a device of torch's; nothing where it is already. CudaError. RuntimeError while a graph is captured."""
        if device in self._functions:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the CUDA kernel {self.name!r} is loaded at its first use, which cannot be while a graph is captured: "
                "run the operation once before"
            )
        with torch.cuda.device(device):
            _enter()
            function = self._loaded()
            self._call = self._call or _Call(self._size, self._threads, self._shared_bytes, self._early)
            self._functions[device] = function

    def _loaded(self) -> ctypes.c_void_p:
        """The function in the current device's context, ready to be launched."""
        cuda, module, function = driver(), ctypes.c_void_p(), ctypes.c_void_p()
        _check(cuda.cuModuleLoadData(ctypes.byref(module), self._image), f"{self.name}: machine code is not accepted")
        found = cuda.cuModuleGetFunction(ctypes.byref(function), module, self.name.encode())
        _check(found, f"{self.name}: not in its machine code")
        shared = cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, self._shared_bytes)
        _check(shared, f"{self.name}: {self._shared_bytes} bytes of shared memory")
        if hasattr(cuda, "cuFuncLoad"):  # drivers of CUDA 12.4 on; older ones leave it to the first launch
            _check(cuda.cuFuncLoad(function), f"{self.name}: cannot be loaded")
            offset, size = ctypes.c_size_t(), ctypes.c_size_t()
            known = cuda.cuFuncGetParamInfo(function, ctypes.c_size_t(0), ctypes.byref(offset), ctypes.byref(size))
            if known == 0 and size.value != self._size:
                raise CudaError(f"{self.name}: takes {size.value} bytes of parameters, is given {self._size}")
        return function

    def clusters(self, device: int, blocks: int) -> int:
        """How many clusters of `blocks` blocks run at once on a device that it was loaded onto. CudaError."""
        attribute = Attribute(id=CLUSTER_DIMENSION, cluster=(blocks, 1, 1))
        shape = (blocks, 1, 1), (self._threads, 1, 1), self._shared_bytes
        config, count = Config(*shape, None, ctypes.pointer(attribute), 1), ctypes.c_int()
        with torch.cuda.device(device):
            asked = ctypes.byref(count), self._functions[device], ctypes.byref(config)
            _check(driver().cuOccupancyMaxActiveClusters(*asked), f"{self.name}: clusters of {blocks} blocks")
        return count.value

    def launch(self, device: int, blocks: int, cluster: int, *values: float) -> None:
        """Starts `blocks` blocks, a multiple of `cluster` (1 .. 8), on the current stream of a device that it was
        loaded onto. values: the parameters. CudaError."""
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return self.launch(device, blocks, cluster, *values)
        call = self._call
        assert call is not None
        self._pack(call.params, 0, *values)
        config = call.config
        call.grid[0] = blocks
        config.stream = torch._C._cuda_getCurrentRawStream(device)
        call.cluster[0] = cluster
        config.attribute_count = 1 + (cluster > 1)
        code = driver().cuLaunchKernelEx(call.config_at, self._functions[device], call.pointers, None)
        if code:
            _check(code, f"{self.name}: launch of {blocks} blocks")


def _enter() -> None:
    """Makes the current device's context this thread's where it has none yet: torch puts that off as long as it can."""
    cuda, context = driver(), ctypes.c_void_p()
    _check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "the current context")
    if not context:
        device = torch.cuda.current_device()
        _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"the context of device {device}")
        _check(cuda.cuCtxSetCurrent(context), f"the context of device {device}")
