"""What one layer hands on: keys and values of some tokens, in pages that are never written again.

A page holds the same few tokens of all heads. Pages that stay whole are shared by what came before and what comes
after, others are made anew from the tokens that stay; so two neighbouring carries take little more than one, and a
page that nobody holds any more is freed at once. Heads may keep different tokens, but equally many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from narrowboat.memory.carry.storage import Parts, Storage
from narrowboat.owner.causes import Where
from narrowboat.owner.values import has_values


@dataclass(frozen=True, eq=False)
class Page:
    """Keys and values of a few tokens, in stored form."""

    keys: Parts
    values: Parts

    @property
    def num_tokens(self) -> int:
        """How many."""
        return self.keys[0].shape[1]


@dataclass(frozen=True, eq=False)
class Kept:
    """One layer's carry.

    Attributes:
        pages: the tokens, in this order.
        positions: ``[kv heads, tokens]``, their places in the document.
        segments: ``[kv heads, tokens]``, numbers of the segments that they came with.
        marks: ``[kv heads, tokens]``, what the policy noted of each.
        angles: ``[kv heads, tokens]``, the position ids at which the keys were made.
        source: ``[kv heads, tokens]``, where each lay among the carried tokens and those of the segment before.
        where: they lie.
    """

    where: ClassVar[Where] = "device"

    pages: tuple[Page, ...]
    positions: torch.Tensor
    segments: torch.Tensor
    marks: torch.Tensor
    angles: torch.Tensor
    source: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """How many tokens a head carries."""
        return self.positions.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of keys and values in stored form."""
        return sum(part.numel() * part.element_size() for part in self.tensors)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys and values in stored form."""
        return tuple(part for page in self.pages for part in (*page.keys, *page.values))

    def read(self, storage: Storage, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each ``[1, kv heads, tokens, size]``."""
        keys, values = _join([page.keys for page in self.pages]), _join([page.values for page in self.pages])
        return storage.unpack(keys, dtype)[None], storage.unpack(values, dtype)[None]

    def state(self) -> dict[str, Any]:
        """As tensors and lists, for a checkpoint."""
        of_tokens = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "pages"}
        return of_tokens | {"pages": [[list(page.keys), list(page.values)] for page in self.pages]}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Kept:
        """And back."""
        pages = [Page(*(tuple(part.to(device) for part in parts) for parts in page)) for page in state["pages"]]
        of_tokens = {name: t.to(device) for name, t in state.items() if name != "pages"}
        return cls(tuple(pages), **of_tokens)


def make_pages(
    old: Sequence[Page],
    keys: torch.Tensor,
    values: torch.Tensor,
    index: torch.Tensor,
    storage: Storage,
    page_tokens: int,
) -> tuple[tuple[Page, ...], torch.Tensor]:
    """Pages of the tokens that stay, and ``[kv heads, tokens]``: where each of them lay before.

    Args:
        old: the pages carried so far.
        keys: ``[kv heads, tokens, size]`` of the segment that has just been.
        values: the same.
        index: the tokens that stay, by their place among the carried and the segment's own, rising: ``[tokens]`` for
            all heads alike, whose order is kept, or ``[kv heads, tokens]``.
        storage: of the new pages.
        page_tokens: most tokens of a new page.
    """
    if not has_values(keys):  # which pages stay whole is not known: the forecast assumes that none does
        pieces = index.expand(keys.shape[0], -1).split(page_tokens, 1)
        return _gathered(list(old), keys, values, pieces, storage), index.expand(keys.shape[0], -1)
    if index.dim() == 1:
        return _alike(old, keys, values, index, storage, page_tokens)
    return _apart(old, keys, values, index, storage, page_tokens)


def _alike(
    old: Sequence[Page], keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor, storage: Storage, size: int
) -> tuple[tuple[Page, ...], torch.Tensor]:
    """All heads keep the same tokens: each page stays whole, in part or not."""
    pages: list[Page] = []
    start = 0
    bounds = torch.tensor([0] + [page.num_tokens for page in old], device=index.device).cumsum(0)
    edges = torch.searchsorted(index, bounds).tolist()  # where each page's tokens are in index
    for page, first, last in zip(old, edges, edges[1:], strict=False):
        if last - first == page.num_tokens:
            pages.append(page)
        elif last > first:
            places = (index[first:last] - start).expand(keys.shape[0], -1)
            pages.append(Page(_take(page.keys, places), _take(page.values, places)))
        start += page.num_tokens
    own = index[edges[-1] :] - start
    if len(own):
        pages += _gathered([], keys, values, own.expand(keys.shape[0], -1).split(size, 1), storage)
    return tuple(pages), index.expand(keys.shape[0], -1)


def _apart(
    old: Sequence[Page], keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor, storage: Storage, size: int
) -> tuple[tuple[Page, ...], torch.Tensor]:
    """Each head keeps its own tokens: pages of which all heads keep all go first, the other tokens follow."""
    num_tokens = sum(page.num_tokens for page in old) + keys.shape[1]
    stays = torch.zeros(keys.shape[0], num_tokens, dtype=torch.bool, device=index.device).scatter_(1, index, True)
    parts = stays[:, : num_tokens - keys.shape[1]].all(0).split([page.num_tokens for page in old])
    is_whole = torch.stack([part.all() for part in parts]).tolist() if parts else []
    whole = [page for page, stays_whole in zip(old, is_whole, strict=True) if stays_whole]
    others = [page for page, stays_whole in zip(old, is_whole, strict=True) if not stays_whole]
    place = torch.arange(num_tokens, device=index.device)
    in_whole = torch.zeros(num_tokens, dtype=torch.bool, device=index.device)
    start = 0
    for page, stays_whole in zip(old, is_whole, strict=True):
        in_whole[start : start + page.num_tokens] = stays_whole
        start += page.num_tokens
    moved = index[~in_whole[index]].view(index.shape[0], -1)
    renumbered = (~in_whole).cumsum(0) - 1  # places among the other pages and the segment's own tokens
    pieces = renumbered[moved].split(size, 1)
    pages = (*whole, *_gathered(others, keys, values, pieces, storage))
    return pages, torch.cat((place[in_whole].expand(index.shape[0], -1), moved), 1)


def _gathered(
    old: Sequence[Page], keys: torch.Tensor, values: torch.Tensor, pieces: Sequence[torch.Tensor], storage: Storage
) -> tuple[Page, ...]:
    """New pages of tokens from ``old`` and from the segment's own, by their place among both."""
    all_keys = _join([*(page.keys for page in old), storage.pack(keys)])
    all_values = _join([*(page.values for page in old), storage.pack(values)])
    return tuple(Page(_take(all_keys, piece), _take(all_values, piece)) for piece in pieces if piece.shape[1])


def _join(parts: Sequence[Parts]) -> Parts:
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(same, 1) for same in zip(*parts, strict=True))


def _take(parts: Parts, places: torch.Tensor) -> Parts:
    """Tokens ``places`` ``[kv heads, tokens]`` of each part ``[kv heads, tokens, n]``, in storage of their own."""
    return tuple(part.gather(1, places[..., None].expand(-1, -1, part.shape[-1])) for part in parts)
