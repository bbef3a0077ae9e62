"""Folders: the plain files of a folder, a zip archive or a saved data set, and nothing outside of it.

Links out of the folder, pipes, devices and unreadable files are left out and counted. A data set's description can only
name files in its own folder.
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
    """The files of a folder or an archive, or one file; None where there is none.

    Args:
        path: a folder or file.
        left_out: counts what is not read: files by suffix or reason, folders by name.
        is_named: the user named this file, so an unknown kind of file is refused.

    Raises:
        DataError: it is not a file or folder, is of an unknown kind, or is a damaged archive.
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
    """One file, or the files of a zip archive."""
    kind = kind_of(path)
    if kind is not None and not path.name.startswith("."):
        return [((shown(path.name),), _what(kind), source_of(path))]
    if path.suffix.lower() != ARCHIVE:
        left_out[path.suffix or path.name] += 1
        return []
    try:
        found = members(path)
    except DataError:  # reported when it is read
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
    """Plain files under ``folder`` in a fixed order; other entries, and links out of it, are counted."""
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
    """Why a file in a folder is not opened; empty if it may be opened."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return "pipes and devices"
    except OSError:
        return "links that lead nowhere" if file.is_symlink() else "unreadable files"
    return "links out of the folder" if file.is_symlink() and room not in file.resolve().parents else ""


def saved(folder: Path) -> dict[str, list[Source]]:
    """The files of a folder that ``save_to_disk`` of ``datasets`` wrote, by split; empty for other folders.

    Raises:
        DataError: its description cannot be read, or names a file outside of the folder.
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
    """The file or folder ``name`` directly in ``folder``, as a data set's description names it."""
    if not isinstance(name, str) or name in ("", ".", "..") or PurePosixPath(name).name != name or "\\" in name:
        raise DataError(f"{shown(folder)}: its description names {str(name)!r}, which is not the name of a file in it")
    path = folder / name
    if path.is_symlink() and folder.resolve() not in path.resolve().parents:
        raise DataError(f"{shown(path)}: the link leads out of the data set's folder")
    return path


def _what(kind: str) -> Kind:
    """The kind of a file, as ``splits`` needs it."""
    if kind in RECORDS.values():
        return "records"
    return "code" if kind in PROGRAMS else "text"
