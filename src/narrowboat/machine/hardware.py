"""What this machine has and how much of it is free: device, memory, disk, and what this process holds of them.

Free host memory is what may be taken without swapping: a container's limit counts as well as the machine's. A process
holds two kinds of resident memory: anonymous bytes, which nobody can take back, and pages of mapped files, which the
system drops when it needs room; a budget counts the first.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from narrowboat.errors import MachineError

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Memory:
    """A place's memory: how large it is and how much of it may still be taken."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class ProcessMemory:
    """What this process holds of the host's memory; ``anonymous`` is resident without the pages of mapped files."""

    resident_bytes: int
    anonymous_bytes: int
    peak_resident_bytes: int


def pick_device(choice: Literal["auto", "cpu", "cuda"] = "auto") -> torch.device:
    """The device to train on; ``auto`` takes a CUDA card if there is one that works.

    Raises:
        MachineError: ``cuda`` was asked for and there is none.
    """
    if choice == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if choice == "cuda":
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise MachineError(
            f"model.device is cuda, and no CUDA card was found: torch {torch.__version__} {built} and sees "
            f"{torch.cuda.device_count()} cards. Set model.device: cpu, or install a driver and a CUDA build of torch."
        )
    return torch.device("cpu")


def describe_device(device: torch.device) -> str:
    """One line for people: ``NVIDIA L4``, or ``CPU, 8 threads``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def device_memory(device: torch.device) -> Memory:
    """Memory of ``device``; what torch has reserved and does not use counts as free. The CPU's is the host's."""
    if device.type != "cuda":
        return host_memory()
    free, total = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(total, free + idle)


def can_page(device: torch.device) -> bool:
    """Whether the driver of ``device`` gives memory that it pages between card and host.

    Not every CUDA card's does (virtual ones, some containers), and a library that takes it without asking ends the
    process there; so it is tried with a page.
    """
    if device.type != "cuda":
        return False
    torch.cuda.synchronize(device)  # which opens the card, if nobody has yet
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:  # torch's "cuda" may be another maker's card
        return False
    page, attach_globally = ctypes.c_void_p(), 1
    if driver.cuMemAllocManaged(ctypes.byref(page), ctypes.c_size_t(4096), attach_globally) != 0:
        return False
    driver.cuMemFree_v2(page)
    return True


def processes_here() -> int:
    """How many processes of this run a launcher has started on this machine."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def host_memory() -> Memory:
    """Memory of the host as this process may use it: the machine's, or less where a container limits it."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in _cgroup_limits():
        total, free = min(total, limit), min(free, max(0, limit - used))
    return Memory(total, free)


def process_memory() -> ProcessMemory:
    """What this process holds now, and the most it ever held."""
    status = Path("/proc/self/status")
    if status.exists():
        # "RssAnon:     1234 kB"; shared memory is swappable but not droppable, so it counts as anonymous
        lines = (line.split() for line in status.read_text().splitlines())
        sizes = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}
        resident, peak = sizes.get("VmRSS", 0), sizes.get("VmHWM", 0)
        anonymous = sizes["RssAnon"] + sizes.get("RssShmem", 0) if "RssAnon" in sizes else resident
        return ProcessMemory(resident, anonymous, max(peak, resident))
    resident = psutil.Process().memory_info().rss
    return ProcessMemory(resident, resident, max(_peak_resident_bytes(), resident))


def free_disk_bytes(path: Path) -> int:
    """Bytes free where ``path`` lies, or will lie once its missing folders are made."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _cgroup_limits() -> list[tuple[int, int]]:
    """``(limit, used)`` bytes of every control group that limits this process (Linux); page cache is not use."""
    if not MEMBERSHIP.exists():
        return []
    groups = []
    for line in MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        # inside a container the path of the host may not exist; the mount's own root is the container's group then
        folders = {root, *(place for place in (folder, *folder.parents) if place.is_relative_to(root))}
        groups += [group for place in sorted(folders) if (group := _read_cgroup(place, *names))]
    return groups


def _read_cgroup(folder: Path, limit_file: str, used_file: str, droppable: str) -> tuple[int, int] | None:
    try:
        limit = int((folder / limit_file).read_text())  # "max" is no number, and no limit
        used = int((folder / used_file).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit, max(0, used - int(counts.get(droppable, 0)))
    except (OSError, ValueError):
        return None


def _peak_resident_bytes() -> int:
    """Where there is no ``/proc``: Windows keeps the peak in its memory record, macOS in ``getrusage``, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # absent on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
