"""The user's cache folder, and how one process fills a folder in it while others wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path


def cache_folder() -> Path:
    """``NARROWBOAT_CACHE``, or the platform's cache folder of this user."""
    return Path(os.environ.get("NARROWBOAT_CACHE") or user_cache_path("narrowboat")).expanduser()


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """No other process fills ``folder`` meanwhile; its parents are made. A process that dies holds up nobody.

    Raises:
        OSError: the folder's parents cannot be made or written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        yield
