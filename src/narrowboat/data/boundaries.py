"""Where a text may be cut: heading, paragraph, sentence, clause, word, grapheme, coarsest first.

In Markdown, tables and fenced code stay whole where they fit. Source code is cut at its definitions (``code.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import regex
from numpy.typing import NDArray

from narrowboat.data.sentences import sentence_ends

Boundaries = Callable[[str, int, int, int], Sequence[int] | NDArray[np.int64]]
"""Maps ``(text, begin, low, high)`` to rising character positions in ``low..high`` at which the text may be cut.

``begin`` is the segment's first character; the text before it is not looked at.
"""

_BLANK_LINES = regex.compile(r"\n(?:[ \t\r]*\n)+")
_LINE = regex.compile(r"\n")
_HEADING = regex.compile(
    r"^(?:#{1,6}[ \t]|(?:chapter|section|article|part|book|appendix)[ \t]+[\divxlc]+\b"
    r"|第[\d一二三四五六七八九十百零]+[章节節条條編编部]|[^\n]+\n(?:={3,}|-{3,})[ \t]*$)",
    regex.MULTILINE | regex.IGNORECASE,
)
_CLAUSE = regex.compile(r"[,;:)\]][ \t]+|[，、；：—…]|\n+")
_BLANK = regex.compile(r"\s+")
_GRAPHEME = regex.compile(r"\X")
_WHOLE = regex.compile(
    r"^(?P<fence>```+|~~~+)[^\n]*\n(?:.*?\n)??(?P=fence)[`~]*[ \t]*(?:\n|\Z)|(?:^[ \t]*\|[^\n]*(?:\n|\Z)){2,}",
    regex.MULTILINE | regex.DOTALL,
)
_LOOK_AHEAD = 200  # characters after a window that are needed to see whether something ends inside the window


@dataclass(frozen=True, slots=True)
class Cuts:
    """Levels of boundaries, coarsest first, and rising spans that stay whole where they fit into a segment."""

    levels: Sequence[Boundaries]
    whole: Sequence[tuple[int, int]] = field(default=())

    def around(self, position: int) -> tuple[int, int] | None:
        """The span that contains ``position``, if any."""
        place = bisect_right(self.whole, position, key=lambda span: span[0]) - 1
        if place < 0:
            return None
        start, end = self.whole[place]
        return (start, end) if start < position < end else None


def headings(text: str, begin: int, low: int, high: int) -> list[int]:
    """Positions before lines that look like headings: those of Markdown, or "Chapter 3"."""
    return [match.start() for match in _HEADING.finditer(text, low, high + _LOOK_AHEAD) if match.start() <= high]


def paragraphs(text: str, begin: int, low: int, high: int) -> list[int]:
    """Positions after blank lines."""
    start = max(begin, low - _LOOK_AHEAD)
    return [match.end() for match in _BLANK_LINES.finditer(text, start, high) if match.end() >= low]


def lines(text: str, begin: int, low: int, high: int) -> list[int]:
    """Positions after line breaks."""
    return [match.end() for match in _LINE.finditer(text, max(begin, low - 1), high)]


def sentences(text: str, begin: int, low: int, high: int) -> list[int]:
    """Positions after sentences; the search starts at the paragraph that contains ``low``."""
    start = max(text.rfind("\n\n", begin, low), begin)
    ends = (start + end for end in sentence_ends(text[start : high + _LOOK_AHEAD])[:-1])
    return [end for end in ends if low <= end <= high]


def clauses(text: str, begin: int, low: int, high: int) -> list[int]:
    """Positions after commas and similar marks, and after line breaks."""
    return [match.end() for match in _CLAUSE.finditer(text, max(begin, low - 2), high) if match.end() >= low]


def words(text: str, begin: int, low: int, high: int) -> list[int]:
    """Positions after spaces."""
    return [match.end() for match in _BLANK.finditer(text, max(begin, low - 1), high) if match.end() >= low]


def graphemes(text: str, begin: int, low: int, high: int) -> list[int]:
    """Positions between graphemes, which readers see as characters; an emoji of several code points is one grapheme."""
    found = (match.end() for match in _GRAPHEME.finditer(text, begin, min(high + _LOOK_AHEAD, len(text))))
    return [end for end in found if low <= end <= high]


PROSE = (headings, paragraphs, sentences, clauses, words, graphemes)
LINES = (paragraphs, lines, words, graphemes)


def markdown(text: str) -> Cuts:
    """Prose in which tables and fenced code stay whole where they fit."""
    whole = [match.span() for match in _WHOLE.finditer(text)]
    cuts = Cuts((), whole)

    def outside(level: Boundaries) -> Boundaries:
        def find(text: str, begin: int, low: int, high: int) -> list[int]:
            return [int(end) for end in level(text, begin, low, high) if cuts.around(int(end)) is None]

        return find

    return Cuts((outside(headings), outside(paragraphs), outside(sentences), lines, *PROSE[3:]), whole)
