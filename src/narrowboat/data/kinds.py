"""Kinds of files: what a file holds, told by its name; one line a kind."""

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
    """``path`` as text that any file can hold: bytes that are no UTF-8 as escapes."""
    try:
        raw = str(path).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a character, which no file name holds
        raw = str(path).encode("utf-8", "backslashreplace")
    return raw.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Source:
    """One file, or one in a zip archive.

    ``kind`` is a record format, or what its text is (prose, markdown, python, ..).
    """

    path: Path
    kind: str
    num_bytes: int
    member: str = ""

    @property
    def identity(self) -> tuple[str, str]:
        """Equal for one file under two names."""
        return str(self.path.resolve()), self.member

    @property
    def name(self) -> str:
        """For people."""
        return f"{shown(self.path)}, {self.member}" if self.member else shown(self.path)


def kind_of(path: Path | PurePosixPath) -> str | None:
    """What a file is, by its name; ``notes.jsonl.gz`` is what ``notes.jsonl`` is."""
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    return KINDS.get(path.suffix.lower())


def source_of(path: Path) -> Source:
    """The file at ``path``, of a kind that is known."""
    return Source(path, str(kind_of(path)), path.stat().st_size)
