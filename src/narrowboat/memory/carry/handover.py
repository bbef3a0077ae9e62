"""One segment's part in a carry: what it gets from the segments before, and what it leaves for the next.

A segment is to a document what a tile is to a row: its layers see the carried keys and values in front of their own.
So each layer's ``KeysValues`` gets a ``Link`` to its neighbours: it fills in the carried tokens, watches attention for
the policy, and passes gradients on, from later segments to this one's keys and values and from here to earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from narrowboat.memory.carry.kept import Kept
from narrowboat.memory.carry.rotation import Rotation
from narrowboat.memory.carry.shelf import Shelf
from narrowboat.memory.carry.waiting import Waiting
from narrowboat.memory.past import Link
from narrowboat.owner.causes import CARRY, Holding

Gradients = tuple[torch.Tensor, torch.Tensor]
"""Of a layer's carried keys and values, ``[1, kv heads, tokens, size]`` each."""


@dataclass(frozen=True, eq=False)
class Carry:
    """What a document's segments left behind. ``layers`` are empty at its start.

    Attributes:
        layers: each layer's carried tokens, or its whole document where it waits to be looked up, or None.
        num_tokens: tokens of the document so far.
        num_segments: segments so far.
    """

    layers: tuple[Kept | Waiting | None, ...]
    num_tokens: int = 0
    num_segments: int = 0

    @property
    def num_carried(self) -> int:
        """The most tokens that any layer carries."""
        return max((kept.num_tokens for kept in self.layers if kept is not None), default=0)

    @property
    def num_bytes(self) -> int:
        """Of all carried keys and values."""
        return sum(kept.num_bytes for kept in self.layers if kept is not None)

    def holdings(self) -> Iterator[Holding]:
        """All tensors, for the owner's account."""
        for kept in self.layers:
            if kept is not None:
                yield from (Holding(tensor, CARRY, kept.where) for tensor in kept.tensors)

    def state(self) -> dict[str, Any]:
        """As tensors, lists and numbers, for a checkpoint."""
        layers = [None if kept is None else kept.state() for kept in self.layers]
        return {"layers": layers, "num_tokens": self.num_tokens, "num_segments": self.num_segments}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device, shelf: Shelf) -> Carry:
        """And back, on ``device`` or, where it waits to be looked up, on ``shelf``."""
        layers = tuple(
            None if kept is None
            else Waiting.from_state(kept, shelf) if "chunks" in kept
            else Kept.from_state(kept, device)
            for kept in state["layers"]
        )  # fmt: skip
        return cls(layers, state["num_tokens"], state["num_segments"])


@dataclass(frozen=True)
class Segment:
    """What all links of a segment know of it. No link knows the handover: a circle would be freed late."""

    number: int
    offset: int
    num_tokens: int
    base: int  # position id of its first token
    rotation: Rotation | None
    hands_on: bool
    wants_gradients: bool
    leaves_open: bool


class SegmentLink(Link, Protocol):
    """A layer's ties to the segments before and after.

    Attributes:
        after: what it leaves, once the layer has run.
        gradients: of what came before, after the backward.
    """

    after: Any
    gradients: Gradients | None

    @property
    def num_tokens(self) -> int:
        """Carried and own."""

    @property
    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All that the segment's last token sees, if left open."""

    def hand_on(self, is_last_use: bool) -> None:
        """The layer has run; ``is_last_use``: nobody will ask for what was carried again."""


class Rules(Protocol):
    """How one layer hands on."""

    def link(self, segment: Segment, before: Any, handed: Any, later: Gradients | None) -> SegmentLink:
        """A segment's.

        Args:
            segment: what is known of it.
            before: what the layer carried to it.
            handed: what it carried on, which the gradients ``later`` belong to.
            later: what later segments want changed.
        """


class Handover:
    """A segment's.

    Args:
        rules: of each layer.
        before: what came before; let go of it, so that it is freed as soon as nobody needs it.
        num_tokens: the segment's.
        hands_on: whether a further segment follows.
        rotation: to re-base positions, or None to keep the document's.
        later: gradients of what this segment handed on, for each layer; None where there are none.
        handed: what it handed on, which these gradients belong to.
        wants_gradients: whether the gradients of what came before are wanted.
        leaves_open: whether all keys and values stay at hand, for text to be written on behind the segment.
    """

    def __init__(
        self,
        rules: tuple[Rules, ...],
        before: Carry,
        num_tokens: int,
        hands_on: bool,
        rotation: Rotation | None = None,
        later: tuple[Gradients | None, ...] | None = None,
        handed: Carry | None = None,
        wants_gradients: bool = False,
        leaves_open: bool = False,
    ) -> None:
        base = before.num_carried if rotation is not None else before.num_tokens
        self._segment = Segment(
            before.num_segments, before.num_tokens, num_tokens, base, rotation, hands_on, wants_gradients, leaves_open
        )
        nothing = (None,) * len(rules)
        of_layers = zip(rules, before.layers, handed.layers if handed else nothing, later or nothing, strict=True)
        self.links = [rule.link(self._segment, kept, left, wanted) for rule, kept, left, wanted in of_layers]

    def positions(self, device: torch.device) -> torch.Tensor:
        """``[1, tokens]``: position ids of the segment's tokens."""
        base = self._segment.base
        return torch.arange(base, base + self._segment.num_tokens, device=device)[None]

    @property
    def offset(self) -> int:
        """Place of the segment's first token in the document."""
        return self._segment.offset

    @property
    def after(self) -> Carry:
        """What it leaves; whole once the last layer has run."""
        return Carry(
            tuple(link.after for link in self.links), self.offset + self._segment.num_tokens, self._segment.number + 1
        )

    @property
    def gradients(self) -> tuple[Gradients | None, ...]:
        """Of what came before, after the backward."""
        return tuple(link.gradients for link in self.links)
