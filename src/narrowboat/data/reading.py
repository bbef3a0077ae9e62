"""Reading: a file as a stream of raw records, in constant memory whatever its size.

A very long text comes in blocks. What cannot be read is a ``Broken`` that names file, place and reason; the file goes
on behind it where it can.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfileobj
from typing import IO

import pyarrow as pa

from narrowboat.data.boundaries import graphemes
from narrowboat.data.containers import Damaged, opened
from narrowboat.data.csvs import csv_rows
from narrowboat.data.kinds import COMPRESSED, Source
from narrowboat.data.lines import chunks, json_lines, json_values, not_utf8, numbered
from narrowboat.data.markup import html_text, pdf_text
from narrowboat.data.raw import Broken, Record, Unread
from narrowboat.data.tables import arrow_rows, parquet_rows
from narrowboat.errors import DataError

Item = Record | Broken | Unread
GRAPHEME_CHARS = 2000  # of a text without blanks in which an end is sought


class Progress:
    """How many bytes of the sources have been read; an open file tells by its position."""

    def __init__(self) -> None:
        self._finished = 0
        self._raw: IO[bytes] | None = None

    def watch(self, raw: IO[bytes]) -> None:
        """``raw`` is being read."""
        self._raw = raw

    def finish(self, num_bytes: int) -> None:
        """A source of so many bytes has been read."""
        self._finished, self._raw = self._finished + num_bytes, None

    @property
    def num_bytes(self) -> int:
        """Read so far."""
        return self._finished + (0 if self._raw is None or self._raw.closed else self._raw.tell())


def read(
    source: Source, block_chars: int, lead_chars: int, progress: Progress, wanted: Set[str] = frozenset()
) -> Iterator[Item]:
    """Every record of a file. A text of more than ``block_chars`` comes in blocks of about so many characters.

    Args:
        source: the file.
        block_chars: of a block.
        lead_chars: before it, which each block but the first tells.
        progress: hears how far it is.
        wanted: fields that somebody reads; other columns of a table are not converted, but counted. Empty for all.
    """
    place, num = source.name, 0
    try:
        for item in _read(source, block_chars, lead_chars, progress, wanted):
            num += not isinstance(item, Unread)
            yield item
    except UnicodeDecodeError as error:
        yield Broken(place, not_utf8(error))
    except (Damaged, OSError) as error:
        yield Broken(place, f"cannot be read any further, {num:,} records were read: {error}")
    except DataError as error:
        yield Broken(place, str(error))
    else:
        if not num:
            yield Broken(place, "the file is empty" if not source.num_bytes else "no record is in it")
    progress.finish(source.num_bytes)


def _read(source: Source, block_chars: int, lead_chars: int, progress: Progress, wanted: Set[str]) -> Iterator[Item]:
    name, kind = source.name, source.kind
    if kind in ("parquet", "arrow", "pdf"):
        yield from _whole(source, block_chars, lead_chars, wanted)
        return
    with opened(source.path, source.member) as (file, raw):
        if not source.member:
            progress.watch(raw)
        if kind == "jsonl":
            yield from json_lines(file, name)
        elif kind == "json":
            yield from json_values(chunks(file), name)
        elif kind == "csv":
            is_tab = ".tsv" in (source.member or source.path.name).lower()
            yield from csv_rows(numbered(file, name), "\t" if is_tab else ",", wanted)
        elif kind == "html":
            yield from blocks(name, "markdown", html_text(chunks(file)), block_chars, lead_chars)
        else:
            yield from blocks(name, kind, chunks(file), block_chars, lead_chars)


def _whole(source: Source, block_chars: int, lead_chars: int, wanted: Set[str]) -> Iterator[Item]:
    """A file of a kind that is not read from front to end."""
    with _seekable(source) as path:
        if source.kind == "pdf":
            yield from blocks(source.name, "prose", pdf_text(Path(path)), block_chars, lead_chars)
        elif source.kind == "parquet":
            yield from parquet_rows(path, source.name, wanted)
        else:
            with pa.memory_map(path) as file:
                yield from arrow_rows(file, source.name, wanted)


@contextmanager
def _seekable(source: Source) -> Iterator[str]:
    """The path of a file on disk: of a compressed one, or one in an archive, a copy without that."""
    if not source.member and source.path.suffix.lower() not in COMPRESSED:
        yield str(source.path)
        return
    with tempfile.NamedTemporaryFile(prefix="narrowboat-") as copy, opened(source.path, source.member) as (file, _):
        copyfileobj(file, copy)
        copy.flush()
        yield copy.name


def blocks(place: str, kind: str, pieces: Iterable[str], block_chars: int, lead_chars: int) -> Iterator[Record]:
    """One document; blocks end at the last blank line, line or blank of their second half.

    Each is tokenised by itself, so at the joins the tokens may be others than the whole document's.
    """
    buffer, lead, block = "", "", 0
    damage: Damaged | None = None
    try:
        for piece in pieces:
            buffer += piece
            while len(buffer) > 2 * block_chars:
                end = _block_end(buffer, block_chars)
                yield Record(place, {"text": buffer[:end]}, kind, block, False, lead)
                lead, buffer, block = buffer[max(end - lead_chars, 0) : end], buffer[end:], block + 1
    except Damaged as error:
        damage = error
    if block or buffer.strip():
        yield Record(place, {"text": buffer}, kind, block, True, lead, breaks_off=damage is not None)
    if damage is not None:
        raise damage


def _block_end(buffer: str, block_chars: int) -> int:
    for mark in ("\n\n", "\n", " "):
        end = buffer.rfind(mark, block_chars // 2, block_chars)
        if end > 0:
            return end + (len(mark) if mark != " " else 0)
    begin = max(block_chars - GRAPHEME_CHARS, 0)
    low = begin + GRAPHEME_CHARS // 2 if begin else block_chars // 2
    return next(iter(graphemes(buffer, begin, low, block_chars)), block_chars)
