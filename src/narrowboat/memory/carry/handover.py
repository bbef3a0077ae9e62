"""One segment's part in a carry: what it gets from the segments before, and what it leaves for the next.

A segment is to a document what a tile is to a row: its layers see the carried keys and values in front of their own.
So each layer's ``KeysValues`` gets a ``Link`` to its neighbours: it fills in the carried tokens, watches attention for
the policy, and passes gradients on, from later segments to this one's keys and values and from here to earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from narrowboat.memory.carry.kept import Kept, make_pages
from narrowboat.memory.carry.observation import Observation
from narrowboat.memory.carry.policy import ALL_QUERIES, Candidates, Choice, Policy
from narrowboat.memory.carry.rotation import Rotation
from narrowboat.memory.carry.shelf import Shelf
from narrowboat.memory.carry.storage import Storage
from narrowboat.memory.carry.waiting import Waiting
from narrowboat.memory.layout import Layout, Span
from narrowboat.memory.past import Link
from narrowboat.memory.scores import Scores
from narrowboat.owner.causes import CARRY, Holding, cause
from narrowboat.owner.values import has_values

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


@dataclass(frozen=True)
class LayerRules:
    """How one layer hands on what a policy keeps."""

    policy: Policy
    num_tokens: int
    retention_ratio: float
    storage: Storage
    page_tokens: int

    def link(self, segment: Segment, before: Any, handed: Any, later: Gradients | None) -> LayerLink:
        """A segment's."""
        return LayerLink(segment, self, before, None if handed is None or later is None else (handed.source, later))


class LayerLink:
    """One layer's ``Link``."""

    takes_whole_segments = False

    def __init__(
        self, segment: Segment, rules: LayerRules, before: Kept | None, later: tuple[torch.Tensor, Gradients] | None
    ) -> None:
        self._segment, self._rules, self._before, self._later = segment, rules, before, later
        self.num_carried = 0 if before is None else before.num_tokens
        self.after: Kept | None = None
        self.gradients: Gradients | None = None
        self._observation = self._observe() if segment.hands_on else None
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None  # the forward's keys and values, until then
        self._is_chosen = not segment.hands_on

    @property
    def num_tokens(self) -> int:
        """Carried and own."""
        return self.num_carried + self._segment.num_tokens

    @property
    def layout(self) -> Layout:
        """One document."""
        return Layout.of(1, self.num_tokens)

    @property
    def keys_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All that the segment's last token sees, ``[1, kv heads, carried + own, size]`` each, if left open."""
        assert self._first is not None, "the segment is not left open"
        return self._first

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the carried tokens in front."""
        if not self._is_chosen or self._segment.leaves_open:
            self._first = keys, values
        if not self.num_carried:
            return
        assert self._before is not None
        carried, carried_values = self._before.read(self._rules.storage, keys.dtype)
        if self._segment.rotation is not None:
            carried = self._segment.rotation.turn(carried, self._moved(self._before))
        keys[:, :, : self.num_carried], values[:, :, : self.num_carried] = carried, carried_values

    def asks(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores) -> None:
        """What is carried was chosen by the segment before."""

    def saw(self, q: torch.Tensor, lse: torch.Tensor, keys: torch.Tensor, tile: Span, scores: Scores) -> None:
        """Watch, in the forward."""
        if self._observation is not None and not self._is_chosen:
            self._observation.add(q, lse, keys, tile, scores)

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add what later segments want changed."""
        if self._later is None:
            return
        source, gradients = self._later
        for mine, theirs in zip((keys, values), gradients, strict=True):
            mine.scatter_add_(2, source[None, ..., None].expand_as(theirs), theirs)
        self._later = None
        if self._segment.rotation is not None and self._before is not None:
            carried = keys[:, :, : self.num_carried]  # theirs are of keys as they were made
            carried.copy_(self._segment.rotation.turn(carried, self._moved(self._before)))

    def end(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the gradients of the carried tokens."""
        if not (self._segment.wants_gradients and self.num_carried):
            return
        mine = keys[:, :, : self.num_carried]
        if self._segment.rotation is not None:
            assert self._before is not None
            mine = self._segment.rotation.turn(mine, -self._moved(self._before))
        self.gradients = mine.clone(), values[:, :, : self.num_carried].clone()

    @torch.no_grad()
    def hand_on(self, is_last_use: bool) -> None:
        """Choose what the next segment shall see; once. ``is_last_use``: nobody will ask for the carried tokens again.

        A layer that is run again for its backward finds the carried tokens as they were.
        """
        if not self._is_chosen:
            assert self._first is not None
            with cause(CARRY):
                self.after = self._choose(self._first[0][0], self._first[1][0])
            self._first = self._observation = None
            self._is_chosen = True
        if is_last_use and not self._segment.wants_gradients:
            self._before = None

    def _observe(self) -> Observation | None:
        wanted, own = self._rules.policy.num_observed, self._segment.num_tokens
        if not wanted:
            return None
        return Observation(self.num_tokens, self.num_tokens - (own if wanted == ALL_QUERIES else min(wanted, own)))

    def _choose(self, keys: torch.Tensor, values: torch.Tensor) -> Kept:
        """From ``[kv heads, carried + own, size]``."""
        rules, before = self._rules, self._before
        candidates, angles = self._candidates(keys)
        total = candidates.num_tokens
        seen = self._segment.offset + self._segment.num_tokens
        budget = min(rules.num_tokens, math.ceil(rules.retention_ratio * seen))
        if not has_values(keys):
            choice = Choice(torch.arange(max(0, total - budget), total), candidates.marks)
        else:
            choice = rules.policy.choose(candidates, budget)
        old = () if before is None else before.pages
        own = slice(self.num_carried, None)
        pages, source = make_pages(old, keys[:, own], values[:, own], choice.index, rules.storage, rules.page_tokens)

        of = (candidates.positions, candidates.segments, choice.marks, angles)
        positions, segments, marks, angles = (t.gather(1, source) for t in of)
        return Kept(pages, positions, segments, marks, angles, source)

    def _candidates(self, keys: torch.Tensor) -> tuple[Candidates, torch.Tensor]:
        """What can be chosen from, and the positions at which all keys were made."""
        segment, before = self._segment, self._before
        num_heads, num_new, device = keys.shape[0], segment.num_tokens, keys.device

        def joined(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
            new = new.expand(num_heads, -1)
            return new if old is None else torch.cat((old, new), 1)

        count = torch.arange(num_new, device=device)
        old = (None,) * 4 if before is None else (before.positions, before.segments, before.marks, before.angles)
        mass = torch.empty(num_heads, 0, device=device)
        if self._observation is not None and self._observation.mass is not None:
            mass = self._observation.mass
        num_queries = 0 if self._observation is None else self.num_tokens - self._observation.first_query
        candidates = Candidates(
            positions=joined(old[0], count + segment.offset),
            segments=joined(old[1], torch.full_like(count, segment.number)),
            marks=joined(old[2], torch.zeros(num_new, device=device)),
            mass=mass,
            num_queries=num_queries,
            num_new=num_new,
        )
        return candidates, joined(old[3], count + segment.base)

    def _moved(self, kept: Kept) -> torch.Tensor:
        """By how many positions each carried key counts further on than where it was made."""
        rank = kept.positions.argsort(1).argsort(1)
        return self._segment.base - kept.num_tokens + rank - kept.angles
