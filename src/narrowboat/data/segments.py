"""Segments: a long document cut at the best natural boundaries, with nothing lost and nothing learnt twice.

Each cut is sought in a window around the size that balances what is left, coarsest kind of boundary first (heading,
paragraph, sentence, clause, word, grapheme); among equals the one nearest to that size wins. Finer kinds are looked for
only where coarser ones are missing, so cutting costs little beside tokenising. The segments joined are the document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from narrowboat.data.tokens import Tokenised
from narrowboat.errors import DataError

Boundaries = Callable[[str, int, int, int], Sequence[int]]
"""``(text, begin, low, high)`` to rising character positions in ``low..high`` where a cut may fall.

``begin`` is where the segment starts: what stands before is of no interest."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens ``start:end`` of a document, shown with those from ``shown_start`` to ``shown_end``."""

    start: int
    end: int
    shown_start: int
    shown_end: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much of its neighbours a segment shows as context that is not learnt.

    One token before is always shown, or a segment's first token would have nothing to be predicted from.
    """

    num_tokens: int = 0
    both_sides: bool = False


def cut(text: str, tokenised: Tokenised, levels: Sequence[Boundaries], limit: int) -> list[int]:
    """Token places where segments end, the last one the document's end; no segment holds more than ``limit`` tokens.

    Raises:
        DataError: when one character needs more than ``limit`` tokens.
    """
    places = np.flatnonzero(tokenised.is_whole)  # tokens before which a cut is possible
    edges = tokenised.edges[places]  # and the characters there
    ends: list[int] = []
    start, total = 0, len(tokenised)
    while total - start > limit:
        start = _next_cut(text, places, edges, levels, start, total, limit)
        ends.append(start)
    return [*ends, total] if total else ends


def _next_cut(
    text: str,
    places: np.ndarray,
    edges: np.ndarray,
    levels: Sequence[Boundaries],
    start: int,
    total: int,
    limit: int,
) -> int:
    left = total - start
    target = left / -(-left // limit)  # as many segments as are needed, all of one size
    windows = [(target / 2, min(limit, 1.5 * target)), (1, limit)]
    begin = int(edges[np.searchsorted(places, start)])
    for low, high in windows:
        first = int(np.searchsorted(places, start + low))
        last = int(np.searchsorted(places, start + high, side="right")) - 1
        if last < first:
            continue
        for level in levels:
            found = np.asarray(level(text, begin, int(edges[first]), int(edges[last])), np.int64)
            if not len(found):
                continue
            at = np.searchsorted(edges[first : last + 1], found) + first
            at = at[(at <= last) & (edges[np.minimum(at, last)] == found)]  # boundaries inside a token are no use
            if len(at):
                tokens = places[at]
                return int(tokens[np.argmin(np.abs(tokens - (start + target)))])
    needed = int(places[np.searchsorted(places, start, side="right")]) - start
    raise DataError(
        f"the character at {begin:,} ({text[begin : begin + 1]!r} with what belongs to it) needs {max(needed, limit + 1)} "
        f"tokens, a segment may hold {limit}"
    )


def show(ends: Sequence[int], tokenised: Tokenised, overlap: Overlap) -> Iterator[Segment]:
    """Segments with their context.

    Context stands before; or on both sides, where the first segment has only an after, the last only a before, and the
    others half and half.
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
        before = max(before, 1) if number else 0
        shown_start = max(start - before, 0)
        if before > 1:  # a context that starts inside a character would not be text
            shown_start = min(int(whole[np.searchsorted(whole, shown_start)]), start - 1)
        shown_end = min(end + after, ends[-1])
        shown_end = max(int(whole[np.searchsorted(whole, shown_end, side="right") - 1]), end)
        yield Segment(start, end, shown_start, shown_end)
        start = end
