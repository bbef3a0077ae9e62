"""What grows: memory over many steps, and time over data that are large in one way each."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from narrowboat import api
from narrowboat.events import StepDone
from narrowboat.machine.hardware import process_memory
from narrowboat.monitor.recorders import JsonLines
from tests.harm.place import Place, session

WORDS = "the quick brown fox jumps over a lazy dog and thinks of something else entirely"


@dataclass(frozen=True)
class Soaked:
    """What the process held that nobody can take back, around a tenth of the steps and at the end."""

    steps: int
    early_bytes: int
    late_bytes: int

    @property
    def growth(self) -> float:
        """As a share of the first."""
        return self.late_bytes / self.early_bytes - 1


def soak(place: Place, num_steps: int) -> Soaked:
    """Train with a save every tenth step and an evaluation every fiftieth; medians over a tenth of the steps."""
    place.steps = num_steps
    readings: dict[int, int] = {}
    own = JsonLines.record

    def record(self: JsonLines, event: Any) -> None:
        own(self, event)
        if isinstance(event, StepDone):
            readings[event.step] = process_memory().anonymous_bytes

    JsonLines.record = record  # type: ignore[method-assign]
    try:
        api.train(place.options("soak", {"train.save_every": 10, "train.evaluate_every": 50}), quiet=True)
    finally:
        JsonLines.record = own  # type: ignore[method-assign]
    early, late = (
        [size for step, size in readings.items() if abs(step - middle) <= num_steps // 20]
        for middle in (num_steps // 10, num_steps)
    )
    return Soaked(num_steps, int(median(early)), int(median(late)))


def sizes(place: Place) -> list[dict[str, Any]]:
    """Two steps over each of the large data sets."""
    found = []
    for name, path in _large_data(place.folder):
        place.data["dialogues"] = path
        began = time.monotonic()
        code, said = session(
            lambda: api.train(place.options(f"of {path.name}", {"train.steps": 2}), quiet=True)  # noqa: B023
        )
        found.append({"name": name, "exit_code": code, "seconds": time.monotonic() - began, "said": said[-300:]})
    return found


def _large_data(folder: Path) -> Iterator[tuple[str, Path]]:
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join(rng.choices(WORDS.split(), k=count))

    lines = folder / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"{i} {words(20)}"}) + "\n" for i in range(100_000)))
    yield "100,000 lines", lines
    long = folder / "long.txt"
    long.write_text("\n\n".join(f"{words(200)}." for _ in range(15_000)))
    yield "a document of 3 million tokens", long
    many = folder / "many"
    many.mkdir()
    for i in range(10_000):
        (many / f"{i:05}.txt").write_text(words(30))
    yield "10,000 small files", many
