"""Reading: a file as a stream of raw records, in constant memory whatever its size.

Lines end at ``\\n`` only; a byte-order mark, and ``\\r`` before ``\\n``, are not part of the data. A very long text
comes in blocks. What cannot be read is a ``Broken`` that names file, line and reason; the file goes on behind it where
it can.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from narrowboat.data.boundaries import graphemes
from narrowboat.data.markup import html_text, pdf_text
from narrowboat.data.sources import Source
from narrowboat.errors import DataError

BOM = b"\xef\xbb\xbf"
CHUNK_CHARS = 1 << 20
ROWS = 64


@dataclass(frozen=True, slots=True)
class Record:
    """One raw record. ``place`` is ``file`` or ``file, line 3``; ``kind`` is ``record``, or what a file's text is."""

    place: str
    value: dict[str, Any]
    kind: str
    block: int = 0
    is_last: bool = True
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Broken:
    """A record that cannot be used, and why."""

    place: str
    reason: str


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


def read(source: Source, block_chars: int, lead_chars: int, progress: Progress) -> Iterator[Record | Broken]:
    """Every record of a file. A text of more than ``block_chars`` comes in blocks of about so many characters.

    Each block but the first tells the last ``lead_chars`` before it.
    """
    place = str(source.path)
    num = 0
    try:
        for record in _read(source, block_chars, lead_chars, progress):
            num += 1
            yield record
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
        yield Broken(place, f"cannot be read any further, {num:,} records were read: {error}")
    except UnicodeDecodeError as error:
        yield Broken(place, _not_utf8(error))
    except DataError as error:
        yield Broken(place, str(error))
    else:
        if not num:
            yield Broken(place, "the file is empty" if not source.num_bytes else "no record is in it")
    progress.finish(source.num_bytes)


def _read(source: Source, block_chars: int, lead_chars: int, progress: Progress) -> Iterator[Record | Broken]:
    path, kind = source.path, source.kind
    if kind in ("parquet", "arrow"):
        yield from _rows(path, kind)
        return
    if kind == "pdf":
        yield from blocks(str(path), "prose", pdf_text(path), block_chars, lead_chars)
        return
    with path.open("rb") as raw, _decompressed(raw) as file:
        progress.watch(raw)
        if kind == "jsonl":
            yield from _lines(file, path)
        elif kind == "json":
            yield from _json(_chunks(file), path)
        elif kind == "csv":
            yield from _csv(file, path)
        elif kind == "html":
            yield from blocks(str(path), "markdown", html_text(_chunks(file)), block_chars, lead_chars)
        else:
            yield from blocks(str(path), kind, _chunks(file), block_chars, lead_chars)


def _decompressed(raw: IO[bytes]) -> IO[bytes]:
    """By the first bytes, whatever the name."""
    head = raw.read(6)
    raw.seek(0)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError("it is UTF-16 text; save it as UTF-8")
    if head.startswith(b"\x1f\x8b"):
        return gzip.open(raw)  # type: ignore[return-value]
    if head.startswith(b"BZh"):
        return bz2.open(raw)
    if head.startswith(b"\xfd7zXZ\x00"):
        return lzma.open(raw)
    for magic, codec in ((b"\x28\xb5\x2f\xfd", "zstd"), (b"\x04\x22\x4d\x18", "lz4")):
        if head.startswith(magic):
            stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)
            return io.BufferedReader(stream)
    return raw


