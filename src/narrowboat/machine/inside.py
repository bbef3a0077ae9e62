"""Names that files hold (an index, a manifest, a state): each must lie within its own folder, or is refused.

A model, a checkpoint or prepared data may come from anybody. A name such as ``../../.ssh/config`` or ``/etc/passwd`` in
one of their files would have us read, or write, whatever it points to.
"""

from __future__ import annotations

from pathlib import Path, PureWindowsPath

MAX_BYTES = 255
"""Longest file name in bytes on most file systems."""


def inside(folder: Path, name: object) -> Path:
    """``folder / name``, for a name that somebody wrote into a file.

    Raises:
        ValueError: it is no name, or leads out of ``folder``; what is wrong, for a sentence that names the file.
    """
    if not isinstance(name, str) or not name or "\0" in name or len(name.encode(errors="replace")) > MAX_BYTES:
        raise ValueError(f"{name!r:.80} is no file's name")
    parts = PureWindowsPath(name).parts  # takes both kinds of slashes, and drive letters
    if PureWindowsPath(name).anchor or ".." in parts or not parts:
        raise ValueError(f"{name!r:.80} leads out of its folder")
    return folder.joinpath(*parts)
