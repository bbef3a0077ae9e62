"""What a kind of card does by itself, whatever is computed: formats, workspaces, how its allocator rounds.

None of it needs the card. The figures are those of PyTorch's CUDA allocator and of its cuBLAS handles; ``make
test-card`` compares them to the byte with what a CUDA build of PyTorch allocates on a double of each kind of card.
"""

from __future__ import annotations

import os
import sys
from functools import cache

import pynvml
import torch

from narrowboat.machine.rates import USUAL_CONTEXT_BYTES, Capability

GRANULE_BYTES = 512
"""Every tensor takes a multiple of it."""

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def card_at(device: torch.device) -> Capability | None:
    """The kind of card that ``device`` is; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def multiplies_bfloat16(capability: Capability) -> bool:
    """Whether the card has units for bfloat16; else it is emulated, many times slower."""
    return capability >= (8, 0)


def let_blocks_grow() -> bool:
    """Tell PyTorch's allocator to grow and shrink what it took instead of leaving holes of odd sizes.

    Says whether it was told: not where the user set something, where memory is taken already, or on Windows, whose
    driver cannot.
    """
    if sys.platform == "win32" or any(os.environ.get(name) for name in SETTINGS) or torch.cuda.memory_reserved():
        return False
    told = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    told("expandable_segments:True")
    return True


@cache
def context_bytes(device: torch.device) -> int:
    """What the driver holds for this process on ``device`` beside what torch took, other processes' memory left out.

    The first tensor makes the context, so what the card's used bytes grow by is its size; where there is one already,
    the driver knows what this process holds. Some drivers (in containers, on Windows) know no processes: then the
    usual size is taken. Found out once, since only the first tensor can tell.
    """
    try:
        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        before = int(pynvml.nvmlDeviceGetMemoryInfo(card).used)
        is_new = torch.cuda.memory_reserved(device) == 0
        torch.zeros(1, device=device)
        grown = int(pynvml.nvmlDeviceGetMemoryInfo(card).used) - before - torch.cuda.memory_reserved(device)
        ours = _of_this_process(card)
    except pynvml.NVMLError:
        return USUAL_CONTEXT_BYTES
    if ours is not None:
        return max(0, ours - torch.cuda.memory_reserved(device))
    return grown if is_new and 0 < grown < 2 * USUAL_CONTEXT_BYTES else USUAL_CONTEXT_BYTES


def _of_this_process(card: object) -> int | None:
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(card)
    return next((int(p.usedGpuMemory) for p in running if p.pid == os.getpid() and p.usedGpuMemory), None)
