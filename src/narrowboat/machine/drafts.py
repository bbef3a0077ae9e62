"""Folders that are there whole or not at all: written under another name, hashed on the way, renamed when on disk.

Every file goes through one ``write``, where its digest grows with it (xxHash, 128 bits, at 10 GB/s: damage is noticed,
nobody is kept from forging), and is flushed to disk before the folder gets its name; so a kill or a power cut at any
moment leaves the folder that was there before, or the new one. What a kill leaves behind is a draft, which whoever
opens the place next removes. Files have the modes that the umask says.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import xxhash

DRAFT, OLD = ".draft-", ".old-"
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Stamp:
    """What a file is known by: its bytes, and their digest in hexadecimal digits."""

    size: int
    digest: str


@dataclass
class Draft:
    """A folder in the making; ``stamps`` are those of the files that are written so far, by their names in it."""

    path: Path
    stamps: dict[str, Stamp] = field(default_factory=dict)

    def write(self, name: str, content: bytes) -> None:
        """Write the file ``name``; those below a folder make it."""
        self.write_blocks(name, [content])

    def write_blocks(self, name: str, blocks: Iterable[bytes | memoryview]) -> None:
        """Write the file ``name`` a piece at a time, none of which need be there before its turn."""
        with self._open(name) as file:
            for block in blocks:
                file.write(block)

    @contextmanager
    def _open(self, name: str) -> Iterator[HashedFile]:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with HashedFile(path) as file:
            yield file
            os.fsync(file.fileno())
        self.stamps[name] = file.stamp


class HashedFile(FileIO):
    """A new file whose digest grows as it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x")
        self._hash, self._size = xxhash.xxh3_128(), 0

    def write(self, block: bytes | memoryview) -> int:  # type: ignore[override]
        """All of ``block``."""
        rest = memoryview(block).cast("B")
        self._hash.update(rest)
        self._size += len(rest)
        while len(rest):  # the system may take part of a large one
            rest = rest[super().write(rest) or 0 :]
        return len(block)

    @property
    def stamp(self) -> Stamp:
        """The digest of what was written so far."""
        return Stamp(self._size, self._hash.hexdigest())


@contextmanager
def whole(folder: Path) -> Iterator[Draft]:
    """A draft of ``folder``, which takes its place, and that of an older one, when all went well.

    Raises:
        OSError: the disk is full or cannot be written; what was there is there still.
    """
    draft, old = folder.with_name(DRAFT + folder.name), folder.with_name(OLD + folder.name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear([path for path in (draft, old) if path.exists()])
        draft.mkdir()
        yield Draft(draft)
        if folder.exists():
            os.replace(folder, old)
        os.replace(draft, folder)
        flush(folder.parent)
    finally:
        for left in (draft, old) if folder.exists() else (draft,):
            shutil.rmtree(left, ignore_errors=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write one file, or leave the one that was there.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    draft = path.with_name(DRAFT + path.name)
    try:
        draft.unlink(missing_ok=True)
        with HashedFile(draft) as file:
            file.write(content)
            os.fsync(file.fileno())
        os.replace(draft, path)
        flush(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Remove the drafts that killed processes left in ``folder``; what one had moved aside comes back."""
    _clear(list(folder.iterdir()) if folder.is_dir() else [])


def _clear(paths: list[Path]) -> None:
    for path in paths:
        if path.name.startswith(OLD) and not (back := path.with_name(path.name.removeprefix(OLD))).exists():
            os.replace(path, back)
        elif path.name.startswith((DRAFT, OLD)):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def stamp_of(path: Path) -> Stamp:
    """Of a file that is there.

    Raises:
        OSError: it cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return Stamp(size, digest.hexdigest())


def digest_of(content: bytes) -> str:
    """The digest of ``content``, in the form of a file's stamp."""
    return xxhash.xxh3_128(content).hexdigest()


def flush(folder: Path) -> None:
    """Have the system write a folder's names out, so that a power cut after a rename loses nothing."""
    if os.name == "nt":  # which cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
