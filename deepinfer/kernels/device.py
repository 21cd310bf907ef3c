"""Which device a name means, and what it has free. The only place, beside `doctor`, that asks for a GPU."""

import os

import torch


def resolve_device(name: str) -> torch.device:
    """The device of "auto" (CUDA if there is one, else CPU), "cpu", "cuda" or "cuda:N". ValueError with the reason."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: {name!r} is not one of auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            reason = "this build of torch has no CUDA" if torch.version.cuda is None else "no CUDA device is visible"
            raise ValueError(f"device: {name!r} cannot be used, {reason}; use device='cpu'")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device: {name!r} does not exist; there are {torch.cuda.device_count()} CUDA devices")
    return device


def free_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of the device's memory; for the CPU those of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
