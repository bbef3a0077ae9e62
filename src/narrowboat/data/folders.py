"""Folders: the plain files of a folder, of a zip archive or of a saved data set, and nothing that lies outside of it.

Links that lead out of a folder, pipes, devices and what cannot be read are left out and counted. No name in a data
set's description reaches beyond its folder.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from narrowboat.data.containers import members, said
from narrowboat.data.kinds import ARCHIVE, KINDS, RECORDS, TEXTS, Source, kind_of, shown, source_of
from narrowboat.data.splits import Kind, Listed
from narrowboat.errors import DataError

PROGRAMS = {*TEXTS} - {"prose", "markdown", "html", "pdf", "code"}
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}  # and hidden ones


def listed(path: Path, left_out: Counter[str], is_named: bool = True) -> list[Listed[Source]] | None:
    """The files of a folder or an archive, or one file; None where there is nothing.

    Args:
        path: of a folder or file.
        left_out: counts what is not read, by suffix or reason; folders by name.
        is_named: by the user: then a kind that is not known is refused.

    Raises:
        DataError: it is no file or folder, of no known kind, or a damaged archive.
    """
    if path.is_dir():
        return [
            (file.relative_to(path).parts[:-1] + parts, what, source)
            for file in _walk(path, left_out)
            for parts, what, source in _opened(file, left_out)
        ]
    if not path.exists():
        return None
    if not stat.S_ISREG(path.stat().st_mode):
        raise DataError(f"{shown(path)}: it is a pipe or a device, not a file or folder")
    if is_named and kind_of(path) is None and path.suffix.lower() != ARCHIVE:
        known = " ".join(sorted([*KINDS, ARCHIVE]))
        raise DataError(f"{shown(path)}: its kind is not known by its name; known are {known}")
    return _opened(path, left_out)


def _opened(path: Path, left_out: Counter[str]) -> list[Listed[Source]]:
    """A file, or the files of a zip archive."""
    kind = kind_of(path)
    if kind is not None and not path.name.startswith("."):
        return [((shown(path.name),), _what(kind), source_of(path))]
    if path.suffix.lower() != ARCHIVE:
        left_out[path.suffix or path.name] += 1
        return []
    try:
        found = members(path)
    except DataError:  # told when its turn to be read comes
        return [((shown(path.name),), "records", Source(path, ARCHIVE, path.stat().st_size))]
    inside: list[Listed[Source]] = []
    for member in found:
        inner = PurePosixPath(member.filename)
        kind = kind_of(inner)
        if kind is None or any(part.startswith((".", "__")) for part in inner.parts):
            left_out[inner.suffix or inner.name] += 1
        else:
            inside.append((inner.parts, _what(kind), Source(path, kind, member.compress_size, member.filename)))
    return inside


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Plain files under ``folder`` in a fixed order; what is no such file, or lies elsewhere, is counted."""
    # A hub's cache holds links to the blobs beside the snapshot.
    room = (folder.parent.parent if folder.parent.name == "snapshots" else folder).resolve()

    def unreadable(error: OSError) -> None:
        left_out[f"unreadable {shown(Path(error.filename).name)}/"] += 1

    for here, folders, files in os.walk(folder, onerror=unreadable):
        links = {name for name in folders if os.path.islink(os.path.join(here, name))}
        skipped = {name for name in folders if name.startswith(".") or name in SKIPPED_FOLDERS} - links
        left_out.update(f"{shown(name)}/" for name in skipped)
        left_out.update(["links to folders"] * len(links))
        folders[:] = sorted({*folders} - skipped - links)
        for file in (Path(here) / name for name in sorted(files)):
            if reason := _not_plain(file, room):
                left_out[reason] += 1
            else:
                yield file


def _not_plain(file: Path, room: Path) -> str:
    """Why a folder's file is not opened, or nothing."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return "pipes and devices"
    except OSError:
        return "links that lead nowhere" if file.is_symlink() else "unreadable files"
    return "links out of the folder" if file.is_symlink() and room not in file.resolve().parents else ""


def saved(folder: Path) -> dict[str, list[Source]]:
    """The files of a folder written by ``datasets``' ``save_to_disk``, by split; none if it is not one.

    Raises:
        DataError: its description cannot be read, or names what does not lie in it.
    """
    names = folder / "dataset_dict.json"
    try:
        if names.is_file():
            splits = json.loads(names.read_text(encoding="utf-8"))["splits"]
            return {str(name): _arrow_files(_inside(folder, name)) for name in splits}
        if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
            return {"": _arrow_files(folder)}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(
            f"{shown(folder)}: looks like a saved data set, but its description cannot be read: {said(error)}"
        ) from None
    return {}


def _arrow_files(folder: Path) -> list[Source]:
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return [source_of(_inside(folder, file["filename"])) for file in state["_data_files"]]


def _inside(folder: Path, name: str) -> Path:
    """The file or folder ``name`` right in ``folder``, as a data set's description names it."""
    if not isinstance(name, str) or name in ("", ".", "..") or PurePosixPath(name).name != name or "\\" in name:
        raise DataError(f"{shown(folder)}: its description names {str(name)!r}, which is no name of a file in it")
    path = folder / name
    if path.is_symlink() and folder.resolve() not in path.resolve().parents:
        raise DataError(f"{shown(path)}: the link leads out of the data set's folder")
    return path


def _what(kind: str) -> Kind:
    """Of a kind of file what ``splits`` asks for."""
    if kind in RECORDS.values():
        return "records"
    return "code" if kind in PROGRAMS else "text"
