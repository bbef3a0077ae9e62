"""A shelf: large pieces of host memory or of scratch files, from which small tensors that wait are cut.

Every segment of a document leaves some tensors a layer. A page-locked piece or a file for each would be tens of
thousands; cut from pieces of ``SLAB_BYTES`` they are a few. A piece is given back when no tensor of it is left.
"""

from __future__ import annotations

import math

import torch

from narrowboat.owner.causes import CARRY
from narrowboat.owner.places import Resting
from narrowboat.owner.values import is_forecast

SLAB_BYTES = 16 * 2**20
ALIGNED_BYTES = 64


class Shelf:
    """Keeps tensors at ``place``."""

    def __init__(self, place: Resting) -> None:
        self.place = place
        self._slab: torch.Tensor | None = None
        self._num_used = 0

    def begin(self) -> None:
        """Of another document, which begins a piece of its own."""
        self._slab = None

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` that waits there."""
        return self._room(tensor.shape, tensor.dtype).copy_(tensor.detach())

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Zeros in fp32, to be added to."""
        return self._room(shape, torch.float32).zero_()

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if is_forecast() or not num_bytes:  # a forecast counts what is used, not the rest of a piece
            return self.place.empty(tuple(shape), dtype, CARRY)
        if self._slab is None or self._num_used + num_bytes > self._slab.numel():
            self._slab, self._num_used = self.place.empty((max(SLAB_BYTES, num_bytes),), torch.uint8, CARRY), 0
        room = self._slab[self._num_used : self._num_used + num_bytes].view(dtype).view(shape)
        self._num_used += -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return room
