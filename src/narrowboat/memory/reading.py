"""Reading on: a document that grows token by token, each layer's keys and values kept where the plan's inputs rest.

What has been read is to the next tokens what carried tokens are to a segment, so answers come from the same layers,
tiles and attention as training, under the same plan: of keys and values the device holds one layer's at a time where
inputs rest elsewhere, and all of them (2 x kv heads x size x layers elements a token) where they do not. The first
call reads the question, tile by tile; every further one a token. Exact: nothing is dropped.
"""

from __future__ import annotations

import torch

from narrowboat.memory.layout import Span
from narrowboat.memory.scores import Scores
from narrowboat.owner.inputs import Room, Store


class Past:
    """One layer's keys and values of what has been read; a ``Link`` to the tokens that come next.

    Args:
        store: where they wait.
        num_tokens: most that will be read.
    """

    def __init__(self, store: Store, num_tokens: int) -> None:
        self._store, self._most = store, num_tokens
        self._rooms: list[Room] = []
        self._now: tuple[torch.Tensor, torch.Tensor] | None = None
        self.num_carried = self.num_coming = 0

    @property
    def num_tokens(self) -> int:
        """Read and on their way."""
        return self.num_carried + self.num_coming

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put what was read in front, ``[1, kv heads, tokens, size]`` each, and remember where the others will be."""
        self._now = keys, values
        for into, room in zip(self._now, self._rooms, strict=False):
            into[:, :, : self.num_carried] = room.tile(0, self.num_carried).transpose(1, 2)

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Have read ``[1, kv heads, tokens, size]`` in another way."""
        self._now, self.num_coming = (keys, values), keys.shape[2]
        self.hand_on(is_last_use=True)

    def saw(self, q: torch.Tensor, lse: torch.Tensor, keys: torch.Tensor, tile: Span, scores: Scores) -> None:
        """Nothing is chosen, so nothing is watched."""

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """There is no backward."""

    def end(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """There is no backward."""

    def hand_on(self, is_last_use: bool) -> None:
        """The tokens on their way have been read."""
        assert self._now is not None
        new = [t[:, :, self.num_carried : self.num_tokens].transpose(1, 2) for t in self._now]
        if not self._rooms:
            self._rooms = [self._store.room(part, self._most) for part in new]
        for room, part in zip(self._rooms, new, strict=True):
            room.write(self.num_carried, part)
        self.num_carried, self.num_coming, self._now = self.num_tokens, 0, None

    def release(self) -> None:
        """It is not needed any more."""
        for room in self._rooms:
            room.release()


class Reading:
    """A document on its way through a model.

    Args:
        num_layers: of the model.
        store: where keys and values wait.
        num_tokens: most that will be read.

    Attributes:
        links: each layer's.
        offset: tokens read so far.
    """

    def __init__(self, num_layers: int, store: Store, num_tokens: int) -> None:
        self.links = [Past(store, num_tokens) for _ in range(num_layers)]

    @property
    def offset(self) -> int:
        """Tokens read so far."""
        return self.links[0].num_carried

    def expect(self, num_tokens: int) -> None:
        """So many tokens come next."""
        for link in self.links:
            link.num_coming = num_tokens

    def release(self) -> None:
        """Give all buffers back."""
        for link in self.links:
            link.release()
