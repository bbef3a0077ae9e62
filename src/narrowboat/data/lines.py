"""Lines and JSON values from a stream of bytes: one record each; bad ones are reported with their place.

Lines end at ``\\n`` only; a byte-order mark, and ``\\r`` before ``\\n``, are not part of the data.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from narrowboat.data.containers import CHUNK_BYTES, Damaged
from narrowboat.data.jsons import DECODER, checked, kind_of, parsed, why_not
from narrowboat.data.limits import RECORD_BYTES
from narrowboat.data.raw import Broken, Record
from narrowboat.errors import DataError
from narrowboat.units import format_bytes

BOM = codecs.BOM_UTF8
READ_BYTES = 1 << 20
TOO_LARGE = f"it is larger than {format_bytes(RECORD_BYTES)}"


def numbered(file: IO[bytes], name: str) -> Iterator[tuple[str, bytes] | Broken]:
    """Each line with its place; after a damaged part, lines continue with the first one that begins there, and say
    so.
    """
    number, behind = 0, ""
    while True:
        number += 1
        place = f"{name}, line {number}{behind}"
        try:
            line = file.readline(RECORD_BYTES + 1)
            if len(line) > RECORD_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(CHUNK_BYTES)
                yield Broken(place, TOO_LARGE)
                continue
        except Damaged as error:
            yield Broken(place, str(error))
            if not error.goes_on:
                return
            number, behind = 0, " after a damaged part"
            file.readline()  # the rest of a line that began in it
            continue
        if not line:
            return
        yield place, line


def json_lines(file: IO[bytes], name: str) -> Iterator[Record | Broken]:
    """One record per line."""
    for item in numbered(file, name):
        if isinstance(item, Broken):
            yield item
            continue
        place, line = item
        raw = line.removeprefix(BOM)  # also in the middle, where files with one were concatenated
        if raw.strip():
            yield _parsed(raw, place)


def _parsed(raw: bytes, place: str) -> Record | Broken:
    try:
        return record(parsed(raw.decode("utf-8")), place)
    except UnicodeDecodeError as error:
        return Broken(place, not_utf8(error))
    except DataError as error:
        return Broken(place, str(error))


def record(value: Any, place: str) -> Record | Broken:
    """The record of ``value``, which must be an object with fields."""
    if not isinstance(value, dict):
        return Broken(place, f"expected an object with named fields, found {kind_of(value)}")
    return Record(place, value, "record")


def not_utf8(error: UnicodeDecodeError) -> str:
    """Where text is not UTF-8, as a sentence."""
    return f"not UTF-8: byte {error.start + 1:,} of what was read is 0x{error.object[error.start]:02x}"


def chunks(file: IO[bytes]) -> Iterator[str]:
    """Pieces of a text without its byte-order mark, with ``\\n`` for ``\\r\\n``.

    Raises:
        DataError: it contains a zero byte.
        UnicodeDecodeError: it is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held, is_over = "", False
    while not is_over:
        raw = file.read(READ_BYTES)
        is_over = not raw
        chunk = held + decoder.decode(raw, is_over)
        if "\x00" in chunk:
            raise DataError("it contains a zero byte, so it is not text")
        held = "\r" if chunk.endswith("\r") and not is_over else ""
        if chunk := chunk.removesuffix(held).replace("\r\n", "\n"):
            yield chunk


def json_values(pieces: Iterator[str], name: str) -> Iterator[Record | Broken]:
    """Records of a list of objects, of one object, or of objects one after the other; read value by value."""
    return _Values(pieces, name).read()


class _Values:
    """Decodes values from the front of a buffer, which is filled as needed."""

    def __init__(self, pieces: Iterator[str], name: str) -> None:
        self._pieces, self._name = pieces, name
        self._buffer, self._at, self._number = "", 0, 0
        self._is_list = False

    def read(self) -> Iterator[Record | Broken]:
        """Yield every value."""
        while self._is_at_value():
            self._number += 1
            place = f"{self._name}, record {self._number}"
            try:
                decoded, end = self._next()
                value = record(checked(decoded, self._buffer, self._at, end), place)
            except json.JSONDecodeError as error:
                yield Broken(place, f"it {why_not(error)}; the rest is not read")
                return
            except (DataError, ValueError, RecursionError) as error:  # valid, but above a limit
                yield Broken(place, str(error) if isinstance(error, DataError) else f"it {why_not(error)}")
                self._skip()
                continue
            self._at = end
            yield value

    def _is_at_value(self) -> bool:
        """Move to the next value, if there is one."""
        while True:
            while self._at < len(self._buffer) and (self._buffer[self._at].isspace() or self._buffer[self._at] == ","):
                self._at += 1
            if self._at == len(self._buffer):
                if not self._fill(1):
                    return False
            elif self._buffer[self._at] == "[" and not self._number and not self._is_list:
                self._is_list, self._at = True, self._at + 1
            else:
                return not (self._is_list and self._buffer[self._at] == "]")

    def _next(self) -> tuple[Any, int]:
        """The current value, and where it ends.

        Raises:
            DataError: it is larger than a record may be, or contains something that is not a number.
            ValueError, RecursionError: raised by the json library.
        """
        while True:
            try:
                return DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                held = len(self._buffer) - self._at
                if held > RECORD_BYTES:
                    raise DataError(TOO_LARGE) from None
                if _is_wrong(error, self._buffer) or not self._fill(held):
                    raise

    def _fill(self, num_chars: int) -> bool:
        """Read at least ``num_chars`` more, doubling the buffer, so that a long value is parsed only a few times."""
        found = [self._buffer[self._at :]]
        num_read = 0
        while num_read < num_chars and (piece := next(self._pieces, "")):
            found.append(piece)
            num_read += len(piece)
        self._buffer, self._at = "".join(found), 0
        return num_read > 0

    def _skip(self) -> None:
        """Move past the current value, to where its brackets are closed."""
        depth = 0
        while True:
            match = _MARK.search(self._buffer, self._at)
            if match is None or match.group() == '"':  # the rest of a text is still to come
                self._at = len(self._buffer) if match is None else match.start()
                if not self._fill(READ_BYTES):
                    self._at = len(self._buffer)
                    return
                continue
            self._at = match.end()
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match.group(), 0)
            if depth <= 0:
                return


_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|["\[\]{}]', re.DOTALL)


def _is_wrong(error: json.JSONDecodeError, buffer: str) -> bool:
    """Whether a value is wrong, and not only cut off by the end of the buffer."""
    return "Unterminated string" not in error.msg and len(buffer) - error.pos > 16
