"""Too little of something: address space, room on disk, rights, a file's size, a clock that only goes forward.

Each run ends well or with a sentence, never with a traceback.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowboat import api
from narrowboat.units import MIB
from tests.harm.place import Place, is_refusal, session

NOBODY = 65534


@dataclass(frozen=True)
class Tried:
    """One limit, how a run under it ended and the end of what it said."""

    name: str
    exit_code: int
    is_well: bool
    said: str


def limits(place: Place) -> list[Tried]:
    """A run under each limit; those of disks and users only for root."""
    tried: dict[str, Callable[[Place], Any]] = {
        "8 MiB of address space beyond what the libraries take": _in_little_memory,
        "a clock that goes back a quarter of an hour at each look": _with_a_clock_that_goes_back,
        "files of at most 200 KB": _with_small_files,
    }
    if os.geteuid() == 0:
        tried |= {"a disk that is full": _on_a_small_disk, "another user's folder": _as_somebody_else}
    found = []
    for name, work in tried.items():
        code, said = session(lambda: work(place))  # noqa: B023
        found.append(Tried(name, code, is_refusal(code, said), said[-300:]))
    return found


def _in_little_memory(place: Place) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 8 * MIB, resource.RLIM_INFINITY))
    api.train(place.options("limited", {"lora.rank": 64}), quiet=True)


def _with_a_clock_that_goes_back(place: Place) -> None:
    own, num_looks = time.time, 0

    def clock() -> float:
        nonlocal num_looks
        num_looks += 1
        return own() - 900.0 * num_looks

    time.time = clock
    api.train(place.options("clock", {}), quiet=True)
    api.train(place.options("clock", {"train.steps": place.steps + 1}), resume=True, quiet=True)


def _with_small_files(place: Place) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    api.train(place.options("small files", {"lora.rank": 64}), quiet=True)


def _on_a_small_disk(place: Place) -> None:
    disk = place.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", disk], check=True)
    try:
        api.train(place.options("disk/run", {"lora.rank": 16}), quiet=True)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def _as_somebody_else(place: Place) -> None:
    (place.folder / "theirs").mkdir(mode=0o755)
    options = place.options("theirs/run", {})
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    api.train(options, quiet=True)
