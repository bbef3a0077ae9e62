"""What reading gives: raw records, and what cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    """One raw record. ``place`` is ``file`` or ``file, line 3``; ``kind`` is ``record``, or what a file's text is.

    Attributes:
        block: number of a very long text's block; ``lead`` is the end of the one before.
        is_last: whether the text ends with this block.
        breaks_off: the text ends where its file is damaged.
        fills_nulls: it comes from a format that puts a null for every field that another record has.
    """

    place: str
    value: dict[str, Any]
    kind: str
    block: int = 0
    is_last: bool = True
    lead: str = ""
    breaks_off: bool = False
    fills_nulls: bool = False


@dataclass(frozen=True, slots=True)
class Broken:
    """``num`` records that cannot be used, and why."""

    place: str
    reason: str
    num: int = 1
