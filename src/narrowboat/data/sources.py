"""Sources: files and folders as a stream of raw records, one at a time, whatever the input's size.

Lines are split on ``\\n`` only; a byte-order mark and ``\\r`` before ``\\n`` are not part of the data. What cannot be
read is a ``Broken`` record that names file, line and reason; the rest of the file goes on.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowboat.errors import DataError

BOM = b"\xef\xbb\xbf"
RECORD_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}
TEXT_SUFFIXES = {".txt": "prose", ".text": "prose", ".md": "markdown", ".markdown": "markdown", ".rst": "prose"}
CODE_SUFFIXES = {".py": "python"}


@dataclass(frozen=True, slots=True)
class Source:
    """One file: ``kind`` is a record format, or what its text is (prose, markdown, python, ..)."""

    path: Path
    kind: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """One raw record. ``place`` is ``file`` or ``file, line 3``; a text file is one record ``{"text": ..}``."""

    place: str
    value: dict[str, Any]
    kind: str


@dataclass(frozen=True, slots=True)
class Broken:
    """A record that cannot be used, and why."""

    place: str
    reason: str


def find(paths: Sequence[str]) -> tuple[list[Source], Counter[str]]:
    """Files under ``paths`` in a fixed order, and how many of each unknown suffix were left out.

    Raises:
        DataError: for a path that does not exist or a named file of a kind that cannot be read.
    """
    sources: list[Source] = []
    left_out: Counter[str] = Counter()
    for name in paths:
        path = Path(name).expanduser()
        if path.is_file():
            kind = kind_of(path)
            if kind is None:
                raise DataError(f"{path}: files ending in {path.suffix!r} cannot be read; known are {_known()}")
            sources.append(Source(path, kind, path.stat().st_size))
        elif path.is_dir():
            for file in _walk(path):
                kind = kind_of(file)
                if kind is None:
                    left_out[file.suffix or file.name] += 1
                else:
                    sources.append(Source(file, kind, file.stat().st_size))
        else:
            raise DataError(f"{path}: there is no such file or folder")
    return sources, left_out


def kind_of(path: Path) -> str | None:
    """What a file is, by its name."""
    suffix = path.suffix.lower()
    return RECORD_SUFFIXES.get(suffix) or TEXT_SUFFIXES.get(suffix) or CODE_SUFFIXES.get(suffix)


def _known() -> str:
    return " ".join(sorted([*RECORD_SUFFIXES, *TEXT_SUFFIXES, *CODE_SUFFIXES]))


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(here) / name


def read(source: Source) -> Iterator[Record | Broken]:
    """Every record of a file."""
    if source.kind == "jsonl":
        yield from _read_lines(source)
    elif source.kind == "json":
        yield from _read_json(source)
    else:
        try:
            text = source.path.read_bytes().removeprefix(BOM).decode("utf-8")
        except UnicodeDecodeError as error:
            yield Broken(str(source.path), f"not UTF-8: byte {error.start:,} is 0x{error.object[error.start]:02x}")
            return
        yield Record(str(source.path), {"text": text.replace("\r\n", "\n")}, source.kind)


def _read_lines(source: Source) -> Iterator[Record | Broken]:
    with source.path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{source.path}, line {number}"
            raw = line.removeprefix(BOM) if number == 1 else line
            if not raw.strip():
                continue
            yield _parse(raw, place)


def _parse(raw: bytes, place: str) -> Record | Broken:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Broken(place, f"not UTF-8: byte {error.start:,} of the line is 0x{error.object[error.start]:02x}")
    except (json.JSONDecodeError, RecursionError) as error:
        return Broken(place, f"not valid JSON: {error}")
    return _record(value, place)


def _record(value: Any, place: str) -> Record | Broken:
    if not isinstance(value, dict):
        return Broken(place, f"expected an object with named fields, found {type(value).__name__}")
    return Record(place, value, "record")


def _read_json(source: Source) -> Iterator[Record | Broken]:
    try:
        values = json.loads(source.path.read_bytes().removeprefix(BOM).decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        yield Broken(str(source.path), f"not valid JSON: {error}")
        return
    for number, value in enumerate(values if isinstance(values, list) else [values], 1):
        yield _record(value, f"{source.path}, record {number}")
