"""One layer's keys and values of a whole document, waiting beside the device in blocks that can be looked up.

Each block of ``block_tokens`` has a summary for each kv head: the mean key of every ``SUMMED_TOKENS`` tokens. What a
segment leaves is a chunk that is never written again, so the carries of a document share all that they have in common
and a segment that runs again finds what it found. Tokens of the last, incomplete block are the tail.
Price: ``bytes_per_token`` in the format of ``carry.storage``, and 1 / (2 x SUMMED_TOKENS) of it in full for summaries;
none of it on the device.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from narrowboat.memory.carry.shelf import Shelf
from narrowboat.memory.carry.storage import Parts, Storage
from narrowboat.owner.causes import Where
from narrowboat.owner.values import has_values

SUMMED_TOKENS = 8


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive tokens.

    Attributes:
        keys: in stored form, each part ``[kv heads, tokens, ..]``.
        values: the same.
        angles: ``[tokens]``, position ids at which the keys were made.
        summary: ``[kv heads, tokens / summed, size]``: mean keys; empty for a tail.
    """

    keys: Parts
    values: Parts
    angles: torch.Tensor
    summary: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """How many."""
        return self.angles.shape[0]

    def parts(self, which: str) -> Parts:
        """``keys``, ``values``, or ``angles`` ``[kv heads, tokens]``."""
        if which == "angles":
            return (self.angles.expand(self.keys[0].shape[0], -1),)
        return self.keys if which == "keys" else self.values

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that it holds."""
        return (*self.keys, *self.values, self.angles, self.summary)


@dataclass(frozen=True, eq=False)
class Waiting:
    """One layer's document so far.

    Attributes:
        chunks: of whole blocks.
        tail: the rest.
        block_tokens: of a block.
        num_seen: how many of its tokens the next segment sees.
        where: the last of it waits.
    """

    chunks: tuple[Chunk, ...]
    tail: Chunk
    block_tokens: int
    num_seen: int
    where: Where

    @property
    def num_tokens(self) -> int:
        """What the next segment has in front of it, as of any carry."""
        return self.num_seen

    @property
    def num_waiting(self) -> int:
        """Tokens of the document so far."""
        return self.num_blocks * self.block_tokens + self.tail.num_tokens

    @property
    def num_blocks(self) -> int:
        """Whole blocks."""
        return self._ends[-1] // self.block_tokens if self.chunks else 0

    @property
    def num_bytes(self) -> int:
        """Beside the device."""
        return sum(part.numel() * part.element_size() for part in self.tensors)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that waits."""
        return tuple(part for chunk in (*self.chunks, self.tail) for part in chunk.tensors)

    @cached_property
    def _ends(self) -> list[int]:
        """Tokens up to the end of each chunk."""
        return list(accumulate(chunk.num_tokens for chunk in self.chunks))

    def summary(self, blocks: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean keys ``[kv heads, summaries, size]`` of ``blocks`` and ``[summaries]`` angles, both where they wait."""
        summed = summed_tokens(self.block_tokens)
        first, last = blocks.start * self.block_tokens, blocks.stop * self.block_tokens
        parts, angles = [], []
        for number in range(bisect_right(self._ends, first), bisect_left(self._ends, last) + 1):
            begin = self._ends[number - 1] if number else 0
            here = slice(max(0, first - begin) // summed, (min(last, self._ends[number]) - begin) // summed)
            parts.append(self.chunks[number].summary[:, here])
            angles.append(self.chunks[number].angles[::summed][here])
        return torch.cat(parts, 1), torch.cat(angles)

    def angles(self, blocks: torch.Tensor) -> torch.Tensor:
        """``[kv heads, tokens]``, of the same tokens as ``read`` gives."""
        return self._picked("angles", self._places(blocks))[0]

    def _places(self, blocks: torch.Tensor) -> torch.Tensor:
        return (blocks[..., None] * self.block_tokens + torch.arange(self.block_tokens)).flatten(1)

    def read(self, blocks: torch.Tensor, storage: Storage, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values ``[kv heads, tokens, size]`` of ``blocks`` ``[kv heads, blocks]``, rising, and the tail.

        Returns:
            Both as ``like``, and on its device ``[kv heads, tokens]`` angles.
        """
        places = self._places(blocks)
        keys, values = self._picked("keys", places), self._picked("values", places)
        up = [tuple(part.to(like.device, non_blocking=True) for part in parts) for parts in (keys, values)]
        return *(storage.unpack(parts, like.dtype) for parts in up), self.angles(blocks).to(like.device)

    def _picked(self, which: str, places: torch.Tensor) -> Parts:
        """Tokens ``places`` ``[kv heads, tokens]`` and the tail, gathered where they wait."""
        tail = self.tail.parts(which)
        num_heads, num_picked = places.shape
        out = tuple(part.new_empty(num_heads, num_picked + part.shape[1], *part.shape[2:]) for part in tail)
        if has_values(places):
            ends = torch.tensor(self._ends)
            where = torch.bucketize(places, ends, right=True)
            for number in where.unique().tolist():
                heads, at = (where == number).nonzero(as_tuple=True)
                there = places[heads, at] - (self._ends[number - 1] if number else 0)
                for into, part in zip(out, self.chunks[number].parts(which), strict=True):
                    into[heads, at] = part[heads, there]
        for into, part in zip(out, tail, strict=True):
            into[:, num_picked:] = part
        return out

    def state(self) -> dict[str, Any]:
        """As tensors, lists and numbers, for a checkpoint."""
        chunks = [[list(c.keys), list(c.values), c.angles, c.summary] for c in (*self.chunks, self.tail)]
        return {"chunks": chunks, "block_tokens": self.block_tokens, "num_seen": self.num_seen}

    @classmethod
    def from_state(cls, state: dict[str, Any], shelf: Shelf) -> Waiting:
        """And back, on ``shelf``."""

        def kept(parts: Iterable[torch.Tensor]) -> Parts:
            return tuple(shelf.keep(part) for part in parts)

        chunks = [Chunk(kept(keys), kept(values), *kept(rest)) for keys, values, *rest in state["chunks"]]
        return cls(tuple(chunks[:-1]), chunks[-1], state["block_tokens"], state["num_seen"], shelf.place.where)


def appended(
    before: Waiting | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    angles: torch.Tensor,
    storage: Storage,
    shelf: Shelf,
    block_tokens: int,
) -> tuple[tuple[Chunk, ...], Chunk]:
    """Chunks and tail after a segment: keys and values ``[kv heads, tokens, size]``, made at ``angles [tokens]``."""
    packed_keys, packed_values = storage.pack(keys), storage.pack(values)
    full_keys = keys
    if before is not None and before.tail.num_tokens:
        tail = before.tail
        old_keys, old_values = (tuple(part.to(keys.device) for part in parts) for parts in (tail.keys, tail.values))
        full_keys = torch.cat((storage.unpack(old_keys, keys.dtype), keys), 1)
        packed_keys = tuple(torch.cat(both, 1) for both in zip(old_keys, packed_keys, strict=True))
        packed_values = tuple(torch.cat(both, 1) for both in zip(old_values, packed_values, strict=True))
        angles = torch.cat((tail.angles.to(angles.device), angles))
    whole = full_keys.shape[1] // block_tokens * block_tokens
    summed = summed_tokens(block_tokens)
    summary = full_keys[:, :whole].unflatten(1, (-1, summed)).mean(2) if whole else full_keys[:, :0]

    def chunk(where: slice, summary: torch.Tensor) -> Chunk:
        keys, values = (tuple(shelf.keep(part[:, where]) for part in packed) for packed in (packed_keys, packed_values))
        return Chunk(keys, values, shelf.keep(angles[where].to(torch.int32)), shelf.keep(summary))

    old = () if before is None else before.chunks
    new = (chunk(slice(0, whole), summary),) if whole else ()
    return (*old, *new), chunk(slice(whole, None), full_keys[:, :0])


def summed_tokens(block_tokens: int) -> int:
    """Tokens whose mean key is one number of a summary: a divisor of the block."""
    return next(n for n in range(min(SUMMED_TOKENS, block_tokens), 0, -1) if block_tokens % n == 0)
