"""Reading: yields a file's raw records as a stream, in constant memory whatever its size.

A very long text comes in blocks. A part that cannot be read becomes a ``Broken`` with file, place and reason; where
possible, reading continues after it.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfileobj
from typing import IO

import pyarrow as pa

from narrowboat.data.boundaries import graphemes
from narrowboat.data.containers import Damaged, members, opened
from narrowboat.data.csvs import csv_rows
from narrowboat.data.kinds import ARCHIVE, COMPRESSED, Source
from narrowboat.data.lines import chunks, json_lines, json_values, not_utf8, numbered
from narrowboat.data.markup import html_text, pdf_text
from narrowboat.data.raw import Broken, Record
from narrowboat.data.tables import arrow_rows, parquet_rows
from narrowboat.errors import DataError

GRAPHEME_CHARS = 2000  # characters of a text without spaces in which a block's end is searched


@dataclass
class Reader:
    """Reads files, one after the other.

    Attributes:
        block_chars: size of blocks in characters; a text of more than twice this size comes in blocks.
        lead_chars: characters of the text before a block that come with each block but the first.
        wanted: columns of tables that are converted; empty converts all.
        unread: counts values in the other columns.
    """

    block_chars: int
    lead_chars: int
    wanted: Set[str] = frozenset()
    unread: Counter[str] = field(default_factory=Counter)
    _num_bytes: int = 0
    _open: IO[bytes] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes read so far, with the position in the open file."""
        return self._num_bytes + (0 if self._open is None or self._open.closed else self._open.tell())

    def read(self, source: Source) -> Iterator[Record | Broken]:
        """Yield every record of a file."""
        place, num = source.name, 0
        try:
            for item in self._read(source):
                num += 1
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
        self._num_bytes, self._open = self._num_bytes + source.num_bytes, None

    def _read(self, source: Source) -> Iterator[Record | Broken]:
        name, kind = source.name, source.kind
        if kind == ARCHIVE:  # an archive that could not be listed
            members(source.path)
            return
        if kind in ("parquet", "arrow", "pdf"):
            yield from self._read_whole(source)
            return
        with opened(source.path, source.member) as (file, raw):
            if not source.member:
                self._open = raw
            if kind == "jsonl":
                yield from json_lines(file, name)
            elif kind == "json":
                yield from json_values(chunks(file), name)
            elif kind == "csv":
                is_tab = ".tsv" in (source.member or source.path.name).lower()
                yield from csv_rows(numbered(file, name), "\t" if is_tab else ",", self.wanted)
            elif kind == "html":
                yield from self.blocks(name, "markdown", html_text(chunks(file)))
            else:
                yield from self.blocks(name, kind, chunks(file))

    def _read_whole(self, source: Source) -> Iterator[Record | Broken]:
        """Read a file of a kind that is not read from front to end."""
        with _seekable(source) as path:
            if source.kind == "pdf":
                yield from self.blocks(source.name, "prose", pdf_text(Path(path)))
            elif source.kind == "parquet":
                yield from parquet_rows(path, source.name, self.wanted, self.unread)
            else:
                with pa.memory_map(path) as file:
                    yield from arrow_rows(file, source.name, self.wanted, self.unread)

    def blocks(self, place: str, kind: str, pieces: Iterable[str]) -> Iterator[Record]:
        """Yield one document in blocks, each of which ends at the last blank line, line break or space of its second
        half.

        Each block is tokenised by itself, so tokens at the joins may differ from those of the whole document.
        """
        buffer, lead, block = "", "", 0
        damage: Damaged | None = None
        try:
            for piece in pieces:
                buffer += piece
                while len(buffer) > 2 * self.block_chars:
                    end = _block_end(buffer, self.block_chars)
                    yield Record(place, {"text": buffer[:end]}, kind, block, False, lead)
                    lead, buffer, block = buffer[max(end - self.lead_chars, 0) : end], buffer[end:], block + 1
        except Damaged as error:
            damage = error
        if block or buffer.strip():
            yield Record(place, {"text": buffer}, kind, block, True, lead, breaks_off=damage is not None)
        if damage is not None:
            raise damage


@contextmanager
def _seekable(source: Source) -> Iterator[str]:
    """The path of a file that can be read from any place; compressed files and archive members are unpacked to a
    copy.
    """
    if not source.member and source.path.suffix.lower() not in COMPRESSED:
        yield str(source.path)
        return
    with tempfile.NamedTemporaryFile(prefix="narrowboat-") as copy, opened(source.path, source.member) as (file, _):
        copyfileobj(file, copy)
        copy.flush()
        yield copy.name


def _block_end(buffer: str, block_chars: int) -> int:
    for mark in ("\n\n", "\n", " "):
        end = buffer.rfind(mark, block_chars // 2, block_chars)
        if end > 0:
            return end + (len(mark) if mark != " " else 0)
    begin = max(block_chars - GRAPHEME_CHARS, 0)
    low = begin + GRAPHEME_CHARS // 2 if begin else block_chars // 2
    return next(iter(graphemes(buffer, begin, low, block_chars)), block_chars)
