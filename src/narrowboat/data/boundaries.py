"""Where a text may be cut: heading, paragraph, sentence, clause, word, grapheme, coarsest first."""

from __future__ import annotations

from collections.abc import Sequence

import regex

from narrowboat.data.segments import Boundaries

_PARAGRAPH = regex.compile(r"\n[ \t]*\n\s*")
_LINE = regex.compile(r"\n")
_WORD = regex.compile(r"\s+")
_GRAPHEME = regex.compile(r"\X")


def _ends(pattern: regex.Pattern[str]) -> Boundaries:
    def find(text: str, begin: int, low: int, high: int) -> list[int]:
        return [match.end() for match in pattern.finditer(text, max(begin, low - 1), high) if match.end() >= low]

    return find


def words(text: str, begin: int, low: int, high: int) -> list[int]:
    """Before the blanks that part two words, since most tokenizers put a blank in front of its word."""
    return [match.start() for match in _WORD.finditer(text, low, high) if match.start() >= low]


def graphemes(text: str, begin: int, low: int, high: int) -> list[int]:
    """Between what readers see as characters; an emoji made of several code points is one."""
    return [match.end() for match in _GRAPHEME.finditer(text, begin, high + 64) if low <= match.end() <= high]


PROSE: Sequence[Boundaries] = (_ends(_PARAGRAPH), _ends(_LINE), words, graphemes)


def levels_of(kind: str) -> Sequence[Boundaries]:
    """The kinds of boundary of a document that is prose, markdown or code."""
    return PROSE
