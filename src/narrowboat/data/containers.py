"""Containers: reads the bytes of compressed files and archives, and reports where they are damaged.

A file is read member by member (a gzip file may have several). Where a member is damaged, reading continues with the
next undamaged member; the bytes between are lost and reported with their place. Memory is constant, whatever size a
file claims.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from narrowboat.errors import DataError, cut

UNREADABLE = (
    OSError, EOFError, ValueError, LookupError, ArithmeticError, RuntimeError, MemoryError, TypeError,
    zlib.error, lzma.LZMAError, zipfile.BadZipFile, pa.ArrowException,
)  # fmt: skip
"""Exceptions that libraries raise for damaged files."""

CHUNK_BYTES = 1 << 16
XZ_BYTES = 2 << 30  # limit of the dictionary that a file asks for; xz -9 asks for 64 MiB


class Damaged(Exception):
    """A part of a file that cannot be read; if ``goes_on``, the next ``read`` continues after it."""

    def __init__(self, reason: str, goes_on: bool = False) -> None:
        self.goes_on = goes_on
        super().__init__(reason)


@contextmanager
def opened(path: Path, member: str = "") -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file, or a member of a zip archive, decompressed. Return the stream, and the raw file for its position.

    Raises:
        OSError: the file cannot be opened.
        DataError: it is UTF-16 text, or an archive that is damaged or locked.
        Damaged: raised while reading, for a part that cannot be read.
    """
    with ExitStack() as stack:
        raw = stack.enter_context(path.open("rb"))
        file: IO[bytes] = raw
        if member:
            try:
                packed = stack.enter_context(stack.enter_context(zipfile.ZipFile(raw)).open(member))
            except UNREADABLE as error:
                raise DataError(f"the archive is damaged, or locked: {said(error)}") from None
            file = io.BufferedReader(_Pieces(_read(packed)), CHUNK_BYTES)
        yield _decompressed(file), raw


def said(error: BaseException) -> str:
    """The first line of an error's message, shortened; its class name where the message is empty."""
    return cut(next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__))


def members(path: Path) -> list[zipfile.ZipInfo]:
    """The files of a zip archive, by name.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = [member for member in archive.infolist() if not member.is_dir()]
    except UNREADABLE as error:
        raise DataError(f"the archive cannot be read: {said(error)}") from None
    return sorted(found, key=lambda member: member.filename)


@dataclass(frozen=True)
class _Codec:
    """A compression format: the bytes with which members begin, and the decompressor."""

    head: bytes
    magic: re.Pattern[bytes]
    make: Callable[[], Any]


class _Gzip:
    """Wraps ``zlib`` in the interface of ``bz2`` and ``lzma``."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)
        self._left = b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._zlib.decompress(self._left + data, max_length)
        self._left = self._zlib.unconsumed_tail
        return piece

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._left

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data


def _xz() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(memlimit=XZ_BYTES)


_CODECS = (
    _Codec(b"\x1f\x8b", re.compile(rb"\x1f\x8b\x08[\x00-\x1f].{4}[\x00\x02\x04][\x00-\x0d\xff]", re.DOTALL), _Gzip),
    _Codec(b"BZh", re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"), bz2.BZ2Decompressor),
    _Codec(b"\xfd7zXZ\x00", re.compile(rb"\xfd7zXZ\x00"), _xz),
)
_BY_ARROW = ((b"\x28\xb5\x2f\xfd", "zstd"), (b"\x04\x22\x4d\x18", "lz4"))
_LONGEST_MAGIC = 16


def _decompressed(file: IO[bytes]) -> IO[bytes]:
    """Decompress by the file's first bytes, not by its name."""
    head = file.peek(_LONGEST_MAGIC)  # type: ignore[attr-defined]
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError("it is UTF-16 text; save it as UTF-8")
    for codec in _CODECS:
        if head.startswith(codec.head):
            return io.BufferedReader(_Pieces(_members(file, codec)), CHUNK_BYTES)
    for magic, name in _BY_ARROW:
        if head.startswith(magic):
            return io.BufferedReader(_Pieces(_read(pa.CompressedInputStream(pa.PythonFile(file, mode="r"), name))))
    return file


class _Pieces(io.RawIOBase):
    """A file made of pieces of bytes; a ``Damaged`` among the pieces is raised when it is reached."""

    def __init__(self, pieces: Iterator[bytes | Damaged]) -> None:
        self._pieces, self._held = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            if isinstance(piece, Damaged):
                raise piece
            self._held = piece
        num = min(len(buffer), len(self._held))
        buffer[:num], self._held = self._held[:num], self._held[num:]
        return num


def _read(file: Any) -> Iterator[bytes | Damaged]:
    """The pieces of a library's stream, which cannot continue after damage."""
    num_bytes = 0
    while True:
        try:
            piece = file.read(CHUNK_BYTES)
        except UNREADABLE as error:
            yield Damaged(f"damaged after byte {num_bytes:,} of what it holds: {_why(error)}")
            return
        if not piece:
            return
        num_bytes += len(piece)
        yield piece


def _why(error: BaseException) -> str:
    """An error's message, and a warning where a checksum fails, since the bytes before it were already used."""
    text = said(error)
    is_sum = "incorrect data check" in text or "CRC" in text
    return text + ("; the text that was read before may contain wrong characters" if is_sum else "")


def _members(raw: IO[bytes], codec: _Codec) -> Iterator[bytes | Damaged]:
    """The decompressed bytes of each member, in order."""
    data, reason = raw.read(CHUNK_BYTES), ""
    while data:
        unpacker, fed = codec.make(), data
        try:
            while not unpacker.eof:
                piece = unpacker.decompress(data, CHUNK_BYTES)
                data = b""
                if reason and piece:  # a member after a damaged one that seems to be whole
                    yield Damaged(reason, goes_on=True)
                    reason = ""
                if piece:
                    yield piece
                if unpacker.needs_input and not unpacker.eof:
                    data = fed = raw.read(CHUNK_BYTES)
                    if not data:
                        raise EOFError("the file is cut off")
            data = (unpacker.unused_data or raw.read(CHUNK_BYTES)).lstrip(b"\0")
        except UNREADABLE as error:
            if not reason:
                reason = (
                    f"damaged at about byte {max(raw.tell() - len(fed), 0):,} of the compressed file: {_why(error)}"
                )
            data = _next_member(raw, fed, codec)
    if reason:
        yield Damaged(reason)


def _next_member(raw: IO[bytes], fed: bytes, codec: _Codec) -> bytes:
    """The rest of the file, from the next place that looks like a member's start."""
    data = fed[1:]
    while True:
        if found := codec.magic.search(data):
            return data[found.start() :]
        more = raw.read(CHUNK_BYTES)
        if not more:
            return b""
        data = data[-_LONGEST_MAGIC:] + more
