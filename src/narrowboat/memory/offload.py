"""Where the layers' inputs wait for backward: on the device, in host memory, in a scratch file, or nowhere.

tokens x hidden elements a layer are what streaming still keeps (for Llama-3.1-8B in bf16 at 131,072 tokens: 32 GiB).

- ``DeviceInputs``: no bytes saved, no time;
- ``HostInputs``: pinned memory; copies run beside the computation on a stream of their own;
- ``DiskInputs``: a memory-mapped scratch file; the operating system keeps in memory what it has room for. The file has
  no name once it is open, so whatever ends the process ends the file;
- ``StridedInputs``: only every n-th layer's input, the others are computed again: one more forward of n - 1 layers,
  1/n of the bytes and n more while their turn lasts.

Exact, all of them.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch._subclasses.fake_tensor import is_fake

from narrowboat.errors import MachineError
from narrowboat.events import Notice, Tell
from narrowboat.memory.meter import LAYER_INPUTS, account, cause
from narrowboat.plan import Place
from narrowboat.units import format_bytes

Layer = Callable[[torch.Tensor], torch.Tensor]
"""Computes a layer's output from its input once more, without a graph."""


class Held(Protocol):
    """A layer's input, waiting."""

    def tile(self, start: int, stop: int) -> torch.Tensor:
        """``[batch, stop - start, hidden]``, on the device."""

    def release(self) -> None:
        """It is not needed any more."""


class InputStore(Protocol):
    """Takes the input of each layer on the way forward."""

    def put(self, x: torch.Tensor, layer: Layer) -> Held:
        """Hold ``[batch, tokens, hidden]``, the input of ``layer``."""

    def close(self) -> None:
        """Give back all that was taken from the machine."""


def input_store(place: Place, tell: Tell) -> InputStore:
    """The store that keeps inputs at ``place``."""
    if place == "host":
        return HostInputs(tell)
    return DiskInputs() if place == "disk" else DeviceInputs()


class _OnDevice:
    def __init__(self, x: torch.Tensor) -> None:
        self._x: torch.Tensor | None = x

    def tile(self, start: int, stop: int) -> torch.Tensor:
        assert self._x is not None
        return self._x[:, start:stop]

    def release(self) -> None:
        self._x = None


class DeviceInputs:
    """Inputs stay where they are."""

    def put(self, x: torch.Tensor, layer: Layer) -> Held:
        """See ``InputStore``."""
        account(x, LAYER_INPUTS)
        return _OnDevice(x.detach())

    def close(self) -> None:
        """See ``InputStore``."""


class _Lent:
    """A buffer lent by a pool, read tile by tile to the device."""

    def __init__(self, buffer: torch.Tensor, device: torch.device, pool: list[torch.Tensor]) -> None:
        self._buffer, self._device, self._pool = buffer, device, pool

    def tile(self, start: int, stop: int) -> torch.Tensor:
        part = self._buffer[:, start:stop]
        return part if self._device.type == "cpu" else part.to(self._device, non_blocking=True)

    def release(self) -> None:
        self._pool.append(self._buffer)


class HostInputs:
    """Pinned host memory; on a CPU, where host and device are one, plain memory."""

    def __init__(self, tell: Tell) -> None:
        self._memory, self._pool = HostMemory(tell), _Pool(self._allocate)
        self._stream: torch.cuda.Stream | None = None

    def put(self, x: torch.Tensor, layer: Layer) -> Held:
        """See ``InputStore``."""
        buffer = self._pool.take(x)
        if x.device.type != "cuda":
            buffer.copy_(x)
            return _Lent(buffer, x.device, self._pool.free)
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            buffer.copy_(x, non_blocking=True)
        x.record_stream(self._stream)  # its storage is not used anew before the copy is done
        return _Copied(buffer, x.device, self._pool.free, self._stream.record_event())

    def close(self) -> None:
        """See ``InputStore``."""
        self._pool.free.clear()

    def _allocate(self, x: torch.Tensor) -> torch.Tensor:
        with cause(LAYER_INPUTS, "host"):
            return self._memory.empty(x, x.device)


class HostMemory:
    """Host memory for what comes from a device and goes back: pinned for a card, pageable once pinning has failed."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._pinned_failed = False

    def empty(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Room for a tensor like ``like`` that travels to ``device``."""
        if device.type == "cuda" and not self._pinned_failed:
            try:
                return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
            except RuntimeError as error:
                self._pinned_failed = True
                size = format_bytes(like.numel() * like.element_size())
                self._tell(Notice(f"{size} could not be pinned ({error}); from here on pageable host memory is used."))
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")


