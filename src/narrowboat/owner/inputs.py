"""Where what the forward pass leaves waits for backward: on the device, in host memory or in scratch files.

tokens x hidden elements a layer are what streaming still keeps (for Llama-3.1-8B in bf16 at 131,072 tokens: 32 GiB).

- ``OnDevice``: no bytes saved, no time;
- ``OnHost``: host memory; copies run beside the computation on a stream of their own, there and back;
- ``Elsewhere``, on disk: mapped scratch files; on a CPU they are read where they lie.

Exact, all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from narrowboat.owner.causes import LAYER_INPUTS, account, cause
from narrowboat.owner.places import Disk, Host, Pool, Resting
from narrowboat.plan import Place

Layer = Callable[[torch.Tensor], torch.Tensor]
"""Computes a layer's output from its input once more, without a graph."""


class Held(Protocol):
    """A tensor ``[batch, tokens, ...]``, waiting."""

    def tile(self, start: int, stop: int) -> torch.Tensor:
        """``[batch, stop - start, ...]``, on the device."""

    def let_go(self) -> bool:
        """Whether the tensor that was held may be overwritten from now on."""

    def release(self) -> None:
        """It is not needed any more."""


class Room(Held, Protocol):
    """Room for a tensor that comes tile by tile."""

    def write(self, start: int, part: torch.Tensor) -> None:
        """Take the tokens from ``start`` on."""


class Store(Protocol):
    """Takes what each layer leaves on the way forward."""

    def put(self, x: torch.Tensor, layer: Layer) -> Held:
        """Hold ``[batch, tokens, hidden]``, the input of ``layer``, or compute it again."""

    def hold(self, x: torch.Tensor) -> Held:
        """Hold ``[batch, tokens, ...]``."""

    def room(self, like: torch.Tensor, num_tokens: int) -> Room:
        """Room for ``num_tokens`` tokens of which ``like`` ``[batch, tile, ...]`` are some."""

    def close(self) -> None:
        """Give back all that was taken from the machine."""


def store_at(place: Place, host: Host, disk: Disk) -> Store:
    """The store that keeps things at ``place``."""
    if place == "host":
        return OnHost(host)
    return Elsewhere(disk) if place == "disk" else OnDevice()


class OnDevice:
    """Things stay where they are."""

    def put(self, x: torch.Tensor, layer: Layer) -> Held:
        """See ``Store``."""
        return self.hold(x)

    def hold(self, x: torch.Tensor) -> Held:
        """See ``Store``."""
        account(x, LAYER_INPUTS)
        return _Here(x.detach())

    def room(self, like: torch.Tensor, num_tokens: int) -> Room:
        """See ``Store``."""
        with cause(LAYER_INPUTS):
            return _Here(like.new_empty(like.shape[0], num_tokens, *like.shape[2:]))

    def close(self) -> None:
        """See ``Store``."""


class _Here:
    def __init__(self, x: torch.Tensor) -> None:
        self._x: torch.Tensor | None = x

    def write(self, start: int, part: torch.Tensor) -> None:
        self.tile(start, start + part.shape[1]).copy_(part)

    def tile(self, start: int, stop: int) -> torch.Tensor:
        assert self._x is not None
        return self._x[:, start:stop]

    def let_go(self) -> bool:
        return False

    def release(self) -> None:
        self._x = None


class Elsewhere:
    """Things move to buffers at ``place``, which are lent again when they come back."""

    def __init__(self, place: Resting) -> None:
        self._pool = Pool(lambda shape, dtype: place.empty(shape, dtype, LAYER_INPUTS))

    def put(self, x: torch.Tensor, layer: Layer) -> Held:
        """Hold the input of ``layer``."""
        return self.hold(x)

    def hold(self, x: torch.Tensor) -> Held:
        """Hold ``[batch, tokens, ...]``."""
        room = self.room(x, x.shape[1])
        room.write(0, x)
        return room

    def room(self, like: torch.Tensor, num_tokens: int) -> Room:
        """A buffer for ``num_tokens`` tokens of which ``like`` are some."""
        buffer = self._pool.take((like.shape[0], num_tokens, *like.shape[2:]), like.dtype)
        return self._lend(buffer, like.device)

    def close(self) -> None:
        """Give the buffers back to the machine."""
        self._pool.close()

    def _lend(self, buffer: torch.Tensor, device: torch.device) -> Room:
        return _Lent(buffer, device, self._pool)


class OnHost(Elsewhere):
    """Host memory; between a card and page-locked memory, copies run on a stream of their own."""

    _stream: torch.cuda.Stream | None = None

    def _lend(self, buffer: torch.Tensor, device: torch.device) -> Room:
        if device.type != "cuda":
            return super()._lend(buffer, device)
        self._stream = self._stream or torch.cuda.Stream(device)
        return _Travelling(buffer, device, self._pool, self._stream)


class _Lent:
    """A buffer lent by a pool, read tile by tile to the device."""

    def __init__(self, buffer: torch.Tensor, device: torch.device, pool: Pool) -> None:
        self._buffer, self._device, self._pool = buffer, device, pool

    def write(self, start: int, part: torch.Tensor) -> None:
        self._buffer[:, start : start + part.shape[1]] = part

    def tile(self, start: int, stop: int) -> torch.Tensor:
        part = self._buffer[:, start:stop]
        return part if self._device.type == "cpu" else part.to(self._device)

    def let_go(self) -> bool:
        return True

    def release(self) -> None:
        self._pool.give_back(self._buffer)


class _Travelling(_Lent):
    """A pinned buffer: writes and reads run on a stream of their own, and the next tile is read ahead."""

    def __init__(self, buffer: torch.Tensor, device: torch.device, pool: Pool, stream: torch.cuda.Stream) -> None:
        super().__init__(buffer, device, pool)
        self._stream = stream
        self._written: torch.cuda.Event | None = None
        self._coming: tuple[int, torch.Tensor, torch.cuda.Event] | None = None
        self._last = 0

    def write(self, start: int, part: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._buffer[:, start : start + part.shape[1]].copy_(part, non_blocking=True)
            self._written = self._stream.record_event()
        part.record_stream(self._stream)  # its storage is not used anew before the copy is done

    def tile(self, start: int, stop: int) -> torch.Tensor:
        coming, self._coming = self._coming, None
        if coming is None or coming[0] != start or coming[1].shape[1] != stop - start:
            coming = self._read(start, stop)
        _, tile, arrived = coming
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        tile.record_stream(current)
        size, backwards, self._last = stop - start, start <= self._last, start
        following = range(max(0, start - size), start) if backwards else range(stop, stop + size)
        if following and following.stop <= self._buffer.shape[1]:
            self._coming = self._read(following.start, following.stop)
        return tile

    def let_go(self) -> bool:
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)
        return True

    def release(self) -> None:
        self._coming = None
        super().release()

    def _read(self, start: int, stop: int) -> tuple[int, torch.Tensor, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):  # after all writes, which went this way before
            tile = self._buffer[:, start:stop].to(self._device, non_blocking=True)
            return start, tile, self._stream.record_event()
