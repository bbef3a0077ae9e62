"""Sentence ends, by sentencex, with corrections.

A missed end costs little, because a long text has many; a false one cuts a sentence in two. So an end is dropped where
the sentence seems to continue: before a small letter ("et al. [2019] measured"), before a number or name after an
abbreviation ("Vol. 3", "Dr. Who"), and before a particle after a Japanese quotation. A Chinese or Japanese full stop
needs no space after it.
"""

from __future__ import annotations

import re

import sentencex

_CJK_END = re.compile(r"[。！？｡]+[”’」』）】》\"']*")
_ENUMERATOR = re.compile(r"\s*[(\[]?(?:\d{1,3}|[A-Za-z]|[ivxIVX]{1,4})[.)\]]\s*")
_NEVER_LAST = re.compile(r"\b(Mr|Mrs|Ms|Dr|Prof|Rev|Gen|Figs?|Eqs?|Refs?|Sect|cf|vs|viz|approx|e\.g|i\.e)\.\s*$")
_ABBREVIATION = re.compile(r"\b([A-Z][a-z]{0,4}|al|approx|art|ca|cf|ch|eq|fig|no|nr|p|pp|sec|vol)\.\s*$")
_LOOK_BACK = 40


def sentence_ends(text: str) -> list[int]:
    """Rising positions at which the sentences of ``text`` end, after their trailing spaces; the last is the text's
    end.
    """
    found = {boundary["end_index"] for boundary in sentencex.get_sentence_boundaries("en", text)}
    found |= {match.end() for match in _CJK_END.finditer(text)}
    ends: list[int] = []
    for end in sorted(found):
        if 0 < end < len(text) and _is_end(text, ends[-1] if ends else 0, end):
            ends.append(end)
    return [*ends, len(text)] if text else ends


def _is_end(text: str, start: int, end: int) -> bool:
    rest = text[end : end + _LOOK_BACK].lstrip()
    said = text[max(start, end - _LOOK_BACK) : end]
    last, following = said.rstrip()[-1:], rest[:1]
    if not last:  # a break between paragraphs
        return True
    if last in "」』":
        return not "\u3041" <= following <= "\u309f"
    if "\u2e80" <= last <= "\uffef":
        return True
    if "\n\n" in said[len(said.rstrip()) :]:
        return True
    if following.islower() or (not said[-1].isspace() and following.isalnum() and following.isascii()):
        return False
    if _NEVER_LAST.search(said) or (following.isdigit() and _ABBREVIATION.search(said)):
        return False
    return not _ENUMERATOR.fullmatch(text, start, end)
