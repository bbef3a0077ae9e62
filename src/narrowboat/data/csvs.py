"""CSV: rows under the names of the first row, in which quoted values may hold line breaks.

A row that cannot be read costs itself: reading goes on with the line after the one that it began in.
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
        lines: with their places.
        delimiter: of this kind of file; another one where only that gives names that are ``known``.
        known: names of fields that are read.
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
                yield Broken(feed.place, f"two of its columns are called the same: {', '.join(names)}")
                return
        elif len(row) == len(names):
            yield Record(feed.place, dict(zip(names, row, strict=True)), "record")
        elif row:
            yield Broken(feed.place, f"{len(row)} fields where the first row names {len(names)}")


def _header(taken: Sequence[str], row: list[str], delimiter: str, known: Set[str]) -> tuple[list[str], str]:
    """The names, and what stands between them."""
    if not known & {*row}:
        for other in DELIMITERS:
            names = next(csv.reader(taken, delimiter=other), [])
            if known & {*names}:
                return names, other
    return row, delimiter


class _Feed:
    """Lines for a csv reader, which takes as many as a row has; all but the first can be given back."""

    def __init__(self, lines: Iterator[tuple[str, bytes] | Broken]) -> None:
        self._lines = lines
        self._waiting: deque[tuple[str, str]] = deque()
        self.taken: list[tuple[str, str]] = []  # by the row at hand: place and text
        self.broken: list[Broken] = []
        self._num_chars = 0

    @property
    def place(self) -> str:
        """Of the row at hand."""
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
        """The next line that can be read; a row that had begun before one that cannot be read is broken, too."""
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
                raise csv.Error("a line of it cannot be read")
        raise StopIteration

    def give_back(self) -> None:
        """What the row at hand took is read anew, but for its first line."""
        self._waiting.extendleft(reversed(self.taken[1:]))
