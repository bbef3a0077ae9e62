"""What the system and the card allow: page-locked memory, the driver, kernels, and what is ours of the device."""

from __future__ import annotations

import sys
from contextlib import suppress

import torch

from narrowboat.machine.hardware import process_memory


def pinned_limit() -> int | None:
    """Bytes of host memory that this process may lock; None for no limit, or where the system does not say."""
    if sys.platform == "win32":
        return None
    import resource  # absent on Windows

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def driver_version(device: torch.device) -> str:
    """The card's driver, as ``575.51.03``; empty for a CPU, or where NVML does not say."""
    if device.type != "cuda":
        return ""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return ""


def ours(device: torch.device) -> int:
    """Bytes of the device's memory in use that are this process's own."""
    if device.type != "cuda":
        return process_memory().anonymous_bytes
    return torch.cuda.memory_reserved(device)


def attention_kernel(device: torch.device) -> str:
    """Which of PyTorch's attention kernels this device has, and since when."""
    if device.type != "cuda":
        return "flash for CPUs, in float32 and bfloat16"
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 8:
        return f"flash, in float16 and bfloat16 (compute capability {major}.{minor})"
    return f"memory-efficient, in float16 and float32; flash needs compute capability 8.0, this is {major}.{minor}"
