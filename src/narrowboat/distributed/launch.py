"""Starts the processes of a run on this machine: ``narrowboat train --parallel.data 4``.

Over several machines torchrun starts them. Signals are passed on to all of them, who agree on what follows. When one
ends with an error the others hear of it by themselves; whoever does not is ended after a minute.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from narrowboat.errors import RankError

GRACE_SECONDS = 60.0
"""For the others to end by themselves, when one has."""

POLL_SECONDS = 0.1
PASSED_ON = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


def is_one_of_several(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process."""
    return "RANK" in environment


def is_follower(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether another process of the run does the talking."""
    return environment.get("RANK", "0") != "0"


def run(num: int, arguments: Sequence[str]) -> int:
    """``python -m narrowboat`` with ``arguments``, ``num`` times; the exit code of the first that failed, else 0."""
    command = [sys.executable, "-m", "narrowboat", *arguments]
    port = _free_port()
    processes = [
        subprocess.Popen(command, env=_environment(rank, num, port), stdout=None if rank == 0 else subprocess.DEVNULL)
        for rank in range(num)
    ]
    with _passing_on(processes):
        return _code(processes)


def _code(processes: Sequence[subprocess.Popen[Any]]) -> int:
    failed, until = 0, float("inf")
    while any(process.poll() is None for process in processes):
        codes = [process.returncode for process in processes if process.returncode]
        if codes and not failed:
            failed, until = codes[0], time.monotonic() + GRACE_SECONDS
        if time.monotonic() > until:
            for process in processes:
                process.kill()
        time.sleep(POLL_SECONDS)
    failed = failed or next((process.returncode for process in processes if process.returncode), 0)
    killed = [(rank, -process.returncode) for rank, process in enumerate(processes) if process.returncode < 0]
    if killed and killed[0][1] not in (signal.SIGINT, signal.SIGTERM):
        rank, number = killed[0]
        raise RankError(f"Process {rank} of {len(processes)} was ended by {signal.Signals(number).name}.", "lost")
    return 128 - failed if failed < 0 else failed


def _environment(rank: int, num: int, port: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // num)
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num, "MASTER_PORT": port}
    return (
        {"OMP_NUM_THREADS": str(threads)}
        | os.environ
        | {name: str(value) for name, value in ours.items()}
        | {"MASTER_ADDR": "127.0.0.1"}
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def _passing_on(processes: Sequence[subprocess.Popen[Any]]) -> Iterator[None]:
    """A terminal's Ctrl-C reaches all of them without us."""

    def pass_on(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
