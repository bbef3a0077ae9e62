"""CSV: reads rows under the names of the first row; quoted values may contain line breaks.

Where a row cannot be read, only that row is lost: reading continues with the line after the row's first line.
"""

from __future__ import annotations

import csv
import sys
from collections import deque
from collections.abc import Iterator, Sequence, Set

from narrowboat.data.limits import RECORD_BYTES
from narrowboat.data.lines import BOM, TOO_LARGE, not_utf8
from narrowboat.data.raw import Broken, Record

DELIMITERS = (",", "\t", ";", "|")


def csv_rows(lines: Iterator[tuple[str, bytes] | Broken], delimiter: str, known: Set[str]) -> Iterator[Record | Broken]:
    """A record for each row.

    Args:
        lines: the lines with their places.
        delimiter: the usual delimiter of this kind of file; another is taken if only that gives ``known`` names.
        known: field names that are read.
    """
    csv.field_size_limit(sys.maxsize)
    feed = _Feed(lines)
    reader = csv.reader(feed, delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        feed.taken.clear()
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield Broken(feed.place, f"not valid CSV: {error}")
            feed.give_back()
            continue
        yield from feed.broken
        feed.broken.clear()
        if row is None:
            return
        if names is None:
            names, delimiter = _header([line for _, line in feed.taken], row, delimiter, known)
            reader = csv.reader(feed, delimiter=delimiter, strict=True)
            if len({*names}) < len(names):
                yield Broken(feed.place, f"two columns have the same name: {', '.join(names)}")
                return
        elif len(row) == len(names):
            yield Record(feed.place, dict(zip(names, row, strict=True)), "record")
        elif row:
            yield Broken(feed.place, f"{len(row)} fields, but the first row names {len(names)}")


def _header(taken: Sequence[str], row: list[str], delimiter: str, known: Set[str]) -> tuple[list[str], str]:
    """The names of the first row, and the delimiter between them."""
    if not known & {*row}:
        for other in DELIMITERS:
            names = next(csv.reader(taken, delimiter=other), [])
            if known & {*names}:
                return names, other
    return row, delimiter


class _Feed:
    """Feeds lines to a csv reader, which takes as many as a row has; all but the first can be given back."""

    def __init__(self, lines: Iterator[tuple[str, bytes] | Broken]) -> None:
        self._lines = lines
        self._waiting: deque[tuple[str, str]] = deque()
        self.taken: list[tuple[str, str]] = []  # lines of the current row: place and text
        self.broken: list[Broken] = []
        self._num_chars = 0

    @property
    def place(self) -> str:
        """The place of the current row."""
        return self.taken[0][0] if self.taken else ""

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        self._num_chars = self._num_chars if self.taken else 0
        self.taken.append(self._waiting.popleft() if self._waiting else self._next())
        self._num_chars += len(self.taken[-1][1])
        if self._num_chars > RECORD_BYTES:
            raise csv.Error(f"{TOO_LARGE}; a quote is not closed")
        return self.taken[-1][1]

    def _next(self) -> tuple[str, str]:
        """The next readable line; a row that contains an unreadable line is broken as a whole."""
        for item in self._lines:
            if isinstance(item, Broken):
                self.broken.append(item)
            else:
                place, raw = item
                try:
                    return place, raw.removeprefix(BOM).decode("utf-8")
                except UnicodeDecodeError as error:
                    self.broken.append(Broken(place, not_utf8(error)))
            if self.taken:
                raise csv.Error("one of its lines cannot be read")
        raise StopIteration

    def give_back(self) -> None:
        """Give back all lines of the current row but the first, to be read again."""
        self._waiting.extendleft(reversed(self.taken[1:]))
