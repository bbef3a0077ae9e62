"""Every n-th layer's input held, the others computed again: 1/n of the bytes for one more forward of n - 1 layers.

While backward is in a group of n layers, all their inputs are there. Exact.
"""

from __future__ import annotations

import torch

from narrowboat.owner.inputs import Held, Layer, Room, Store


class Strided:
    """Holds every ``stride``-th layer's input in ``store``; made anew for every forward, which goes layer by layer."""

    def __init__(self, store: Store, stride: int) -> None:
        self._store, self._stride = store, stride
        self._group: _Group | None = None

    def put(self, x: torch.Tensor, layer: Layer) -> Held:
        """See ``Store``."""
        if self._group is None or len(self._group.layers) == self._stride:
            self._group = _Group(self._store, self._store.put(x, layer), x.shape[1])
        self._group.layers.append(layer)
        return _Again(self._group, len(self._group.layers) - 1)

    def hold(self, x: torch.Tensor) -> Held:
        """See ``Store``."""
        return self._store.hold(x)

    def room(self, like: torch.Tensor, num_tokens: int) -> Room:
        """See ``Store``."""
        return self._store.room(like, num_tokens)

    def close(self) -> None:
        """See ``Store``."""
        self._store.close()


class _Group:
    """Neighbouring layers of which the first one's input is held."""

    def __init__(self, store: Store, first: Held, num_tokens: int) -> None:
        self.layers: list[Layer] = []
        self.held = [first]
        self._store, self._num_tokens = store, num_tokens

    def fill(self) -> None:
        """Compute the inputs of all layers but the first, once."""
        while len(self.held) < len(self.layers):
            last = len(self.held) - 1
            x = self.layers[last](self.held[last].tile(0, self._num_tokens))
            self.held.append(self._store.put(x, self.layers[last + 1]))


class _Again:
    def __init__(self, group: _Group, index: int) -> None:
        self._group, self._index = group, index

    def tile(self, start: int, stop: int) -> torch.Tensor:
        self._group.fill()
        return self._group.held[self._index].tile(start, stop)

    def let_go(self) -> bool:
        return self._index > 0 or self._group.held[0].let_go()

    def release(self) -> None:
        self._group.held[self._index].release()
