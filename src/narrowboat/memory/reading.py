"""Reading on: a document that grows token by token, each layer's keys and values kept where the plan's inputs rest.

What has been read is to the next tokens what carried tokens are to a segment, so answers come from the same layers,
tiles and attention as training, under the same plan: of keys and values the device holds one layer's at a time where
inputs rest elsewhere, and all of them (2 x kv heads x size x layers elements a token) where they do not. The first
call reads the question, tile by tile; every further one a token. Exact: nothing is dropped.

Documents of any lengths, each read by itself, may be read on together, a row each: weights then are gone through once
for all of them. In the copy that a layer works on they end at the same token, and each sees itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from narrowboat.memory.layout import Layout, Span
from narrowboat.memory.scores import Scores
from narrowboat.owner.inputs import Room, Store


class Past:
    """One layer's keys and values of what has been read; a ``Link`` to the tokens that come next.

    Args:
        store: where they wait.
        num_tokens: most that will be read.
    """

    takes_whole_segments = False

    def __init__(self, store: Store, num_tokens: int) -> None:
        self._store, self._most = store, num_tokens
        self._rooms: list[Room] = []
        self._now: tuple[torch.Tensor, torch.Tensor] | None = None
        self.num_carried = self.num_coming = 0

    @property
    def num_tokens(self) -> int:
        """Read and on their way."""
        return self.num_carried + self.num_coming

    @property
    def layout(self) -> Layout:
        """One document."""
        return Layout.of(1, self.num_tokens)

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put what was read in front, ``[1, kv heads, tokens, size]`` each, and remember where the others will be."""
        self._now = keys, values
        self.copy_to(keys[:, :, : self.num_carried], values[:, :, : self.num_carried])

    def copy_to(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """What was read, ``[1, kv heads, tokens read, size]`` each."""
        for into, room in zip((keys, values), self._rooms, strict=False):
            into[:] = room.tile(0, self.num_carried).transpose(1, 2)

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Have read ``[1, kv heads, tokens, size]`` in another way."""
        self._now, self.num_coming = (keys, values), keys.shape[2]
        self.hand_on(is_last_use=True)

    def asks(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores) -> None:
        """All that was read is there."""

    def saw(self, q: torch.Tensor, lse: torch.Tensor, keys: torch.Tensor, tile: Span, scores: Scores) -> None:
        """Nothing is chosen, so nothing is watched."""

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """There is no backward."""

    def end(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """There is no backward."""

    def hand_on(self, is_last_use: bool) -> None:
        """The tokens on their way have been read."""
        assert self._now is not None
        keys, values = (t[:, :, self.num_carried : self.num_tokens] for t in self._now)
        self._now = None
        self.add(keys, values)

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """So many more have been read, ``[1, kv heads, tokens, size]`` each."""
        new = keys.transpose(1, 2), values.transpose(1, 2)
        if not self._rooms:
            self._rooms = [self._store.room(part, self._most) for part in new]
        for room, part in zip(self._rooms, new, strict=True):
            room.write(self.num_carried, part)
        self.num_carried, self.num_coming = self.num_carried + keys.shape[2], 0

    def release(self) -> None:
        """It is not needed any more."""
        for room in self._rooms:
            room.release()


class Abreast:
    """One layer's keys and values of several documents that are read on together; a ``Link`` to their next tokens.

    Args:
        pasts: the documents'.
    """

    takes_whole_segments = False

    def __init__(self, pasts: Sequence[Past]) -> None:
        self._pasts = pasts
        self.num_carried, self.num_coming = max(past.num_carried for past in pasts), 0
        self._now: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        """Of the longest one, read and on their way."""
        return self.num_carried + self.num_coming

    @property
    def layout(self) -> Layout:
        """A document a row, all of which end together; in front of the shorter ones there is nothing."""
        firsts = (self.num_carried - past.num_carried for past in self._pasts)
        return Layout(self.num_tokens, tuple(((first, self.num_tokens),) for first in firsts))

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put what was read in front, ``[documents, kv heads, tokens, size]`` each."""
        self._now = keys, values
        for row, past in enumerate(self._pasts):
            first = self.num_carried - past.num_carried
            for t in self._now:
                t[row, :, :first] = 0  # nobody sees it, but zero times what lay there might be no number
            past.copy_to(*(t[row : row + 1, :, first : self.num_carried] for t in self._now))

    def asks(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores) -> None:
        """All that was read is there."""

    def saw(self, q: torch.Tensor, lse: torch.Tensor, keys: torch.Tensor, tile: Span, scores: Scores) -> None:
        """Nothing is chosen, so nothing is watched."""

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """There is no backward."""

    def end(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """There is no backward."""

    def hand_on(self, is_last_use: bool) -> None:
        """The tokens on their way have been read."""
        assert self._now is not None
        for row, past in enumerate(self._pasts):
            past.add(*(t[row : row + 1, :, self.num_carried : self.num_tokens] for t in self._now))
        self.num_carried, self.num_coming, self._now = self.num_tokens, 0, None


class Reading:
    """A document on its way through a model, or several.

    Attributes:
        links: each layer's.
        num_rows: how many documents.
    """

    def __init__(self, links: Sequence[Past | Abreast], num_rows: int = 1) -> None:
        self.links, self.num_rows = links, num_rows

    @classmethod
    def of(cls, num_layers: int, store: Store, num_tokens: int) -> Reading:
        """One of which nothing has been read yet.

        Args:
            num_layers: of the model.
            store: where keys and values wait.
            num_tokens: most that will be read.
        """
        return cls([Past(store, num_tokens) for _ in range(num_layers)])

    @classmethod
    def together(cls, readings: Sequence[Reading]) -> Reading:
        """Documents that have each been read by itself, to be read on a row each; what is read is theirs."""
        if len(readings) == 1:
            return readings[0]
        layers = zip(*(reading.links for reading in readings), strict=True)
        return cls([Abreast([past for past in pasts if isinstance(past, Past)]) for pasts in layers], len(readings))

    @property
    def offset(self) -> int:
        """Tokens read so far, of the longest document."""
        return self.links[0].num_carried

    def expect(self, num_tokens: int) -> None:
        """So many tokens come next."""
        for link in self.links:
            link.num_coming = num_tokens

    def release(self) -> None:
        """Give all buffers back."""
        for link in self.links:
            if isinstance(link, Past):
                link.release()
