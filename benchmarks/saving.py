"""What saving costs a run: the time for which the next step waits, and how much slower a step beside the writing is.

    python -m benchmarks.saving --json

SmolLM2-135M, bfloat16, LoRA of rank 16 on all linear layers under AdamW, on real text, saved after every fourth step:
steps with a checkpoint on its way and steps without one take turns in one run. ``waiting_seconds`` is what the
loop's own thread spends on a save: looking for room, copying, and waiting for the one before if it is not on disk yet.
``slower_seconds`` is the median of steps beside which a checkpoint was written, less that of the others. Both are
divided by the steps from one save to the next.
"""

from __future__ import annotations

import argparse
import email
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.tables import machine
from narrowboat import api
from narrowboat.events import CheckpointSaved, StepDone
from narrowboat.monitor.recorders import JsonLines
from narrowboat.options.load import load
from narrowboat.training.saver import Saver

EVERY = 4
USUAL = 100
"""Steps between two checkpoints, if nobody says otherwise."""


@dataclass
class Watched:
    """Seconds of each save on the loop's own thread, of steps that followed one, and of the other steps."""

    waiting: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    checkpoint_bytes: int = 0


@contextmanager
def watching() -> Iterator[Watched]:
    """Inside, runs are watched."""
    watched, has_saved = Watched(), False
    save, look, record = Saver.save, Saver.look, JsonLines.record

    def timed_save(saver: Saver, *args: Any, **kwargs: Any) -> None:
        nonlocal has_saved
        began = time.perf_counter()
        save(saver, *args, **kwargs)
        watched.waiting.append(time.perf_counter() - began)
        has_saved = True

    def timed_look(saver: Saver) -> None:
        began = time.perf_counter()
        look(saver)
        if watched.waiting:
            watched.waiting[-1] += time.perf_counter() - began

    def hear(lines: JsonLines, event: Any) -> None:
        nonlocal has_saved
        if isinstance(event, StepDone):
            (watched.beside if has_saved else watched.others).append(event.seconds)
            has_saved = False
        elif isinstance(event, CheckpointSaved):
            watched.checkpoint_bytes = event.num_bytes
        record(lines, event)

    with (
        patch.object(Saver, "save", timed_save),
        patch.object(Saver, "look", timed_look),
        patch.object(JsonLines, "record", hear),
    ):
        yield watched


def measure(num_steps: int, tokens: int) -> dict[str, Any]:
    """One run of ``num_steps``."""
    with tempfile.TemporaryDirectory() as folder, watching() as watched:
        options = load(None, {
            "model.dtype": "bfloat16", "model.device": "cpu", "lora.rank": 16, "data.max_tokens": tokens,
            "data.train": str(Path(email.__file__).parent), "data.heldout_share": 0, "data.cache": f"{folder}/data",
            "memory.budget": "4GiB", "train.folder": f"{folder}/run", "train.steps": num_steps,
            "train.batch_tokens": tokens, "train.save_every": EVERY,
        })  # fmt: skip
        api.train(options, quiet=True)
    step, slower = median(watched.others[1:]), median(watched.beside) - median(watched.others[1:])
    waiting = median(watched.waiting[:-1])  # the last one is on disk before the run ends
    return {
        "name": "SmolLM2-135M, rank 16, AdamW", "tokens": tokens, "seconds": step, "waiting_seconds": waiting,
        "slower_seconds": slower, "checkpoint_bytes": watched.checkpoint_bytes, "num_saves": len(watched.waiting),
        "share": {str(every): (waiting + max(0.0, slower)) / (every * step) for every in (10, USUAL)},
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    row = measure(given.steps, given.tokens)
    if given.json:
        print(json.dumps({"rows": [row], "machine": machine()}, indent=1))
        return
    print(
        "{name}: {seconds:.2f} s a step of {tokens} tokens; a save waits {waiting_seconds:.3f} s, the step beside it "
        "takes {slower_seconds:+.3f} s".format(**row)
    )
    print("; ".join(f"saved every {every} steps: {share:.2%} of the time" for every, share in row["share"].items()))


if __name__ == "__main__":
    main()
