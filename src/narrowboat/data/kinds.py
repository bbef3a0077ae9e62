"""Kinds of files: what a file holds, recognised by its name; one line per kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ARCHIVE = ".zip"
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


def shown(path: Path | str) -> str:
    """``path`` as text that can be written to any file; bytes that are not UTF-8 become escapes."""
    try:
        raw = str(path).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a character (a surrogate), which no file name contains
        raw = str(path).encode("utf-8", "backslashreplace")
    return raw.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Source:
    """One file, or one member of a zip archive.

    ``kind`` is a record format, or what its text is (prose, markdown, python, ..).
    """

    path: Path
    kind: str
    num_bytes: int
    member: str = ""

    @property
    def identity(self) -> tuple[str, str]:
        """A value that is equal for the same file under two names."""
        return str(self.path.resolve()), self.member

    @property
    def name(self) -> str:
        """The name for messages."""
        return f"{shown(self.path)}, {self.member}" if self.member else shown(self.path)


def kind_of(path: Path | PurePosixPath) -> str | None:
    """The kind of a file, by its name; ``notes.jsonl.gz`` is of the same kind as ``notes.jsonl``."""
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    return KINDS.get(path.suffix.lower())


def source_of(path: Path) -> Source:
    """The file at ``path``; None if its kind is unknown."""
    return Source(path, str(kind_of(path)), path.stat().st_size)
