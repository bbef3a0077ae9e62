"""What it costs to be able to step down: the governor's share of a step, and that of the copies that take one back.

    python -m benchmarks.governor --json > benchmarks/results/governor.json

SmolLM2-135M's shape with 10 layers, LoRA of rank 8, four rows of 512 tokens a step, each a micro-batch of its own, on
the CPU, under the meter. ``seconds`` is the median step's, ``governor_seconds`` what reading and deciding took of it,
``undo_seconds`` what copying weights and states took.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.systems import smollm2
from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import OptimizerOptions
from narrowboat.owner.gauge import Gauge
from narrowboat.plan import MemoryPlan
from narrowboat.training.governor import Governor
from narrowboat.training.recovery import Recovery
from narrowboat.units import GIB

ROWS, TOKENS, STEPS = 4, 512, 7


class Clock:
    """Adds up the seconds of the calls that go through it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, timed."""

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def measure(plan: MemoryPlan) -> dict[str, Any]:
    """The median of some steps, after one to warm up."""
    model = smollm2(10)
    optimizer = build_optimizer(OptimizerOptions(), model.named_parameters())
    ids = np.random.default_rng(0).integers(3, 49_000, TOKENS, dtype=np.int32)
    rows = [Row(ids, ids, (TOKENS,))] * ROWS
    found = []
    with Gauge(torch.device("cpu"), 8 * GIB) as gauge, Engine(model, optimizer, plan, 0, 1.0) as engine:
        gauge.watch_model(model)
        recovery = Recovery(engine, gauge, Governor([plan], 8 * GIB), lambda event: None)
        for step in range(STEPS + 1):
            governor, undo = Clock(), Clock()
            read = governor.around(partial(recovery.after_micro_batch, rows, step))
            remember = engine.undo.remember
            engine.undo.remember = undo.around(remember)  # type: ignore[method-assign]
            began = time.perf_counter()
            recovery.run(partial(engine.step, rows, 1e-4, step, read), rows, step)
            governor.around(recovery.after_step)(step)
            found.append((time.perf_counter() - began, governor.seconds, undo.seconds))
            engine.undo.remember = remember  # type: ignore[method-assign]
        seconds, governor_seconds, undo_seconds = (median(column) for column in zip(*found[1:], strict=True))
        return {
            "name": plan.describe(), "tokens": ROWS * TOKENS, "peak_bytes": gauge.highest_bytes, "seconds": seconds,
            "governor_seconds": governor_seconds, "undo_seconds": undo_seconds,
        }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    plans = (MemoryPlan(layers="keep"), MemoryPlan(layers="recompute"), MemoryPlan(layers="stream", tile_tokens=256))
    rows = [measure(plan) for plan in plans]
    if arguments.json:
        machine = {
            "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
            "threads": torch.get_num_threads(), "torch": torch.__version__,
        }  # fmt: skip
        print(json.dumps({"rows": rows, "machine": machine}, indent=1))
        return
    for row in rows:
        shares = (row[key] / row["seconds"] for key in ("governor_seconds", "undo_seconds"))
        print("{name}: {seconds:.2f} s a step; ".format(**row) + "governor {:.4%}, copies {:.4%}".format(*shares))


if __name__ == "__main__":
    main()
