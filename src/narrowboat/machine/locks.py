"""Locks between processes: a place that one fills while others wait, or that one has to itself and others are refused.

The system lets go of a lock when its process ends, however that happens: a killed process holds up nobody.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

LOCK, HOLDER = ".lock", ".lock.json"


class HeldError(Exception):
    """Another process has the place; says which, where and since when."""


@contextmanager
def waiting(lock: Path) -> Iterator[None]:
    """No other process is inside with the same file ``lock`` meanwhile.

    Raises:
        OSError: the file cannot be made or written.
    """
    with FileLock(lock):
        yield


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """This process has ``folder``, which is there, to itself.

    Raises:
        HeldError: another process has it.
        OSError: it cannot be written.
    """
    lock, holder = FileLock(folder / LOCK, timeout=0), folder / HOLDER
    try:
        lock.acquire()
    except Timeout:
        raise HeldError(_words_of(holder)) from None
    try:
        me = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        holder.write_text(json.dumps(me), encoding="utf-8")
        yield
    finally:  # the lock's file stays: who opened it before it went would lock another than who comes after
        with suppress(OSError):  # of a disk that can no longer be written: the lock is what counts
            holder.unlink(missing_ok=True)
        lock.release()


def _words_of(holder: Path) -> str:
    try:
        found = json.loads(holder.read_text(encoding="utf-8"))
        return f"process {found['process']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
