"""Room outside of the device: host memory, pinned where it can be, and files without a name.

A scratch file loses its name as soon as it is open, so whatever ends the process, a crash too, ends the file. Its pages
are the tensor itself; the operating system keeps in memory what it has room for.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from narrowboat.errors import MachineError
from narrowboat.events import Notice, Tell
from narrowboat.units import format_bytes

Shape = tuple[int, ...]


class HostMemory:
    """Host memory for what comes from a device and goes back: pinned for a card, pageable once pinning has failed."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._pinned_failed = False

    def empty(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Room for a tensor that travels to ``device``."""
        if device.type == "cuda" and not self._pinned_failed:
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            except RuntimeError as error:
                self._pinned_failed = True
                size = format_bytes(torch.Size(shape).numel() * dtype.itemsize)
                self._tell(Notice(f"{size} could not be pinned ({error}); from here on pageable host memory is used."))
        return torch.empty(shape, dtype=dtype, device="cpu")


def map_scratch(folder: Path, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a file without a name, gone when the tensor is.

    Raises:
        MachineError: with bytes needed and free when the disk cannot hold it.
    """
    num_elements = torch.Size(shape).numel()
    num_bytes = max(1, num_elements * dtype.itemsize)
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise _full(folder, num_bytes, free)
    file, name = tempfile.mkstemp(prefix="narrowboat-", suffix=".scratch", dir=folder)
    try:
        os.posix_fallocate(file, 0, num_bytes)  # a full disk is an error here, not a bus error later
        return torch.from_file(name, shared=True, size=num_elements, dtype=dtype).view(shape)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise _full(folder, num_bytes, free) from None
    finally:
        os.close(file)
        os.unlink(name)


def _full(folder: Path, num_bytes: int, free: int) -> MachineError:
    return MachineError(
        f"A scratch file needs {format_bytes(num_bytes)} more in {folder}; {format_bytes(free)} are free. Set TMPDIR "
        "to a folder with room, or choose a plan that leaves nothing on disk."
    )


class Pool:
    """Buffers that come back are lent again: a step's pages are touched once, not anew at every step."""

    def __init__(self, allocate: Callable[[Shape, torch.dtype], torch.Tensor]) -> None:
        self._allocate = allocate
        self._free: list[torch.Tensor] = []

    def take(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """A buffer ``[batch, tokens, ...]``, used or new."""
        for i, buffer in enumerate(self._free):
            if buffer.shape == shape and buffer.dtype == dtype:
                return self._free.pop(i)
        # those of a micro-batch of another shape are not needed again soon
        self._free = [buffer for buffer in self._free if buffer.shape[:2] == shape[:2]]
        return self._allocate(shape, dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let others have it."""
        self._free.append(buffer)

    def close(self) -> None:
        """Give all that is free back to the machine."""
        self._free.clear()
