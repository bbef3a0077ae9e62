"""The ladder: memory plans from fastest to thriftiest, as data.

A rung says what it changes of the rung before it. ``away`` stands for where things go that leave the device: host
memory beside a card; on a CPU, whose device is host memory, the scratch file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Literal

from narrowboat.plan import MemoryPlan, Place

Wanted = Literal["auto", "keep", "recompute", "stream"]

RUNGS: tuple[dict[str, Any], ...] = (
    {"layers": "keep", "chunk_tokens": 512},
    {"layers": "stream", "tile_tokens": 1024, "keep_keys_values": True},
    {"layers": "recompute", "keep_keys_values": False},
    {"layers": "stream"},
    {"tile_tokens": 512, "chunk_tokens": 256},
    {"inputs": "away", "keep_keys_values": True},
    {"keep_keys_values": False},
    {"weights": "away"},
    {"tile_tokens": 256, "chunk_tokens": 128},
    {"inputs": "disk"},
    {"tile_tokens": 64, "chunk_tokens": 32},
    {"weights": "disk"},
    {"input_stride": 4},
)


def ladder(on_card: bool, refused: Collection[str] = (), wanted: Wanted = "auto") -> Iterator[MemoryPlan]:
    """The rungs for a card or for a CPU; only those whose layers are ``wanted`` if that is not auto.

    Args:
        on_card: whether host memory is another memory than the device's.
        refused: what layers may not do, since the model would not be right.
        wanted: as ``memory.plan`` has it.
    """
    away: Place = "host" if on_card else "disk"
    settings: dict[str, Any] = {}
    last = None
    for rung in RUNGS:
        settings |= {name: away if value == "away" else value for name, value in rung.items()}
        plan = MemoryPlan(**settings)
        skipped = plan.layers in refused or wanted not in ("auto", plan.layers)
        if not skipped and plan != last:
            last = plan
            yield plan