class _Copied(_Lent):
    """A pinned buffer whose copy may still be on its way."""

    def __init__(
        self, buffer: torch.Tensor, device: torch.device, pool: list[torch.Tensor], copied: torch.cuda.Event
    ) -> None:
        super().__init__(buffer, device, pool)
        self._copied = copied

    def tile(self, start: int, stop: int) -> torch.Tensor:
        torch.cuda.current_stream().wait_event(self._copied)
        return super().tile(start, stop)


class DiskInputs:
    """A memory-mapped scratch file in the folder for temporary files."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        self._pool = _Pool(self._allocate)

    def put(self, x: torch.Tensor, layer: Layer) -> Held:
        """See ``InputStore``."""
        buffer = self._pool.take(x)
        buffer.copy_(x)
        return _Lent(buffer, x.device, self._pool.free)

    def close(self) -> None:
        """See ``InputStore``."""
        self._pool.free.clear()

    def _allocate(self, x: torch.Tensor) -> torch.Tensor:
        with cause(LAYER_INPUTS, "disk"):
            return torch.empty_like(x) if is_fake(x) else map_scratch(self._folder, x.shape, x.dtype)


class _Pool:
    """Buffers that come back are lent again: a step's pages are touched once, not anew at every step."""

    def __init__(self, allocate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._allocate = allocate
        self.free: list[torch.Tensor] = []

    def take(self, x: torch.Tensor) -> torch.Tensor:
        for i, buffer in enumerate(self.free):
            if buffer.shape == x.shape and buffer.dtype == x.dtype:
                return self.free.pop(i)
        self.free.clear()  # another micro-batch, other shapes
        return self._allocate(x)


def map_scratch(folder: Path, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a file without a name, gone when the tensor is.

    Raises:
        MachineError: with bytes needed and free when the disk cannot hold it.
    """
    num_elements = shape.numel()
    num_bytes = max(1, num_elements * dtype.itemsize)
    file, name = tempfile.mkstemp(prefix="narrowboat-", suffix=".scratch", dir=folder)
    try:
        os.posix_fallocate(file, 0, num_bytes)  # a full disk is an error here, not a bus error later
        return torch.from_file(name, shared=True, size=num_elements, dtype=dtype).view(shape)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(folder).free
        raise MachineError(
            f"The scratch file needs {format_bytes(num_bytes)} more in {folder}; {format_bytes(free)} are free. Set "
            "TMPDIR to a folder with room, or choose a plan whose inputs are not on disk."
        ) from None
    finally:
        os.close(file)
        os.unlink(name)


class StridedInputs:
    """Holds every ``stride``-th layer's input in ``store``; made anew for every forward, which goes layer by layer."""

    def __init__(self, store: InputStore, stride: int) -> None:
        self._store, self._stride = store, stride
        self._group: _Group | None = None

    def put(self, x: torch.Tensor, layer: Layer) -> Held:
        """See ``InputStore``."""
        if self._group is None or len(self._group.layers) == self._stride:
            self._group = _Group(self._store, self._store.put(x, layer), x.shape[1])
        self._group.layers.append(layer)
        return _Recomputed(self._group, len(self._group.layers) - 1)

    def close(self) -> None:
        """See ``InputStore``."""
        self._store.close()


class _Group:
    """Neighbouring layers of which the first one's input is held."""

    def __init__(self, store: InputStore, first: Held, num_tokens: int) -> None:
        self.layers: list[Layer] = []
        self.held = [first]
        self._store, self._num_tokens = store, num_tokens

    def fill(self) -> None:
        """Compute the inputs of all layers but the first, once."""
        while len(self.held) < len(self.layers):
            last = len(self.held) - 1
            x = self.layers[last](self.held[last].tile(0, self._num_tokens))
            self.held.append(self._store.put(x, self.layers[last + 1]))


class _Recomputed:
    def __init__(self, group: _Group, index: int) -> None:
        self._group, self._index = group, index

    def tile(self, start: int, stop: int) -> torch.Tensor:
        self._group.fill()
        return self._group.held[self._index].tile(start, stop)

    def release(self) -> None:
        self._group.held[self._index].release()
