"""Sources: which files are read, and as what; a folder's in a fixed order.

Kinds are told by name. A folder that ``datasets`` saved is its Arrow files, of the ``train`` split if there are more.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowboat.errors import DataError

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
RECORDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
TEXTS = {
    "prose": ".txt .text .rst .tex .log .srt",
    "markdown": ".md .markdown .mdx",
    "html": ".html .htm .xhtml",
    "pdf": ".pdf",
    "python": ".py .pyi",
    "javascript": ".js .jsx .mjs .cjs",
    "typescript": ".ts .tsx",
    "c": ".c .h",
    "cpp": ".cc .cpp .cxx .hh .hpp .hxx .cu .cuh",
    "java": ".java",
    "go": ".go",
    "rust": ".rs",
    # without a grammar here: cut at blank lines and lines
    "code": ".rb .php .cs .sh .bash .swift .kt .scala .lua .sql .r .jl .pl .css .scss .vue .zig .hs .ml .ex .erl .clj "
    ".yaml .yml .toml .ini .cfg .xml .proto .cmake .tf",
}
KINDS = RECORDS | {suffix: kind for kind, suffixes in TEXTS.items() for suffix in suffixes.split()}
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}  # and hidden ones


@dataclass(frozen=True, slots=True)
class Source:
    """One file: ``kind`` is a record format, or what its text is (prose, markdown, python, ..)."""

    path: Path
    kind: str
    num_bytes: int


def find(paths: Sequence[str]) -> tuple[list[Source], Counter[str]]:
    """Files under ``paths`` in a fixed order, and how many were left out, by suffix; folders by name.

    Raises:
        DataError: for a path that does not exist, or a named file of a kind that cannot be read.
    """
    sources: list[Source] = []
    left_out: Counter[str] = Counter()
    for name in paths:
        path = Path(name).expanduser()
        if path.is_file():
            if kind_of(path) is None:
                raise DataError(f"{path}: its kind is not known by its name; known are {' '.join(sorted(KINDS))}")
            sources.append(_source(path))
        elif path.is_dir():
            for file in _dataset_files(path) or _walk(path, left_out):
                if kind_of(file) is None or file.name.startswith("."):
                    left_out[file.suffix or file.name] += 1
                else:
                    sources.append(_source(file))
        else:
            raise DataError(f"{path}: there is no such file or folder")
    return sources, left_out


def kind_of(path: Path) -> str | None:
    """What a file is, by its name; ``notes.jsonl.gz`` is what ``notes.jsonl`` is."""
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    return KINDS.get(path.suffix.lower())


def _source(path: Path) -> Source:
    return Source(path, str(kind_of(path)), path.stat().st_size)


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        skipped = {name for name in folders if name.startswith(".") or name in SKIPPED_FOLDERS}
        left_out.update(f"{name}/" for name in skipped)
        folders[:] = sorted({*folders} - skipped)
        yield from (Path(here) / name for name in sorted(files))


def _dataset_files(folder: Path) -> list[Path]:
    """The files of a folder written by ``datasets``' ``save_to_disk``; none if it is not one."""
    splits = folder / "dataset_dict.json"
    try:
        if splits.is_file():
            names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
            return _dataset_files(folder / ("train" if "train" in names else names[0]))
        state = folder / "state.json"
        if not state.is_file() or not (folder / "dataset_info.json").is_file():
            return []
        return [folder / file["filename"] for file in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"{folder}: looks like a saved data set, but its description cannot be read: {error}") from None
