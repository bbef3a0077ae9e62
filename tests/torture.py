"""Torture: what a run has to survive, for as long as you like. ``tests/test_torture.py`` is the short form.

    python -m tests.torture --kills 200 --faults --limits --sizes --soak 1000

``--kills N``: so many kills aimed at saving, loading, stepping, evaluating and leaving (``harm/kills.py``).
``--faults``: every single write fails once, and once with all that follow (``harm/faults.py``).
``--limits``: too little memory, disk, rights (``harm/limits.py``). ``--sizes``: 100,000 lines, a document of 3 million
tokens, 10,000 small files. ``--soak N``: memory after so many steps against a tenth of them (``harm/growth.py``).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from narrowboat.units import format_bytes, format_seconds

from .harm.faults import faults
from .harm.growth import sizes, soak
from .harm.kills import kills
from .harm.limits import limits
from .harm.place import Place

MOST_GROWTH = 0.03


def main(arguments: list[str] | None = None) -> int:
    """Do what is asked for; 0 if all of it went well."""
    given = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    began, tried = time.monotonic(), []
    if given.kills:
        tried.append(_in_a_place("kills", lambda place: _killed(place, given.kills, given.seed)))
    if given.faults is not None:
        tried.append(_in_a_place("faults", lambda place: _faulty(place, given.faults, given.seed)))
    if given.limits:
        tried.append(_in_a_place("limits", _limited))
    if given.sizes:
        tried.append(_in_a_place("sizes", _sized))
    if given.soak:
        tried.append(_in_a_place("soak", lambda place: _soaked(place, given.soak)))
    print(f"{'well' if all(tried) else 'NOT WELL'} after {format_seconds(time.monotonic() - began)}")
    return 0 if all(tried) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, metavar="N")
    parser.add_argument("--faults", type=int, nargs="?", const=0, metavar="N", help="so many instead of all")
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--soak", type=int, default=0, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _killed(place: Place, num: int, seed: int) -> tuple[bool, Any]:
    result = kills(place, num, seed, _say)
    return not result.wrong, asdict(result) | {"total": result.total}


def _faulty(place: Place, num: int, seed: int) -> tuple[bool, Any]:
    result = faults(place, num or None, seed, _say)
    return not result.wrong, asdict(result)


def _limited(place: Place) -> tuple[bool, Any]:
    found = limits(place)
    return all(one.is_well for one in found), [asdict(one) for one in found]


def _sized(place: Place) -> tuple[bool, Any]:
    found = sizes(place)
    return all(one["exit_code"] == 0 for one in found), found


def _soaked(place: Place, num_steps: int) -> tuple[bool, Any]:
    found = soak(place, num_steps)
    words = f"{format_bytes(found.early_bytes)} -> {format_bytes(found.late_bytes)}, {found.growth:+.2%}"
    return found.growth <= MOST_GROWTH, asdict(found) | {"words": words}


def _in_a_place(name: str, work: Callable[[Place], tuple[bool, Any]]) -> bool:
    with tempfile.TemporaryDirectory(prefix=f"torture-{name}-") as folder:
        is_well, found = work(Place.made(Path(folder)))
    print(f"{name}: {json.dumps(found, indent=1)}", flush=True)
    return is_well


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
