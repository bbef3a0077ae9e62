"""Containers: bytes out of compressed files and archives, and where they are damaged.

A file is read member by member (a gzip file may have several, one behind the other). A damaged member ends where it
cannot be read any further; reading goes on with the next whole one. What lies in between is lost, and told with its
place. Constant memory, whatever a file claims to hold.
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
"""What libraries raise over damaged files."""

CHUNK_BYTES = 1 << 16
XZ_BYTES = 2 << 30  # of the dictionary that a file asks for; xz -9 asks for 64 MiB


class Damaged(Exception):
    """A stretch that cannot be read; the next ``read`` goes on behind it, if ``goes_on``."""

    def __init__(self, reason: str, goes_on: bool = False) -> None:
        self.goes_on = goes_on
        super().__init__(reason)


@contextmanager
def opened(path: Path, member: str = "") -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The bytes of a file, or of a member of a zip archive, without their compression; and the file to watch.

    Raises:
        OSError: it cannot be opened.
        DataError: it is text in UTF-16, or an archive that is damaged or locked.
        Damaged: while reading, for a stretch that cannot be read.
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
    """The first line of what an error says, or its name; the beginning of one that is long."""
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
    """A kind of compression: how files and their members begin, and what unpacks a member."""

    head: bytes
    magic: re.Pattern[bytes]
    make: Callable[[], Any]


class _Gzip:
    """``zlib`` with the interface of ``bz2`` and ``lzma``."""

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
    """By the first bytes, whatever the name."""
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
    """Pieces of bytes as a file; a ``Damaged`` among them is raised when its turn comes."""

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
    """A library's stream, whose damage is at its end."""
    num_bytes = 0
    while True:
        try:
            piece = file.read(CHUNK_BYTES)
        except UNREADABLE as error:
            yield Damaged(f"damaged behind byte {num_bytes:,} of what it holds: {_why(error)}")
            return
        if not piece:
            return
        num_bytes += len(piece)
        yield piece


def _why(error: BaseException) -> str:
    """What an error says; and what follows from a sum that does not fit, which stands behind what it is of."""
    text = said(error)
    is_sum = "incorrect data check" in text or "CRC" in text
    return text + ("; what was read of it may hold other letters than were written" if is_sum else "")


def _members(raw: IO[bytes], codec: _Codec) -> Iterator[bytes | Damaged]:
    """What each member holds, one behind the other."""
    data, reason = raw.read(CHUNK_BYTES), ""
    while data:
        unpacker, fed = codec.make(), data
        try:
            while not unpacker.eof:
                piece = unpacker.decompress(data, CHUNK_BYTES)
                data = b""
                if reason and piece:  # a member behind a damaged one, and a whole one as it seems
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
    """What is left of the file from the next place on that looks like a member's start."""
    data = fed[1:]
    while True:
        if found := codec.magic.search(data):
            return data[found.start() :]
        more = raw.read(CHUNK_BYTES)
        if not more:
            return b""
        data = data[-_LONGEST_MAGIC:] + more
