"""A run's events, as the loop would tell them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

from narrowboat.events import (
    CheckpointSaved,
    DataReady,
    Evaluated,
    Event,
    ModelReady,
    Notice,
    PlanChosen,
    RunEnded,
    RunStarted,
    StepDone,
)
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan

GIB = 2**30

Write = Callable[[Iterable[Event]], Path]
"""Writes a session's events into the test's run folder; gives back the path of events.jsonl."""


def step_done(step: int, num_steps: int = 6, loss: float | None = None, **changes: float) -> StepDone:
    values = {
        "learning_rate": 2e-4 * step / max(1, num_steps),
        "gradient_norm": 0.5,
        "num_tokens": 2048,
        "num_supervised_tokens": 700,
        "num_micro_batches": 2,
        "seconds": 32.0,
        "peak_bytes": 5 * GIB + step,
        "budget_bytes": 8 * GIB,
    }
    return StepDone(step, num_steps, 3.0 - 0.1 * step if loss is None else loss, **{**values, **changes})


def started(folder: Path, resumed_from_step: int = 0) -> RunStarted:
    return RunStarted(str(folder), Options().model_dump(mode="json"), {"torch": "2.13.0"}, resumed_from_step)


def ended(folder: Path, step: int = 6, outcome: str = "done", **changes: object) -> RunEnded:
    values = {
        "first_heldout_loss": 2.5,
        "last_heldout_loss": 2.0,
        "adapter_folder": str(folder / "adapter"),
        "report_path": str(folder / "report.html"),
    }
    return RunEnded(outcome, step, 250.0, 12_288, 6 * GIB, 8 * GIB, **{**values, **changes})


def whole_run(
    folder: Path, num_steps: int = 6, model: str = "smollm2-135m", losses: dict[int, float] | None = None
) -> list[Event]:
    plan = MemoryPlan(layers="stream")
    forecast = {"base_weights": 3 * GIB, "layer_inputs": 2 * GIB, "tile": 512 * 2**20}
    account = {
        "num_documents": 48,
        "tokens_in": 1_234_567,
        "learnt_tokens": 308_641,
        "masked_tokens": 925_926,
        "broken": [["train.jsonl, line 17", "not JSON"], ["train.jsonl, line 40", "empty"]],
        "num_broken": 2,
        "lengths": {2048: 7},
    }
    return [
        started(folder),
        DataReady(account),
        ModelReady(model, 139_400_064, 4_884_480, "bfloat16", "cpu", {"q_proj": 30, "v_proj": 30}),
        PlanChosen(plan.model_dump(), plan.describe(), 8 * GIB, forecast, 4096),
        Notice("2 records were dropped: lines 17 and 40 of train.jsonl."),
        Evaluated(0, 2.5, 900, 4.0),
        *(step_done(step, num_steps, (losses or {}).get(step)) for step in range(1, num_steps + 1)),
        Evaluated(num_steps, 2.0, 900, 4.0),
        CheckpointSaved(num_steps, str(folder / "checkpoints/step-000006"), 59_000_000, 1.5),
        ended(folder, num_steps),
    ]


def strange_run(folder: Path) -> list[Event]:
    """Whatever a loop could tell at its worst."""
    return [
        started(folder),
        DataReady({}),
        ModelReady("\x1b[31m<script>alert(1)</script>\n模型", 0, 0, "", "", {}),
        PlanChosen({}, "", 0, {}, 0),
        Evaluated(0, math.nan, 0, 0.0),
        step_done(1, 0, math.nan, gradient_norm=math.inf, seconds=0.0, budget_bytes=0, peak_bytes=0),
        step_done(2, 0, -math.inf, gradient_norm=math.nan, num_tokens=0),
        RunEnded("failed", 2, 0.0, 0, 0, 0, math.nan, math.inf, error="out of\nmemory"),
    ]
