"""float16 with and without loss scaling beside float32: 200 steps of real text, each a part of a very long step batch.

    python -m benchmarks.halves                     into benchmarks/results/halves.{json,md,svg}
    python -m benchmarks.halves --json              to the screen

In a step batch of 262,144 tokens a token's share of the loss is 1/262,144, and so small are the gradients that flow
through the layers. Here a step goes through one micro-batch of it, a row of a few dozen tokens, whose loss is divided
by the whole batch's tokens: what float16 loses there it loses in every micro-batch. AdamW's step does not depend on the
gradient's size (its epsilon is taken as much smaller), so the curves are those of ordinary training. The model is
SmolLM2-135M, whole; rates rise and fall as in a run.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.plot import Line, chart
from benchmarks.states import CPU, RESULTS, real_rows
from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine
from narrowboat.engine.scaling import LossScale
from narrowboat.machine.precision import choose_precision
from narrowboat.model.adapters import adapt
from narrowboat.model.base import hush_transformers, load_base
from narrowboat.model.embedded import NAME
from narrowboat.optimizers.build import build_optimizer
from narrowboat.optimizers.schedule import learning_rate
from narrowboat.options.schema import LoraOptions, ModelOptions, OptimizerOptions
from narrowboat.plan import MemoryPlan

BATCH_TOKENS = 262_144
SMOOTHED_STEPS = 20
SYSTEMS: dict[str, tuple[Any, bool]] = {
    "float32": ("float32", False),
    "float16, scaled": ("float16", True),
    "float16, plain": ("float16", False),
}
OPTIONS = OptimizerOptions(lr=5e-4, eps=1e-12)


class Part(Row):
    """A row that is one of many in a step batch of ``BATCH_TOKENS`` tokens."""

    @property
    def num_supervised(self) -> int:
        return BATCH_TOKENS


@dataclass
class Curve:
    """A system's losses, a step each."""

    name: str
    losses: list[float]
    num_skipped: int
    seconds: float

    def smooth(self) -> NDArray[np.float64]:
        """Means over ``SMOOTHED_STEPS`` steps."""
        return np.convolve(self.losses, np.ones(SMOOTHED_STEPS) / SMOOTHED_STEPS, "valid")


def train(name: str, rows: list[Row]) -> Curve:
    """A step for each row."""
    dtype, is_scaled = SYSTEMS[name]
    base, _ = load_base(ModelOptions(name=NAME), choose_precision(dtype, CPU), CPU, lambda event: None)
    torch.manual_seed(0)
    model = adapt(base, LoraOptions(), lambda event: None).model
    optimizer = build_optimizer(OPTIONS, model.named_parameters())
    scale = LossScale(2.0**16, 100) if is_scaled else None
    curve = Curve(name, [], 0, 0.0)
    began = time.process_time()
    with Engine(model, optimizer, MemoryPlan(layers="keep", chunk_tokens=64), 0, 0.0, scale=scale) as engine:
        for step, row in enumerate(rows):
            rate = learning_rate(OPTIONS, step + 1, len(rows))
            outcome = engine.step([row], rate, step)
            while outcome.was_skipped and is_scaled:  # the same row again, as the loop does
                curve.num_skipped += 1
                outcome = engine.step([row], rate, step)
            curve.num_skipped += outcome.was_skipped
            curve.losses.append(float(outcome.loss) * BATCH_TOKENS / (row.num_tokens - 1))
    curve.seconds = (time.process_time() - began) / len(rows)
    return curve


def apart(curve: Curve, exact: Curve) -> float:
    """How far ``curve`` ever is from ``exact``, both smoothed, over ``exact``."""
    return float(np.abs(curve.smooth() / exact.smooth() - 1).max())


def write(curves: list[Curve], command: str, result: dict[str, Any]) -> None:
    """The three files of the results."""
    exact = curves[0]
    lines = [
        "| system | first 20 steps | last 20 steps | never further from float32 than | steps skipped |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {c.name} | {c.smooth()[0]:.3f} | {c.smooth()[-1]:.3f} | {apart(c, exact):.2%} | {c.num_skipped} |"
            for c in curves
        ),
    ]
    about = (
        f"`{command}`: SmolLM2-135M, rank 16, each step a micro-batch of a step batch of {BATCH_TOKENS:,} tokens; "
        f"losses are means over {SMOOTHED_STEPS} steps."
    )
    text = "\n".join(
        ["# float16 with and without loss scaling", "", about, "", *lines, "", "![curves](halves.svg)", ""]
    )
    points = [
        Line(c.name, [(i + SMOOTHED_STEPS, float(y)) for i, y in enumerate(c.smooth()) if i % 20 == 0]) for c in curves
    ]
    (RESULTS / "halves.md").write_text(text, encoding="utf-8")
    (RESULTS / "halves.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "halves.svg").write_text(chart([("Loss by step", points)], "step"), encoding="utf-8")


def main() -> None:
    """All systems, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    hush_transformers()
    rows: list[Row] = [Part(r.input_ids, r.labels, r.lengths) for r in real_rows(given.tokens, given.steps)]
    curves = []
    for name in SYSTEMS:
        curves.append(train(name, rows))
        if not given.json:
            print(
                f"{name}: {apart(curves[-1], curves[0]):.2%} from float32, {curves[-1].seconds:.2f} s a step",
                flush=True,
            )
    readings = [
        {"name": c.name, "tokens": given.tokens, "steps": given.steps, "seconds": c.seconds,
         "furthest_from_float32": apart(c, curves[0]), "num_skipped": c.num_skipped, "losses": c.losses}
        for c in curves
    ]  # fmt: skip
    machine = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    result = {"rows": readings, "machine": machine}
    if given.json:
        print(json.dumps(result))
    else:
        command = f"python -m benchmarks.halves --steps {given.steps} --tokens {given.tokens}"
        Path(RESULTS).mkdir(exist_ok=True)
        write(curves, command, result)


if __name__ == "__main__":
    main()
