"""Where what the forward pass leaves waits for backward: on the device, in host memory or in scratch files.

tokens x hidden elements a layer are what streaming still keeps (for Llama-3.1-8B in bf16 at 131,072 tokens: 32 GiB).

- ``OnDevice``: no bytes saved, no time;
- ``Elsewhere``: in host memory or mapped scratch files; to a card and back by a lane (``lane.py``), beside the
  computation; on a CPU they are read where they lie.

Exact, all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from narrowboat.owner.causes import LAYER_INPUTS, account, cause
from narrowboat.owner.lane import Arrival, Lane
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


def store_at(place: Place, host: Host, disk: Disk, lane: Lane | None) -> Store:
    """The store that keeps things at ``place``; ``lane`` is the way there, where there is a way to go."""
    if place == "device":
        return OnDevice()
    return Elsewhere(host if place == "host" else disk, lane)


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
    """Things move to buffers at ``place``, which are lent again when they come back.

    Args:
        place: where the buffers lie.
        lane: by which things travel; None where they are read as they lie, the device's memory being the host's.
    """

    def __init__(self, place: Resting, lane: Lane | None = None) -> None:
        self._pool = Pool(lambda shape, dtype: place.empty(shape, dtype, LAYER_INPUTS))
        self._lane, self._waits = lane, place.where == "disk"

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
        if self._lane is None:
            return _Lent(self._pool.take((like.shape[0], num_tokens, *like.shape[2:]), like.dtype), self._pool)
        buffer = self._pool.take((num_tokens, like.shape[0], *like.shape[2:]), like.dtype)
        return _Travelling(buffer, self._pool, self._lane, self._waits)

    def close(self) -> None:
        """Give the buffers back to the machine."""
        if self._lane is not None:
            self._lane.close()
        self._pool.close()


class _Lent:
    """A buffer lent by a pool, ``[batch, tokens, ...]``, read where it lies."""

    def __init__(self, buffer: torch.Tensor, pool: Pool) -> None:
        self._buffer, self._pool = buffer, pool

    def write(self, start: int, part: torch.Tensor) -> None:
        self._buffer[:, start : start + part.shape[1]] = part

    def tile(self, start: int, stop: int) -> torch.Tensor:
        return self._buffer[:, start:stop]

    def let_go(self) -> bool:
        return True

    def release(self) -> None:
        self._pool.give_back(self._buffer)


class _Travelling:
    """A buffer ``[tokens, batch, ...]``, so that a tile is one piece of memory; the next tile is read ahead."""

    def __init__(self, buffer: torch.Tensor, pool: Pool, lane: Lane, waits: bool) -> None:
        self._buffer, self._pool, self._lane, self._waits = buffer, pool, lane, waits
        self._coming: tuple[range, Arrival] | None = None
        self._last = 0

    def write(self, start: int, part: torch.Tensor) -> None:
        self._lane.send(part.transpose(0, 1).contiguous(), self._buffer[start : start + part.shape[1]])
        if part.shape[0] > 1:  # several rows were copied to be in one piece: the copy goes before their layer begins
            self._lane.drain()

    def tile(self, start: int, stop: int) -> torch.Tensor:
        wanted, coming = range(start, stop), self._coming
        if coming is not None and coming[0] != wanted:
            self._forget()
        arrival = coming[1] if coming is not None and coming[0] == wanted else self._read(wanted)
        (tile,) = arrival.take()
        size, backwards, self._last = stop - start, start <= self._last, start
        following = range(max(0, start - size), start) if backwards else range(stop, stop + size)
        is_there = following and following.stop <= len(self._buffer)
        self._coming = (following, self._read(following)) if is_there else None
        return tile.transpose(0, 1)

    def let_go(self) -> bool:
        self._lane.drain()
        return True

    def release(self) -> None:
        self._forget()
        self._pool.give_back(self._buffer)

    def _forget(self) -> None:
        if self._coming is not None:
            self._coming[1].take()  # its memory is not free before
        self._coming = None

    def _read(self, tokens: range) -> Arrival:
        with cause(LAYER_INPUTS):
            return self._lane.fetch([self._buffer[tokens.start : tokens.stop]], self._waits)
