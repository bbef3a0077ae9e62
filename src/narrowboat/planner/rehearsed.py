"""Points of curves, rehearsed when they are asked for and kept in the user's cache for the next question.

What is kept goes by everything that it follows from: the model's shapes, adapter, optimizer, number formats, the
libraries' versions and Narrowboat's own source. A point takes about a second; one that is kept, nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from narrowboat.machine.caches import cache_folder, make_private
from narrowboat.machine.json_files import read_json
from narrowboat.plan import MemoryPlan
from narrowboat.planner.curves import KNOTS, STEP, Facts, Point, key_of, point_of
from narrowboat.planner.forecast import Forecaster, Workload

Say = Callable[[str], None]
LIBRARIES = ("torch", "transformers", "peft", "torchao", "bitsandbytes", "pytorch_optimizer")


class Rehearsed:
    """The points of one workload.

    Args:
        work: the model with its adapter and optimizer.
        say: hears of each rehearsal before it begins.
        kept: the file that holds earlier ones; None keeps nothing.
    """

    def __init__(
        self, work: Workload, say: Callable[[str], None] = lambda text: None, kept: Path | None = None
    ) -> None:
        self._work, self._say, self._path = work, say, kept
        self._forecaster: Forecaster | None = None
        self._kept = _read(kept)
        if "facts" not in self._kept:
            self._kept = {"facts": asdict(facts_of(self._rehearse())), "points": {}}
        self.facts = Facts(**self._kept["facts"])

    def has(self, num_tokens: int) -> bool:
        """Short rows are rehearsed as they are."""
        return num_tokens < 2 * KNOTS[0]

    def at(self, kind: str, plan: MemoryPlan, num_tokens: int) -> Point:
        """The amounts of ``plan`` for a row of ``num_tokens``."""
        points: dict[str, Point] = self._kept["points"]
        key = f"{kind} {num_tokens} {key_of(plan)}"
        if key not in points:
            self._say(f"Rehearsing {num_tokens:,} tokens: {plan.describe()}")
            forecaster = self._rehearse()
            is_step = kind == STEP
            points[key] = (
                point_of(forecaster.forecast(plan, num_tokens)) if is_step else forecaster.phases(plan, num_tokens)
            )
            self._keep()
        return points[key]

    def _rehearse(self) -> Forecaster:
        if self._forecaster is None:
            self._forecaster = Forecaster(self._work)
        return self._forecaster

    def _keep(self) -> None:
        if self._path is None:
            return
        try:
            make_private(self._path.parent)
            draft = self._path.with_suffix(".draft")
            draft.write_text(json.dumps(self._kept), encoding="utf-8")
            draft.replace(self._path)
        except OSError:
            pass  # rehearsed again next time


def facts_of(forecaster: Forecaster) -> Facts:
    """What curves have to know of the model."""
    return Facts(forecaster.num_layers, forecaster.layer_bytes, forecaster.refused)


def kept_for(work: Workload) -> Path:
    """The file of ``work``'s points in the user's cache."""
    options = work.options
    follows = {
        "config": {k: v for k, v in work.config.to_dict().items() if not k.startswith("_")},
        "lora": options.lora.model_dump(),
        "optimizer": options.optimizer.model_dump(),
        "quantize": options.model.quantize,
        "formats": [str(work.dtype), str(work.stored), work.card, work.trains],
        "source": _source_digest(),
        "libraries": {name: _version(name) for name in LIBRARIES},
    }
    digest = xxhash.xxh3_128_hexdigest(json.dumps(follows, sort_keys=True, default=str).encode())
    return cache_folder() / "plans" / f"{digest}.json"


@cache
def _source_digest() -> str:
    """A digest of every file of this package, because a forecast runs its code."""
    digest = xxhash.xxh3_128()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found.get("points"), dict) and set(found.get("facts", ())) == _FACTS else {}


_FACTS = set(Facts.__dataclass_fields__)
