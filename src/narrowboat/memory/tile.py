"""A tile on its way through a layer, and what attention leaves in it: keys, values, outputs, and their gradients.

Keys and values lie in buffers over the whole row and are written in place, tile after tile; nothing is concatenated.
Backwards, tiles go from last to first: each adds to a second pair of buffers what flows into earlier keys and values,
and the earlier tiles pick it up when their turn comes.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from narrowboat.errors import AnatomyError
from narrowboat.memory.kernels import Scores
from narrowboat.memory.layout import Layout
from narrowboat.memory.schemes import Scheme
from narrowboat.owner.causes import KEYS_VALUES, cause
from narrowboat.owner.inputs import Room, Store


class Link(Protocol):
    """Ties a segment's keys and values to those of the segments before and after it."""

    num_carried: int

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the carried tokens in front."""

    def saw(self, q: torch.Tensor, lse: torch.Tensor, keys: torch.Tensor, tile: Tile, scores: Scores) -> None:
        """Hears what attention of ``tile`` was made of."""

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add what later segments want changed to the gradients, which are zero."""

    def end(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the gradients of the carried tokens, now that they are whole."""


class KeysValues:
    """One layer's keys and values over whole rows, and their gradients.

    ``keys`` and ``values`` are ``[batch, kv heads, tokens, head size]``, of which the first ``num_filled`` tokens are
    there. Gradients of half-precision keys are gathered in fp32: hundreds of tiles add to them, and rounding each sum
    would lose what a single kernel keeps.
    """

    def __init__(self, num_tokens: int, link: Link | None = None) -> None:
        self.num_tokens, self.link = num_tokens, link
        self.num_filled = 0 if link is None else link.num_carried
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self._grads: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """Those of whole rows, as they were kept."""
        made = cls(keys.shape[2])
        made.num_filled, made.keys, made.values = keys.shape[2], keys, values
        return made

    def write(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Take a tile's keys and values, unless they are there already."""
        stop = start + keys.shape[2]
        if stop <= self.num_filled:
            return
        with torch.no_grad(), cause(KEYS_VALUES):
            if self.keys is None or self.values is None:
                self.keys = keys.new_empty(*keys.shape[:2], self.num_tokens, keys.shape[3])
                self.values = values.new_empty(*values.shape[:2], self.num_tokens, values.shape[3])
                if self.link is not None:
                    self.link.fill(self.keys, self.values)
            self.keys[:, :, start:stop], self.values[:, :, start:stop] = keys, values
        self.num_filled = stop

    @property
    def grads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of keys and values gathered so far; zero at first."""
        if self._grads is None:
            assert self.keys is not None and self.values is not None
            with cause(KEYS_VALUES):
                self._grads = zeros_wide(self.keys), zeros_wide(self.values)
                if self.link is not None:
                    self.link.begin(*self._grads)
        return self._grads

    def tile_done(self, start: int) -> None:
        """The tile that starts there is through its backward; after the first one all gradients are whole."""
        if self.link is not None and self._grads is not None and start == self.link.num_carried:
            self.link.end(*self._grads)
            self._grads = None


class SomeHeads:
    """Some heads of a layer's keys and values."""

    link = None

    def __init__(self, whole: KeysValues, heads: slice) -> None:
        self._whole, self._heads = whole, heads

    @property
    def keys(self) -> torch.Tensor | None:
        """See ``KeysValues``."""
        return None if self._whole.keys is None else self._whole.keys[:, self._heads]

    @property
    def values(self) -> torch.Tensor | None:
        """See ``KeysValues``."""
        return None if self._whole.values is None else self._whole.values[:, self._heads]

    @property
    def grads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``KeysValues``."""
        keys, values = self._whole.grads
        return keys[:, self._heads], values[:, self._heads]

    def tile_done(self, start: int) -> None:
        """Nothing is carried where attention is sparse."""


class Outputs:
    """A layer's attention outputs and their log-sum-exps, left by the forward pass: backward need not attend again."""

    def __init__(self, store: Store, num_tokens: int) -> None:
        self._store, self._num_tokens = store, num_tokens
        self._rooms: list[Room] = []

    def write(self, start: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take a tile's ``[batch, heads, tile, size]`` and ``[batch, heads, tile]``."""
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
        if not self._rooms:
            self._rooms = [self._store.room(t, self._num_tokens) for t in (out, lse)]
        for room, part in zip(self._rooms, (out, lse), strict=True):
            room.write(start, part)

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give them back, as copies that may become part of a graph."""
        out, lse = (room.tile(start, stop).clone(memory_format=torch.contiguous_format) for room in self._rooms)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def release(self) -> None:
        """They are not needed any more."""
        for room in self._rooms:
            room.release()


class HandedOver(Exception):
    """Raised by a tile once a layer has handed over its keys and values and nothing more is wanted of it."""


class Tile:
    """Tokens ``start`` to ``stop`` of a micro-batch on their way through a layer.

    A layer gets it twice: as its cache, where it leaves its keys and values, and as its attention mask, by which
    ``attend`` learns what the queries may see.

    Args:
        layout: the micro-batch's documents.
        start, stop: the tile's tokens.
        keys_values: where the layer's keys and values gather; None for whole rows.
        stop_at_keys: raise ``HandedOver`` once they are there.
        outputs: where attention leaves its outputs, or with ``again`` takes them from.
        again: whether the tile is recomputed for backward.
    """

    is_compileable = False
    scheme: Scheme | None = None

    def __init__(
        self,
        layout: Layout,
        start: int,
        stop: int,
        keys_values: KeysValues | None,
        stop_at_keys: bool = False,
        outputs: Outputs | None = None,
        again: bool = False,
    ) -> None:
        self.layout, self.start, self.stop = layout, start, stop
        self.keys_values: KeysValues | SomeHeads | None = keys_values
        self.outputs, self.again = outputs, again
        self._stop_at_keys = stop_at_keys
        self._handed_over: torch.Tensor | None = None

    def of_heads(self, heads: slice, layout: Layout) -> Tile:
        """The same tokens for some key/value heads, with what these see."""
        tile = Tile(layout, self.start, self.stop, None)
        if isinstance(self.keys_values, KeysValues):
            tile.keys_values = SomeHeads(self.keys_values, heads)
        return tile

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Transformers' cache interface: take the tile's keys and values, give back what attention shall see."""
        if isinstance(self.keys_values, KeysValues):
            self.keys_values.write(keys, values, self.start)
        if self._stop_at_keys:
            raise HandedOver
        self._handed_over = keys
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Transformers' cache interface: how many tokens came before."""
        return self.start

    def check(self, keys: torch.Tensor) -> None:
        """Refuse a layer whose attention sees other keys than it left in the cache."""
        if self.keys_values is not None and self._handed_over is not keys:
            raise AnatomyError("A layer's attention uses other keys than it hands to its cache; it cannot be tiled.")


def zeros_wide(t: torch.Tensor) -> torch.Tensor:
    """Zeros like ``t``, in fp32 or better."""
    return torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
