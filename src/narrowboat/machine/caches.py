"""The user's cache folder, and how one process fills a folder in it while others wait. What is made here is private."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from narrowboat.machine.locks import waiting


def cache_folder() -> Path:
    """``NARROWBOAT_CACHE``, or the platform's cache folder of this user."""
    return Path(os.environ.get("NARROWBOAT_CACHE") or user_cache_path("narrowboat")).expanduser()


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """No other process fills ``folder`` meanwhile; its parents are made. A process that dies holds up nobody, and what
    it left of ``folder`` is removed.

    Raises:
        OSError: the folder's parents cannot be made or written.
    """
    make_private(folder.parent)
    with waiting(folder.with_name(f"{folder.name}.lock")):
        for left in folder.parent.glob(f".{folder.name}-????????"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def make_private(folder: Path) -> None:
    """Make ``folder`` and its missing parents for nobody but this user; what is there stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    for place in reversed([folder, *folder.parents]):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)
