"""Raw records, and reports of what cannot be read: what ``reading.py`` yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    """One raw record. ``place`` is ``file`` or ``file, line 3``; ``kind`` is ``record``, or the kind of a file's text.

    Attributes:
        block: number of the block in a very long text; ``lead`` is the end of the block before.
        is_last: whether the text ends with this block.
        breaks_off: whether the text ends early because its file is damaged.
        fills_nulls: whether the file format adds a null for every field that another record has.
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
    """``num`` records that cannot be used, with the reason."""

    place: str
    reason: str
    num: int = 1
