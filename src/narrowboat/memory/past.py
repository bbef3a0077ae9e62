"""What a layer's tiles leave for later ones: keys and values that grow, states that move on, and their gradients.

Keys and values lie in buffers over the whole row and are written in place, tile after tile. Backwards, tiles go from
last to first: each adds to a second pair of buffers what flows into earlier keys and values, and the earlier tiles
pick it up when their turn comes. A state, of a convolution or a recurrence, is as large as it is after one token; its
values at the tiles' borders are held while the layer is in its backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol

import torch

from narrowboat.memory.layout import Layout, Span
from narrowboat.memory.scores import Scores
from narrowboat.owner.causes import KEYS_VALUES, cause
from narrowboat.owner.inputs import Room, Store


class Link(Protocol):
    """Ties a segment's keys and values to those of the segments before and after it."""

    num_carried: int
    takes_whole_segments: bool
    """Whether all queries of a segment have to come at once."""

    @property
    def layout(self) -> Layout:
        """The documents of the row, carried tokens and all."""

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the carried tokens in front."""

    def asks(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores) -> None:
        """A tile's queries are there and attention is about to see ``keys`` and ``values``."""

    def saw(self, q: torch.Tensor, lse: torch.Tensor, keys: torch.Tensor, tile: Span, scores: Scores) -> None:
        """Hears what attention of a tile's tokens was made of."""

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add what later segments want changed to the gradients, which are zero."""

    def end(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the gradients of the carried tokens, now that they are whole."""


class KeysValues:
    """Keys and values over whole rows, and their gradients.

    ``keys`` and ``values`` are ``[batch, ..., tokens, size]``, of which the first ``num_filled`` tokens are there.
    Gradients of half-precision keys are gathered in fp32: hundreds of tiles add to them, and rounding each sum would
    lose what a single kernel keeps.
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
        made = cls(keys.shape[-2])
        made.num_filled, made.keys, made.values = keys.shape[-2], keys, values
        return made

    def write(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Take a tile's keys and values, unless they are there already."""
        stop = start + keys.shape[-2]
        if stop <= self.num_filled:
            return
        with torch.no_grad(), cause(KEYS_VALUES):
            if self.keys is None or self.values is None:
                self.keys, self.values = (_room_for(t, self.num_tokens) for t in (keys, values))
                if self.link is not None:
                    self.link.fill(self.keys, self.values)
            self.keys[..., start:stop, :], self.values[..., start:stop, :] = keys, values
        self.num_filled = stop

    @property
    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, once a tile has left some."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    @property
    def grads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of keys and values gathered so far; zero at first."""
        if self._grads is None:
            with cause(KEYS_VALUES):
                keys, values = self.both
                self._grads = zeros_wide(keys), zeros_wide(values)
                if self.link is not None:
                    self.link.begin(*self._grads)
        return self._grads

    def tile_done(self, start: int) -> None:
        """The tile that starts there is through its backward; after the first one all gradients are whole."""
        if self.link is not None and self._grads is not None and start == self.link.num_carried:
            self.link.end(*self._grads)
            self._grads = None


class SomeHeads:
    """Some heads of a layer's keys and values; nothing is carried where attention is sparse."""

    link = None

    def __init__(self, whole: KeysValues, heads: slice) -> None:
        self._whole, self._heads = whole, heads

    @property
    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Their keys and values."""
        keys, values = self._whole.both
        return keys[:, self._heads], values[:, self._heads]

    @property
    def grads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """And the gradients of these."""
        keys, values = self._whole.grads
        return keys[:, self._heads], values[:, self._heads]

    def tile_done(self, start: int) -> None:
        """The tile that starts there is through its backward."""


class State:
    """A state that each tile takes from the one before it and hands to the next.

    Attributes:
        at: its values, by the token that comes next.
        grad: of the value that the tile in backward hands on; None where nobody wants it changed.
    """

    def __init__(self) -> None:
        self.at: dict[int, torch.Tensor] = {}
        self.grad: torch.Tensor | None = None


class Past:
    """All that one layer's tiles leave for later ones.

    Args:
        num_tokens: of a row, carried ones included.
        link: to the segments before and after, where keys and values are carried.
        for_backward: hold states at every border of two tiles, not only at the last one.
    """

    def __init__(self, num_tokens: int, link: Link | None = None, for_backward: bool = False) -> None:
        self.num_tokens, self.link, self._for_backward = num_tokens, link, for_backward
        self.keys_values: dict[Hashable, KeysValues] = {}
        self.states: dict[Hashable, State] = {}

    def kept(self, name: Hashable) -> KeysValues:
        """The keys and values ``name``."""
        return self.keys_values.setdefault(name, KeysValues(self.num_tokens, self.link))

    def state(self, name: Hashable) -> State:
        """The state ``name``."""
        return self.states.setdefault(name, State())

    def move_on(self, name: Hashable, stop: int, value: torch.Tensor) -> None:
        """State ``name`` is ``value`` after the tokens up to ``stop``."""
        state = self.state(name)
        if not self._for_backward:
            state.at.clear()
        state.at.setdefault(stop, value.detach())

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is there."""
        for kept in self.keys_values.values():
            yield from kept.both
        for state in self.states.values():
            yield from state.at.values()


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


def zeros_wide(t: torch.Tensor) -> torch.Tensor:
    """Zeros like ``t``, in fp32 or better."""
    return torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))


def _room_for(t: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return t.new_empty(*t.shape[:-2], num_tokens, t.shape[-1])
