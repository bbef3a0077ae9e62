"""A tile on its way through a layer: its cache, its attention mask, and what ties it to the tiles before and after.

A layer hands keys, values and states to what it takes for transformers' cache, and gets back what attention shall see:
its own ones, where attention is ours and finds the earlier ones in their buffers, or all of them joined, where the
layer goes on with them as it likes. What it gets of earlier tiles are leaves of its graph, so that autograd says what
flows into them. Exact; joined keys are copied once a tile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from narrowboat.errors import AnatomyError
from narrowboat.memory.autocast import common_format
from narrowboat.memory.dropout import Draw
from narrowboat.memory.layout import Layout
from narrowboat.memory.past import KeysValues, Outputs, Past
from narrowboat.memory.schemes import Scheme


class HandedOver(Exception):
    """Raised by a tile once a layer has handed over all that later tiles need, and nothing more is wanted of it."""


@dataclass(frozen=True)
class Ends:
    """Where a tile's graph meets those of other tiles.

    Attributes:
        earlier: leaves that earlier tiles made, each with what takes its gradient.
        handed: what later tiles read, each with what gives the gradient that they left for it.
    """

    earlier: list[tuple[torch.Tensor, Callable[[torch.Tensor | None], None]]]
    handed: list[tuple[torch.Tensor, Callable[[], torch.Tensor | None]]]


class Tile:
    """Tokens ``start`` to ``stop`` of a micro-batch on their way through a layer.

    Args:
        layout: the micro-batch's documents.
        start, stop: the tile's tokens.
        past: where the layer's keys, values and states gather; None for whole rows.
        outputs: where attention leaves its outputs, or with ``again`` takes them from.
        again: whether the tile is recomputed for backward.
        joins: whether the layer gets all keys so far, and not its own alone.
        num_writes: raise ``HandedOver`` after this many writes; 0 runs to the end.
        scheme: of attention that is not full.
        draws: gives what is to be dropped of attention's weights with some probability; None drops nothing.
    """

    is_compileable = False

    def __init__(
        self,
        layout: Layout,
        start: int,
        stop: int,
        past: Past | None = None,
        outputs: Outputs | None = None,
        again: bool = False,
        joins: bool = False,
        num_writes: int = 0,
        scheme: Scheme | None = None,
        draws: Callable[[float], Draw] | None = None,
    ) -> None:
        self.layout, self.start, self.stop, self.past = layout, start, stop, past
        self.outputs, self.again, self.scheme = outputs, again, scheme
        self.ends = Ends([], [])
        self.num_written = 0
        self.was_attended = False
        self._joins, self._num_writes, self._draws = joins, num_writes, draws
        self._own: list[tuple[torch.Tensor, torch.Tensor, KeysValues]] = []
        self._states: dict[Hashable, torch.Tensor] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int = 0, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the tile's keys and values, ``[batch, ..., tile, size]``; give back what attention shall see."""
        if self.past is None:
            return keys, values
        keys, values = common_format(keys, values)
        kept = self.past.kept(layer_idx)
        kept.write(keys, values, self.start)
        self._wrote()
        if not self._joins:
            self._own.append((keys, values, kept))
            return keys, values
        return self._joined(kept, 0, keys), self._joined(kept, 1, values)

    def update_indexer(self, keys: torch.Tensor, layer_idx: int = 0) -> torch.Tensor:
        """Take keys by which other keys are chosen; give back all so far."""
        if self.past is None:
            return keys
        kept = self.past.kept(("indexer", layer_idx))
        kept.write(keys, keys[..., :0], self.start)
        self._wrote()
        return self._joined(kept, 0, keys)

    def get_conv_state(self, layer_idx: int = 0, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution, ``[batch, channels, inputs]``; None at a row's start."""
        return self._state(("convolution", layer_idx, state_idx))

    def update_conv_state(
        self,
        inputs: torch.Tensor,
        layer_idx: int = 0,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Take a convolution's inputs; give them back behind those that came before."""
        name = ("convolution", layer_idx, state_idx)
        before = self._state(name)
        joined = inputs if before is None else torch.cat([before.to(inputs.dtype), inputs], -1)
        self._hand_on(name, joined[..., -(conv_kernel_size or inputs.shape[-1]) :])
        return joined

    def get_recurrent_state(self, layer_idx: int = 0, state_idx: int = 0) -> torch.Tensor | None:
        """A recurrence's state; None at a row's start."""
        return self._state(("recurrence", layer_idx, state_idx))

    def update_recurrent_state(
        self, state: torch.Tensor, layer_idx: int = 0, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Take a recurrence's state after the tile's last token."""
        self._hand_on(("recurrence", layer_idx, state_idx), state)
        return state

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Whether there are earlier tiles."""
        return self.past is not None and any(self.start in state.at for state in self.past.states.values())

    def is_recording_past(self, *_: Any) -> bool:
        """Whether a single token is to be treated like many."""
        return True

    def get_seq_length(self, *_: Any) -> int:
        """How many tokens came before."""
        return self.start

    def get_query_offset(self, *_: Any) -> int:
        """The first token's place."""
        return self.start

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """How many keys a mask is to have, and the place of the first."""
        return self.stop, 0

    def buffer_of(self, keys: torch.Tensor, values: torch.Tensor) -> KeysValues | None:
        """Where ``keys`` and ``values``, which attention was given, lie among all others; None if they are all.

        Raises:
            AnatomyError: they are not those that the layer handed over.
        """
        self.was_attended = True
        for own_keys, own_values, kept in self._own:
            if own_keys is keys and own_values is values:
                return kept
        is_row = self.past is None or keys.shape[-2] == self.stop
        if self._own or not is_row:
            raise AnatomyError(
                "A layer's attention uses other keys or values than it hands to its cache; it cannot be tiled."
            )
        return None

    def without_outputs(self) -> Tile:
        """The same for some heads of attention, whose outputs are not kept."""
        tile = copy.copy(self)
        tile.outputs = None
        return tile

    def draw(self, p: float) -> Draw | None:
        """What attention drops of its weights with probability ``p``."""
        return None if p == 0.0 or self._draws is None else self._draws(p)

    def _wrote(self) -> None:
        self.num_written += 1
        if self.num_written == self._num_writes:
            raise HandedOver

    def _joined(self, kept: KeysValues, which: int, own: torch.Tensor) -> torch.Tensor:
        """All keys, or values, up to the tile's end."""
        start, stop = self.start, self.stop

        def gathered() -> torch.Tensor:
            return kept.grads[which][..., start:stop, :].to(own.dtype)

        def gather(gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                kept.grads[which][..., :start, :] += gradient

        if own.requires_grad:
            self.ends.handed.append((own, gathered))
        if start == 0:
            return own
        return torch.cat([self._leaf(kept.both[which][..., :start, :], gather), own], -2)

    def _state(self, name: Hashable) -> torch.Tensor | None:
        if self.past is None or self.start not in self.past.state(name).at:
            return None
        state = self.past.state(name)
        if name not in self._states:
            self._states[name] = self._leaf(state.at[self.start], partial(setattr, state, "grad"))
        return self._states[name]

    def _hand_on(self, name: Hashable, value: torch.Tensor) -> None:
        if self.past is None:
            return
        state = self.past.state(name)
        self.past.move_on(name, self.stop, value)
        if value.requires_grad:
            self.ends.handed.append((value, lambda: state.grad))
        self._wrote()

    def _leaf(self, value: torch.Tensor, take: Callable[[torch.Tensor | None], None]) -> torch.Tensor:
        """``value``, of earlier tiles, as a leaf of this one's graph, if there is one."""
        leaf = value.detach()
        if torch.is_grad_enabled() and leaf.is_floating_point():
            self.ends.earlier.append((leaf.requires_grad_(), take))
        return leaf
