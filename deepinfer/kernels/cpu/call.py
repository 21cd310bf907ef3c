"""From tensors to C: every argument in its declared type, checked before a pointer leaves Python."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from deepinfer.kernels.cpu.build import library


def call(name: str, *arguments: Tensor | ctypes.Structure | int | float | None) -> None:
    """Run the C function `name`: contiguous CPU tensors go as pointers, structures by reference, integers as
    int64, floats as float, None as a null pointer; the number of threads follows as the last argument."""
    handle = library().handle
    assert handle is not None, "select.py never comes here without a library"
    values: list[object] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            assert argument.is_contiguous() and argument.device.type == "cpu", name
            values.append(ctypes.c_void_p(argument.data_ptr()))
        elif isinstance(argument, int):
            values.append(ctypes.c_int64(argument))
        elif isinstance(argument, float):
            values.append(ctypes.c_float(argument))
        else:
            values.append(argument if argument is None else ctypes.byref(argument))
    getattr(handle, name)(*values, ctypes.c_int(torch.get_num_threads()))
