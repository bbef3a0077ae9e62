"""A carry that forgets nothing: a layer's part where all keys and values wait, and each segment fetches what it wants.

What a segment sees in front of itself: the first blocks of the document, the newest tokens, and between them, for each
kv head, the blocks that its own queries look at most (``lookup.py``; blocks with summaries as in Quest,
arXiv:2406.10774, and InfLLM, arXiv:2402.04617). So a segment is one tile: all its queries choose together. The choice
is made once and held; a layer that runs again sees the same. Gradients take it as given.
Price: on the device the budget, of the layer at work; beside it the whole document, and its gradients in fp32 under
``carry.gradients: exact``. Not exact, unless the document fits the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from narrowboat.memory.carry.lookup import best_blocks
from narrowboat.memory.carry.shelf import Shelf
from narrowboat.memory.carry.storage import Storage
from narrowboat.memory.carry.waiting import Waiting, appended
from narrowboat.memory.layout import Layout, Span
from narrowboat.memory.scores import Scores
from narrowboat.owner.causes import CARRY, KEYS_VALUES, cause

if TYPE_CHECKING:
    from narrowboat.memory.carry.handover import Gradients, Segment

NEWEST_SHARE = 0.25
LEAST_BLOCKS = 3
"""One of the first, one of the newest, one to fetch."""


@dataclass(frozen=True)
class FetchRules:
    """How one layer looks up.

    Attributes:
        num_blocks: that a segment sees, the first and the newest among them.
        num_first: of these, the document's first.
        storage: in which tokens wait.
        block_tokens: of a block.
        shelf: where they wait.
    """

    num_blocks: int
    num_first: int
    storage: Storage
    block_tokens: int
    shelf: Shelf

    @property
    def num_newest(self) -> int:
        """Of the blocks seen, the newest."""
        return min(max(1, round(NEWEST_SHARE * self.num_blocks)), self.num_blocks - self.num_first - 1)

    def num_seen(self, num_tokens: int) -> int:
        """Of a document's ``num_tokens`` so far, those that its next segment sees."""
        if num_tokens <= self.num_blocks * self.block_tokens:
            return num_tokens
        tail = num_tokens % self.block_tokens  # counts as a block of the budget
        return (self.num_blocks - bool(tail)) * self.block_tokens + tail

    def link(self, segment: Segment, before: Any, handed: Any, later: Gradients | None) -> FetchLink:
        """A segment's; ``later`` are gradients of all of the document up to its end."""
        return FetchLink(segment, self, before, later)