@contextmanager
def _text(file: IO[bytes]) -> Iterator[io.TextIOWrapper]:
    """``file`` as text without a byte-order mark, line ends as they are; ``file`` stays open."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    try:
        yield text
    finally:
        text.detach()


def _chunks(file: IO[bytes]) -> Iterator[str]:
    """Pieces of a text, ``\\r\\n`` as ``\\n``."""
    held = ""
    with _text(file) as text:
        while chunk := text.read(CHUNK_CHARS):
            if "\x00" in chunk:
                raise DataError("it holds a zero byte, so it is not text")
            chunk = held + chunk
            held = "\r" if chunk.endswith("\r") else ""
            yield chunk.removesuffix(held).replace("\r\n", "\n")
    if held:
        yield held


def blocks(place: str, kind: str, chunks: Iterable[str], block_chars: int, lead_chars: int) -> Iterator[Record]:
    """One document; blocks end at the last blank line, line or blank of their second half.

    Each is tokenised by itself, so at the joins the tokens may be others than the whole document's.
    """
    buffer, lead, block = "", "", 0
    for chunk in chunks:
        buffer += chunk
        while len(buffer) > 2 * block_chars:
            end = _block_end(buffer, block_chars)
            yield Record(place, {"text": buffer[:end]}, kind, block, False, lead)
            lead, buffer, block = buffer[max(end - lead_chars, 0) : end], buffer[end:], block + 1
    if block or buffer.strip():
        yield Record(place, {"text": buffer}, kind, block, True, lead)


def _block_end(buffer: str, block_chars: int) -> int:
    for mark in ("\n\n", "\n", " "):
        end = buffer.rfind(mark, block_chars // 2, block_chars)
        if end > 0:
            return end + (len(mark) if mark != " " else 0)
    begin = max(block_chars - 2000, 0)
    return graphemes(buffer, begin, block_chars // 2 if begin == 0 else begin + 1000, len(buffer))[0]


def _lines(file: IO[bytes], path: Path) -> Iterator[Record | Broken]:
    for number, line in enumerate(file, 1):
        raw = line.removeprefix(BOM)  # also where a file that had one was put behind another
        if raw.strip():
            yield _parsed(raw, f"{path}, line {number}")


def _parsed(raw: bytes, place: str) -> Record | Broken:
    try:
        return _record(json.loads(raw.decode("utf-8")), place)
    except UnicodeDecodeError as error:
        return Broken(place, _not_utf8(error))
    except (json.JSONDecodeError, RecursionError) as error:
        return Broken(place, f"not valid JSON: {error}")


def _record(value: Any, place: str) -> Record | Broken:
    if not isinstance(value, dict):
        return Broken(place, f"expected an object with named fields, found {type(value).__name__}")
    return Record(place, value, "record")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte {error.start + 1:,} of what was read is 0x{error.object[error.start]:02x}"


def _json(chunks: Iterator[str], path: Path) -> Iterator[Record | Broken]:
    """A list of objects, one object, or objects behind one another; read value by value."""
    decoder, buffer, at, number, is_over = json.JSONDecoder(), "", 0, 0, False
    depth = 0  # 1 inside the outer list
    while True:
        while at < len(buffer) and (buffer[at].isspace() or (depth and buffer[at] == ",")):
            at += 1
        if at == len(buffer):
            buffer, at = next(chunks, ""), 0
            if not buffer:
                return
        elif not number and not depth and buffer[at] == "[":
            depth, at = 1, at + 1
        elif depth and buffer[at] == "]":
            return
        else:
            try:
                value, at = decoder.raw_decode(buffer, at)
            except json.JSONDecodeError as error:
                more = "" if is_over or _is_wrong(error, buffer) else "".join(_some(chunks, len(buffer) - at))
                if not more:
                    yield Broken(f"{path}, record {number + 1}", f"not valid JSON: {error}; the rest is not read")
                    return
                buffer, at = buffer[at:] + more, 0
                continue
            number += 1
            yield _record(value, f"{path}, record {number}")


def _is_wrong(error: json.JSONDecodeError, buffer: str) -> bool:
    """Whether a value is wrong, not merely cut off by the end of what has been read."""
    return "Unterminated string" not in error.msg and len(buffer) - error.pos > 16


def _some(chunks: Iterator[str], num_chars: int) -> Iterator[str]:
    """As much again as there is, so that a long value is tried only a few times."""
    read = 0
    while read <= num_chars and (chunk := next(chunks, "")):
        read += len(chunk)
        yield chunk


def _csv(file: IO[bytes], path: Path) -> Iterator[Record | Broken]:
    csv.field_size_limit(sys.maxsize)
    with _text(file) as text:
        head = text.readline()
        delimiter = max("\t,;|", key=head.count)
        reader = csv.reader(chain([head], text), delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            for row in reader:
                place = f"{path}, line {reader.line_num}"
                if len(row) == len(names):
                    yield Record(place, dict(zip(names, row, strict=True)), "record")
                elif row:
                    yield Broken(place, f"{len(row)} fields where the first line names {len(names)}")
        except csv.Error as error:
            yield Broken(f"{path}, line {reader.line_num}", f"not valid CSV: {error}; the rest is not read")


def _rows(path: Path, kind: str) -> Iterator[Record | Broken]:
    number = 0
    for batch in _parquet(path) if kind == "parquet" else _arrow(path):
        for start in range(0, len(batch), ROWS):
            for value in batch.slice(start, ROWS).to_pylist():
                number += 1
                yield Record(f"{path}, row {number}", value, "record")


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=ROWS)


def _arrow(path: Path) -> Iterator[pa.RecordBatch]:
    """The stream format, which ``datasets`` writes, or the file format."""
    with pa.memory_map(str(path)) as file:
        if file.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(file)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            file.seek(0)
            yield from pa.ipc.open_stream(file)
