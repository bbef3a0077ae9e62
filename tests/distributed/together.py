"""Runs a function in several processes that find each other as torchrun's would; what they return comes back."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 200


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def new_port() -> None:
    """Let the next meeting of these processes be at another place: ``PORTS`` were free when they started."""
    ports = os.environ["PORTS"].split(",")
    os.environ["MASTER_PORT"], os.environ["PORTS"] = ports[0], ",".join(ports[1:])


def together(num: int, function: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """``function(*args)`` in ``num`` processes: what each returned, or the exception that it raised."""
    ports = ",".join(str(free_port()) for _ in range(12))
    (folder / "call").write_bytes(pickle.dumps((function.__module__, function.__name__, args)))
    processes = []
    for rank in range(num):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num), "LOCAL_WORLD_SIZE": str(num),
            "MASTER_ADDR": "127.0.0.1", "PORTS": ports, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        processes.append(subprocess.Popen([sys.executable, "-m", __name__, str(folder)], env=environment))
    try:
        for process in processes:
            process.wait(LIMIT_SECONDS)
    finally:
        for process in processes:
            process.kill()
    found = [folder / f"result{rank}" for rank in range(num)]
    return [pickle.loads(path.read_bytes()) if path.exists() else None for path in found]


def main() -> None:
    """One of them."""
    folder = Path(sys.argv[1])
    module, name, args = pickle.loads((folder / "call").read_bytes())
    try:
        result = getattr(__import__(module, fromlist=[name]), name)(*args)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    (folder / f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may end a process that winds down (torch 2.13)


if __name__ == "__main__":
    main()
