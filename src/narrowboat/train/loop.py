"""The loop: when to step, evaluate, save and stop. How a step is made is the engine's affair.

The order of the data, the learning rate and the dropout of a step follow from its number, so a run that was stopped
and resumed is the same run, to the last bit on a CPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from narrowboat.data.batches import StepSchedule
from narrowboat.data.store import Rows
from narrowboat.data.trains import TrainSchedule
from narrowboat.engine.engine import Engine, Outcome
from narrowboat.errors import Interrupted, ModelError
from narrowboat.events import CheckpointSaved, Evaluated, StepDone, Tell
from narrowboat.memory.gauge import Gauge
from narrowboat.model.adapters import idle_adapters
from narrowboat.optimizers.schedule import learning_rate
from narrowboat.options.schema import Options
from narrowboat.train.checkpoint import Position, save_checkpoint
from narrowboat.train.signals import StopRequest
from narrowboat.train.skipping import after_bad_step

EVALUATED_ROWS = 64
"""Held-out rows that are read and grouped together."""


@dataclass(frozen=True)
class Course:
    """What a run goes through: its rows, their order, and how many steps."""

    rows: Rows
    heldout: Rows
    schedule: StepSchedule | TrainSchedule
    num_steps: int


def run(
    engine: Engine, course: Course, options: Options, gauge: Gauge, position: Position, folder: Path, tell: Tell
) -> tuple[Position, float | None]:
    """Go from ``position`` to the last step; the position then, and the last held-out loss.

    Args:
        engine: entered, with an optimizer.
        course: the data.
        options: the run's.
        gauge: entered.
        position: where to begin; all zero for a new run.
        folder: for the checkpoints.
        tell: hears what happens.

    Raises:
        Interrupted: after a signal, when the step in progress is saved.
        ModelError: when an adapter did not move in the first step, or too many steps in a row were skipped.
    """
    train = options.train
    if engine.scale is not None and position.scale:
        engine.scale.value, engine.scale.num_good = position.scale["value"], int(position.scale["num_good"])
    last_loss: float | None = None
    with StopRequest() as stop:
        if position.step == 0:
            last_loss = _evaluate(engine, course, position.step, tell)
            position = replace(position, first_heldout_loss=last_loss)
        while position.step < course.num_steps and not stop.received:
            num_done = position.step
            position = _step(engine, course, options, gauge, position, tell)
            if position.step == num_done:
                continue
            step, is_last = position.step, position.step == course.num_steps
            if is_last or (train.evaluate_every and step % train.evaluate_every == 0):
                last_loss = _evaluate(engine, course, step, tell)
            if is_last or (train.save_every and step % train.save_every == 0):
                _save(engine, position, folder, options, tell)
        if position.step < course.num_steps:
            raise Interrupted(stop.received, _save(engine, position, folder, options, tell).folder)
    return position, last_loss


def _step(engine: Engine, course: Course, options: Options, gauge: Gauge, position: Position, tell: Tell) -> Position:
    step = position.step + 1
    began = time.monotonic()
    gauge.reset_peak()
    rows = [course.rows[i] for i in course.schedule[position.step + position.num_passed_over]]
    rate = learning_rate(options.optimizer, step, course.num_steps)
    outcome = engine.step(rows, rate, seed=_step_seed(options.train.seed, step))
    if outcome.was_skipped:
        return after_bad_step(engine, outcome, position, options.optimizer.max_skipped, tell)
    loss = float(outcome.loss)
    _check(engine, outcome, step, rate)
    tell(
        StepDone(
            step=step,
            num_steps=course.num_steps,
            loss=loss,
            learning_rate=rate,
            gradient_norm=float(outcome.gradient_norm),
            num_tokens=outcome.num_tokens,
            num_supervised_tokens=outcome.num_supervised,
            num_micro_batches=outcome.num_micro_batches,
            seconds=time.monotonic() - began,
            peak_bytes=gauge.peak_bytes(),
            budget_bytes=gauge.budget_bytes,
            num_skipped=position.num_skipped,
        )
    )
    return replace(
        position,
        step=step,
        num_tokens=position.num_tokens + outcome.num_tokens,
        plan=engine.plan.model_dump(),
        num_bad_in_a_row=0,
    )


def _check(engine: Engine, outcome: Outcome, step: int, rate: float) -> None:
    if step == 1 and rate > 0 and outcome.num_supervised and (idle := idle_adapters(engine.model)):
        raise ModelError(
            f"{len(idle)} adapters got no gradient in step 1, the first is {idle[0]}; nothing would be learnt there."
        )


def _evaluate(engine: Engine, course: Course, step: int, tell: Tell) -> float | None:
    if not len(course.heldout):
        return None
    began = time.monotonic()
    total, num_supervised = 0.0, 0
    for start in range(0, len(course.heldout), EVALUATED_ROWS):
        numbers = range(start, min(start + EVALUATED_ROWS, len(course.heldout)))
        loss, num = engine.evaluate([course.heldout[i] for i in numbers])
        total, num_supervised = total + loss, num_supervised + num
    if not num_supervised:
        return None
    tell(Evaluated(step, total / num_supervised, num_supervised, time.monotonic() - began))
    return total / num_supervised


def _save(engine: Engine, position: Position, folder: Path, options: Options, tell: Tell) -> CheckpointSaved:
    assert engine.optimizer is not None
    if engine.scale is not None:
        position = replace(position, scale={"value": engine.scale.value, "num_good": engine.scale.num_good})
    carry = None if engine.carrying is None else engine.carrying.state_dict()
    saved = save_checkpoint(folder, position, engine.model, engine.optimizer, options.train.keep_checkpoints, carry)
    tell(saved)
    return saved


def _step_seed(seed: int, step: int) -> int:
    return (seed << 32) + step
