"""Which tokens see each other: documents as spans in rows, and the pieces that attention does them in.

Packed rows, padding on either side and batches are one thing here: a row is a list of documents, what lies between
them is padding. A tile's queries of one document form pieces; each piece sees one stretch of keys, of which the last
part is its own (causal) and the rest lies before it (seen whole), or, under a sliding window, needs a mask. No mask
is ever larger than piece x (window + piece).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise

import torch

from narrowboat.owner.values import has_values

Span = tuple[int, int]

WINDOW_PIECE_TOKENS = 512


class Sight(Enum):
    """What the queries of a piece see of a stretch of keys."""

    ALL = "all"
    CAUSAL = "causal"
    WINDOW = "window"


@dataclass(frozen=True)
class Stretch:
    """Keys ``start`` to ``stop`` of the row and how they are seen."""

    start: int
    stop: int
    sight: Sight


@dataclass(frozen=True)
class Piece:
    """Queries ``start`` to ``stop`` of some rows, all of one document, with the keys they see."""

    rows: slice
    start: int
    stop: int
    keys: tuple[Stretch, ...]


@dataclass(frozen=True)
class Layout:
    """The documents of a micro-batch.

    Attributes:
        num_tokens: tokens in a row, padding included.
        rows: for each row the spans ``(start, stop)`` of its documents, in order.
    """

    num_tokens: int
    rows: tuple[tuple[Span, ...], ...]

    @classmethod
    def of(
        cls,
        num_rows: int,
        num_tokens: int,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        lengths: Sequence[Sequence[int]] | None = None,
    ) -> Layout:
        """Find the documents.

        Args:
            num_rows: rows of the micro-batch.
            num_tokens: tokens in a row.
            attention_mask: ``[rows, tokens]``, 0 where a row is padded, or None.
            position_ids: ``[rows or 1, tokens]``; a document begins wherever they do not count on by one.
            lengths: for each row the lengths of its documents, from its left edge on; spares reading the tensors.
        """
        if lengths is not None:
            return cls(num_tokens, tuple(_spans(row) for row in lengths))
        whole = (((0, num_tokens),),) * num_rows
        if attention_mask is not None and attention_mask.dim() == 2 and has_values(attention_mask):
            seen = attention_mask.bool().cpu()
            if not seen.all():  # padded rows hold one document each
                return cls(num_tokens, tuple(tuple(_runs(row)) for row in seen))
        if position_ids is None or not has_values(position_ids):
            return cls(num_tokens, whole)
        positions = position_ids.cpu()
        begins = positions[:, 1:] != positions[:, :-1] + 1
        if not begins.any():
            return cls(num_tokens, whole)
        rows = []
        for row in begins.expand(num_rows, -1):
            cuts = [0, *(row.nonzero()[:, 0] + 1).tolist(), num_tokens]
            rows.append(tuple(pairwise(cuts)))
        return cls(num_tokens, tuple(rows))

    def in_groups(self, size: int, shift: int = 0) -> Layout:
        """Documents cut into groups of ``size`` tokens, the first of which is ``shift`` tokens shorter."""
        return replace(self, rows=tuple(tuple(_groups(row, size, shift)) for row in self.rows))

    def pieces(self, start: int, stop: int, window: int | None = None) -> Iterator[Piece]:
        """The pieces of the tile ``start`` to ``stop``; rows with the same documents go together."""
        first = 0
        while first < len(self.rows):
            last = first + 1
            while last < len(self.rows) and self.rows[last] == self.rows[first]:
                last += 1
            for begin, end in self.rows[first]:
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    yield from _document_pieces(slice(first, last), begin, low, high, window)
            first = last


def _document_pieces(rows: slice, begin: int, start: int, stop: int, window: int | None) -> Iterator[Piece]:
    if window is None or stop - begin <= window:  # nothing is out of sight
        own = Stretch(start, stop, Sight.CAUSAL)
        keys = (own,) if start == begin else (Stretch(begin, start, Sight.ALL), own)
        yield Piece(rows, start, stop, keys)
        return
    size = min(WINDOW_PIECE_TOKENS, window)
    for low in range(start, stop, size):
        high = min(low + size, stop)
        yield Piece(rows, low, high, (Stretch(max(begin, low - window + 1), high, Sight.WINDOW),))


def _groups(documents: tuple[Span, ...], size: int, shift: int) -> Iterator[Span]:
    for start, stop in documents:
        cuts = [start, *range(start + size - shift, stop, size), stop]
        yield from ((a, b) for a, b in pairwise(cuts) if a < b)


def _spans(lengths: Sequence[int]) -> tuple[Span, ...]:
    stops = list(accumulate(lengths))
    return tuple((stop - length, stop) for stop, length in zip(stops, lengths, strict=True))


def _runs(seen: torch.Tensor) -> Iterator[Span]:
    """Stretches of ones in a row of an attention mask."""
    edges = torch.diff(seen.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    starts, stops = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    yield from zip(starts, stops, strict=True)
