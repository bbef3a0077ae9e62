"""Places outside of the device where tensors rest: host memory, page-locked where a card wants it, and scratch files.

Each place makes room (``empty``) and takes copies (``keep``), and says of its bytes where they lie. A place that knows
more than one process, such as weights dealt out to several cards, would be one more of the same kind.

- ``Host``: what a card copies from and to without waiting has to be page-locked. PyTorch's own allocator of such memory
  takes powers of two, up to twice what is asked for; here exactly the pages that are needed are locked.
- ``Disk``: a scratch file loses its name as soon as it is open, so whatever ends the process, a crash too, ends the
  file. Its pages are the tensor itself; the operating system keeps in memory what it has room for.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil
import torch

from narrowboat.errors import MachineError
from narrowboat.events import Notice, Tell
from narrowboat.owner.causes import Where, cause
from narrowboat.owner.values import is_forecast
from narrowboat.units import format_bytes

Shape = tuple[int, ...]

IN_MEMORY = ("tmpfs", "ramfs")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Resting(Protocol):
    """A place where tensors rest.

    Attributes:
        where: what its bytes are counted as.
        copies: whether what rests there has to be copied before the device can work with it.
    """

    where: Where
    copies: bool

    def empty(self, shape: Shape, dtype: torch.dtype, name: str) -> torch.Tensor:
        """Room for a tensor, counted under the cause ``name``."""


def keep(place: Resting, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A copy of ``tensor`` that rests at ``place``, counted under the cause ``name``."""
    return place.empty(tensor.shape, tensor.dtype, name).copy_(tensor)


class Host:
    """Host memory for what comes from ``device`` and goes back; pageable for all, once locking pages has failed.

    Args:
        device: where the arithmetic is.
        tell: hears that memory could not be locked.
    """

    copies = True

    def __init__(self, device: torch.device, tell: Tell) -> None:
        self._tell = tell
        self.where: Where = "pinned" if device.type == "cuda" else "host"

    def empty(self, shape: Shape, dtype: torch.dtype, name: str) -> torch.Tensor:
        """Room for a tensor."""
        if self.where == "pinned":
            try:
                with cause(name, "pinned"):
                    return _locked(shape, dtype)
            except (RuntimeError, OSError, AssertionError) as error:  # the last: a torch without CUDA
                self.where = "host"
                size = format_bytes(torch.Size(shape).numel() * dtype.itemsize)
                self._tell(Notice(f"{size} could not be pinned ({error}); from here on pageable host memory is used."))
        with cause(name, "host"):
            return torch.empty(shape, dtype=dtype, device="cpu")


class _Pages(mmap.mmap):
    """Anonymous pages that the card knows, until nobody holds them any more."""

    address = 0

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)


def _locked(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    pages = _Pages(-1, -(-max(1, num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    status = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), len(pages), 0)
    if int(status):
        raise RuntimeError(str(status))
    pages.address = whole.data_ptr()
    return whole[:num_bytes].view(dtype).view(shape)


class Disk:
    """Scratch files in ``folder``, or in the folder for temporary files.

    Args:
        device: where the arithmetic is; a CPU works on the file's pages as they are.
        tell: hears that the folder is in memory itself.
        folder: of the files.
        copies: as a card would, on a CPU too.
    """

    where: Where = "disk"

    def __init__(self, device: torch.device, tell: Tell, folder: Path | None = None, copies: bool = False) -> None:
        self.copies = copies or device.type != "cpu"
        self._tell, self._folder, self._is_looked_at = tell, folder, False

    def empty(self, shape: Shape, dtype: torch.dtype, name: str) -> torch.Tensor:
        """Room for a tensor.

        Raises:
            MachineError: with bytes needed and free when the disk cannot hold it.
        """
        with cause(name, "disk"):
            if is_forecast():
                return torch.empty(shape, dtype=dtype)
            folder = self._folder or Path(tempfile.gettempdir())
            self._look_at(folder)
            return map_scratch(folder, shape, dtype)

    def _look_at(self, folder: Path) -> None:
        if not self._is_looked_at and _kind_of_disk(folder) in IN_MEMORY:
            self._tell(
                Notice(
                    f"{folder} is a {_kind_of_disk(folder)}: scratch files there take host memory. Set TMPDIR to a "
                    "folder on a disk."
                )
            )
        self._is_looked_at = True


def map_scratch(folder: Path, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a file without a name, gone when the tensor is.

    Raises:
        MachineError: with bytes needed and free when the disk cannot hold it, or why it cannot be written.
    """
    num_elements = torch.Size(shape).numel()
    num_bytes = max(1, num_elements * dtype.itemsize)
    try:
        free = shutil.disk_usage(folder).free
        if num_bytes > free:
            raise _full(folder, num_bytes, free)
        file, name = tempfile.mkstemp(prefix="narrowboat-", suffix=".scratch", dir=folder)
        try:
            os.posix_fallocate(file, 0, num_bytes)  # a full disk is an error here, not a bus error later
            return torch.from_file(name, shared=True, size=num_elements, dtype=dtype).view(shape)
        finally:
            os.close(file)
            os.unlink(name)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise _full(folder, num_bytes, shutil.disk_usage(folder).free) from None
        raise MachineError(
            f"A scratch file of {format_bytes(num_bytes)} cannot be made in {folder}: {error.strerror}. Set TMPDIR to "
            "a folder that can be written, or choose a plan that leaves nothing on disk."
        ) from None


def _full(folder: Path, num_bytes: int, free: int) -> MachineError:
    return MachineError(
        f"A scratch file needs {format_bytes(num_bytes)} more in {folder}; {format_bytes(free)} are free. Set TMPDIR "
        "to a folder with room, or choose a plan that leaves nothing on disk."
    )


def _kind_of_disk(folder: Path) -> str:
    """The file system that ``folder`` is on; empty where that is not known."""
    place = folder.resolve()
    mounted = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounted[at] for at in (place, *place.parents) if at in mounted), "")


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
