"""Segments: cuts a long document at the best natural boundaries, with nothing lost and nothing learnt twice.

Each cut is searched in a window around the size that makes the remaining segments equal, coarsest kind of boundary
first; of boundaries of one kind, the nearest to that size is taken. So no segment is very short. Finer kinds are only
searched where coarser ones are missing, so cutting costs little beside tokenising. The segments joined are the
document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.boundaries import Boundaries, Cuts
from narrowboat.data.tokens import Tokenised
from narrowboat.errors import DataError


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``start:end`` of a document; with its context it shows tokens ``shown_start:shown_end``."""

    start: int
    end: int
    shown_start: int
    shown_end: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many tokens of its neighbours a segment shows as context that is not learnt.

    One token before is always shown, because a segment's first token is predicted from it.
    """

    num_tokens: int = 0
    both_sides: bool = False


def cut(text: str, tokenised: Tokenised, cuts: Cuts, limit: int) -> list[int]:
    """Token positions at which segments end, the last being the document's end; a segment has at most ``limit`` tokens.

    Raises:
        DataError: one character needs more than ``limit`` tokens.
    """
    knife = _Knife(text, tokenised, cuts, limit)
    ends: list[int] = []
    while len(tokenised) - (ends[-1] if ends else 0) > limit:
        ends.append(knife.next_cut(ends[-1] if ends else 0))
    return [*ends, len(tokenised)] if len(tokenised) else ends


class _Knife:
    """Finds cuts; ``places`` are the tokens before which a cut is possible, ``edges`` their character positions."""

    def __init__(self, text: str, tokenised: Tokenised, cuts: Cuts, limit: int) -> None:
        self.text, self.cuts, self.limit, self.total = text, cuts, limit, len(tokenised)
        self.places: NDArray[np.int64] = np.flatnonzero(tokenised.is_whole)
        self.edges: NDArray[np.int64] = tokenised.edges[self.places]

    def next_cut(self, start: int) -> int:
        """The token before which the segment that starts at token ``start`` ends."""
        left = self.total - start
        target = left / -(-left // self.limit)  # as many segments as are needed, all of one size
        begin = int(self.edges[self.places.searchsorted(start)])
        for low, high in ((target / 2, min(self.limit, 1.5 * target)), (1, self.limit)):
            first = int(self.places.searchsorted(start + low))
            last = int(self.places.searchsorted(start + high, side="right"))  # after the window
            for level in self.cuts.levels if first < last else ():
                at = self._at_edges(level, begin, first, last)
                if len(at):
                    best = int(at[np.abs(self.places[at] - (start + target)).argmin()])
                    return int(self.places[self._outside_whole(best, start, begin)])
        needed = int(self.places[self.places.searchsorted(start, side="right")]) - start
        character = self.text[begin : int(self.edges[self.edges.searchsorted(begin, side="right")])][:8]
        raise DataError(
            f"one character, {character!r} at {begin:,}, needs {max(needed, self.limit + 1):,} tokens or more; a "
            f"segment may hold {self.limit:,}"
        )

    def _at_edges(self, level: Boundaries, begin: int, first: int, last: int) -> NDArray[np.int64]:
        """Indices of the edges in ``first:last`` at which ``level`` has boundaries.

        A token often starts with the space before its word, so a boundary inside a token moves back over spaces.
        """
        edges = self.edges[first:last]
        found = np.asarray(level(self.text, begin, int(edges[0]), int(edges[-1])), np.int64)
        if not len(found):
            return found
        at = edges.searchsorted(found)
        is_edge = edges[np.minimum(at, len(edges) - 1)] == found
        if is_edge.all():
            return at + first
        moved = np.array([self._before_blanks(end, begin) for end in found[~is_edge].tolist()], np.int64)
        again = edges.searchsorted(moved)
        again = again[(again < len(edges)) & (edges[np.minimum(again, len(edges) - 1)] == moved)]
        return np.concatenate([at[is_edge], again]) + first

    def _before_blanks(self, end: int, begin: int) -> int:
        while end > begin and self.text[end - 1].isspace():
            end -= 1
        return end

    def _outside_whole(self, at: int, start: int, begin: int) -> int:
        """Edge ``at``, moved out of a table or a similar span if that fits into a segment."""
        span = self.cuts.around(int(self.edges[at]))
        if span is None:
            return at
        first, last = (int(self.edges.searchsorted(position)) for position in span)
        if last >= len(self.edges) or self.places[last] - self.places[first] > self.limit:
            return at
        if span[0] > begin:
            return first if self.places[first] > start else at
        return last if self.places[last] - start <= self.limit else at


def show(ends: Sequence[int], tokenised: Tokenised, overlap: Overlap, limit: int) -> Iterator[Segment]:
    """Segments with their context.

    Context stands before; or on both sides, where the first segment has only an after, the last only a before, and the
    others half and half. It starts and ends between characters; where one token of it is shown, the whole character
    that the token is of, as long as the segment's own tokens and the rest of it are within ``limit``.
    """
    whole = np.flatnonzero(tokenised.is_whole)
    start = 0
    for number, end in enumerate(ends):
        is_last = number == len(ends) - 1
        before = after = 0
        if overlap.both_sides:
            before = 0 if number == 0 else overlap.num_tokens if is_last else overlap.num_tokens // 2
            after = 0 if is_last else overlap.num_tokens if number == 0 else overlap.num_tokens - before
        elif number:
            before = overlap.num_tokens
        shown_start = start
        if number:
            shown_start = int(whole[whole.searchsorted(max(start - before, 0))])
        if number and shown_start == start:
            shown_start = int(whole[whole.searchsorted(start) - 1])
            if start - shown_start > max(before, 1 + limit - (end - start)):
                shown_start = start - 1
        shown_end = min(end + after, ends[-1])
        shown_end = max(int(whole[whole.searchsorted(shown_end, side="right") - 1]), end)
        yield Segment(start, end, shown_start, shown_end)
        start = end
