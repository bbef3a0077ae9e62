"""A layer's part in a carry that drops tokens: the segment's attention is watched, then a policy chooses what goes on.

Price: the carry before and the new one are there together, whole pages shared. Not exact, unless the budget holds all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from narrowboat.memory.carry.handover import Gradients, Segment
from narrowboat.memory.carry.kept import Kept, make_pages
from narrowboat.memory.carry.observation import Observation
from narrowboat.memory.carry.policy import ALL_QUERIES, Candidates, Choice, Policy
from narrowboat.memory.carry.storage import Storage
from narrowboat.memory.layout import Layout, Span
from narrowboat.memory.scores import Scores
from narrowboat.owner.causes import CARRY, cause
from narrowboat.owner.values import has_values


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