class FetchLink:
    """One layer's ``Link``."""

    takes_whole_segments = True

    def __init__(self, segment: Segment, rules: FetchRules, before: Waiting | None, later: Gradients | None) -> None:
        self._segment, self._rules, self._before, self._later = segment, rules, before, later
        self.num_carried = 0 if before is None else before.num_seen
        self.after: Waiting | None = None
        self.gradients: Gradients | None = None
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None
        self._is_handed_on = not segment.hands_on
        self._blocks: torch.Tensor | None = None  # [kv heads, blocks] in host memory
        self._is_filled = False

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
        """Room is left in front; what comes there is not known before the queries are."""
        self._is_filled = not self.num_carried
        if not self._is_handed_on or self._segment.leaves_open:
            self._first = keys, values

    @torch.no_grad()
    def asks(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores) -> None:
        """Fetch what the segment's queries ``[1, heads, tokens, size]`` look at, once for each time the layer runs."""
        if self._is_filled:
            return
        before, segment = self._before, self._segment
        assert before is not None
        with cause(KEYS_VALUES):
            if self._blocks is None:
                self._blocks = self._chosen(q, before, scores)
            fetched, fetched_values, angles = before.read(self._blocks, self._rules.storage, keys)
            if segment.rotation is not None:
                there = torch.arange(segment.base - self.num_carried, segment.base, device=keys.device)
                fetched = segment.rotation.turn(fetched[None], there - angles)[0]
            keys[0, :, : self.num_carried], values[0, :, : self.num_carried] = fetched, fetched_values
        self._is_filled = True

    def saw(self, q: torch.Tensor, lse: torch.Tensor, keys: torch.Tensor, tile: Span, scores: Scores) -> None:
        """Attention is not watched: the next segment asks for itself."""

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add what later segments want changed of this one's own tokens."""
        if self._later is None:
            return
        own = slice(self._segment.offset, self._segment.offset + self._segment.num_tokens)
        for mine, theirs in zip((keys, values), self._later, strict=True):
            mine[0, :, self.num_carried :] += theirs[:, own].to(mine.device)

    def end(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add the gradients of the tokens that were fetched to what later segments want of them."""
        if not (self._segment.wants_gradients and self.num_carried):
            return
        assert self._before is not None and self._blocks is not None
        mine, mine_values = keys[0, :, : self.num_carried], values[0, :, : self.num_carried]
        places = self._places()
        if self._segment.rotation is not None:
            angles = self._before.angles(self._blocks)
            there = torch.arange(self._segment.base - self.num_carried, self._segment.base)
            mine = self._segment.rotation.turn(mine[None], (angles - there).to(mine.device))[0]
        if self._later is None:
            num_waiting, zeros = self._before.num_waiting, self._rules.shelf.zeros
            self._later = (
                zeros((mine.shape[0], num_waiting, mine.shape[2])),
                zeros((mine.shape[0], num_waiting, mine_values.shape[2])),
            )
        for whole, part in zip(self._later, (mine, mine_values), strict=True):
            host = part.to(whole.device, whole.dtype)
            whole.scatter_add_(1, places[..., None].expand_as(host), host)
        self.gradients, self._later = self._later, None

    @torch.no_grad()
    def hand_on(self, is_last_use: bool) -> None:
        """Let the segment's own keys and values wait; once. ``is_last_use``: nobody will ask for earlier ones again."""
        if not self._is_handed_on:
            assert self._first is not None
            with cause(CARRY):
                self.after = self._appended(*(t[0, :, self.num_carried :] for t in self._first))
            self._first, self._is_handed_on = None, True
        if is_last_use and not self._segment.wants_gradients:
            self._before = None

    def _appended(self, keys: torch.Tensor, values: torch.Tensor) -> Waiting:
        rules, segment = self._rules, self._segment
        angles = torch.arange(segment.base, segment.base + segment.num_tokens, device=keys.device)
        chunks, tail = appended(self._before, keys, values, angles, rules.storage, rules.shelf, rules.block_tokens)
        num_seen = rules.num_seen(segment.offset + segment.num_tokens)
        return Waiting(chunks, tail, rules.block_tokens, num_seen, rules.shelf.place.where)

    def _chosen(self, q: torch.Tensor, before: Waiting, scores: Scores) -> torch.Tensor:
        """``[kv heads, blocks]``, rising: the first, those that are looked at most, and the newest."""
        rules, num_heads = self._rules, before.tail.keys[0].shape[0]
        num_seen = self.num_carried // rules.block_tokens
        if before.num_blocks <= num_seen:
            return torch.arange(before.num_blocks).expand(num_heads, -1)
        newest = min(rules.num_newest, num_seen - rules.num_first - 1)
        between = range(rules.num_first, before.num_blocks - newest)
        wanted = num_seen - rules.num_first - newest
        middle = self._segment.base - self.num_carried // 2
        found = best_blocks(q, before, between, wanted, scores.scale, self._segment.rotation, middle)
        first, last = (
            torch.arange(start, stop).expand(num_heads, -1)
            for start, stop in ((0, between.start), (between.stop, before.num_blocks))
        )
        return torch.cat((first, found, last), 1)

    def _places(self) -> torch.Tensor:
        """``[kv heads, carried]``: where in the document the fetched tokens stand."""
        assert self._before is not None and self._blocks is not None
        size, num = self._rules.block_tokens, self._before.num_waiting
        whole = (self._blocks[..., None] * size + torch.arange(size)).flatten(1)
        tail = torch.arange(num - self._before.tail.num_tokens, num).expand(len(whole), -1)
        return torch.cat((whole, tail), 1)
