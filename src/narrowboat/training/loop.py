"""The loop: when to step, evaluate, save and stop. How a step is made is the engine's affair.

The order of the data, the learning rate and the dropout of a step follow from its number, so a run that was stopped
and resumed is the same run, to the last bit on a CPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from narrowboat.data.batches import StepSchedule
from narrowboat.data.store import Rows
from narrowboat.data.trains import TrainSchedule
from narrowboat.engine.engine import Engine, Outcome
from narrowboat.errors import Interrupted, ModelError
from narrowboat.events import CheckpointSaved, Evaluated, StepDone, Tell
from narrowboat.model.adapters import idle_adapters
from narrowboat.optimizers.schedule import learning_rate
from narrowboat.options.schema import Options
from narrowboat.training.checkpoint import Position, save_checkpoint
from narrowboat.training.recovery import Recovery
from narrowboat.training.signals import StopRequest
from narrowboat.training.skipping import after_bad_step

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
    recovery: Recovery, course: Course, options: Options, position: Position, folder: Path, tell: Tell
) -> tuple[Position, float | None]:
    """Go from ``position`` to the last step; the position then, and the last held-out loss.

    Args:
        recovery: with an engine that is entered and has an optimizer, and a gauge that is entered.
        course: the data.
        options: the run's.
        position: where to begin; all zero for a new run.
        folder: for the checkpoints.
        tell: hears what happens.

    Raises:
        Interrupted: after a signal, when the step in progress is saved.
        ModelError: when an adapter did not move in the first step, or too many steps in a row were skipped.
        OutOfMemory: under the thriftiest plan.
    """
    train, engine = options.train, recovery.engine
    if engine.scale is not None and position.scale:
        engine.scale.value, engine.scale.num_good = position.scale["value"], int(position.scale["num_good"])
    last_loss: float | None = None
    with StopRequest() as stop:
        if position.step == 0:
            last_loss = _evaluate(recovery, course, position.step, tell)
            position = replace(position, first_heldout_loss=last_loss)
        while position.step < course.num_steps and not stop.received:
            num_done = position.step
            position = _step(recovery, course, options, position, tell)
            if position.step == num_done:
                continue
            step, is_last = position.step, position.step == course.num_steps
            if is_last or (train.evaluate_every and step % train.evaluate_every == 0):
                last_loss = _evaluate(recovery, course, step, tell)
            if is_last or (train.save_every and step % train.save_every == 0):
                _save(recovery, position, folder, options, tell)
        if position.step < course.num_steps:
            raise Interrupted(stop.received, _save(recovery, position, folder, options, tell).folder)
    return position, last_loss


def _step(recovery: Recovery, course: Course, options: Options, position: Position, tell: Tell) -> Position:
    engine, gauge, step = recovery.engine, recovery.gauge, position.step + 1
    began = time.monotonic()
    gauge.begin("step" if "first step" in gauge.by_phase else "first step")
    rows = [course.rows[i] for i in course.schedule[position.step + position.num_passed_over]]
    rate = learning_rate(options.optimizer, step, course.num_steps)
    seed = _step_seed(options.train.seed, step)
    watched = {} if engine.carrying else {"after_micro_batch": partial(recovery.after_micro_batch, rows, step)}
    outcome = recovery.run(partial(engine.step, rows, rate, seed, **watched), rows, step)
    if outcome.was_skipped:
        return after_bad_step(recovery, rows, outcome, position, options.optimizer.max_skipped, tell)
    loss, norm = recovery.run(lambda: (float(outcome.loss), float(outcome.gradient_norm)), rows, step)
    recovery.run(partial(_check, engine, outcome, step, rate), rows, step)
    gauge.read()
    tell(
        StepDone(
            step=step,
            num_steps=course.num_steps,
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            num_tokens=outcome.num_tokens,
            num_supervised_tokens=outcome.num_supervised,
            num_micro_batches=outcome.num_micro_batches,
            seconds=time.monotonic() - began,
            peak_bytes=gauge.peak_bytes,
            budget_bytes=gauge.budget_bytes,
            num_skipped=position.num_skipped,
        )
    )
    recovery.after_step(step)
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


def _evaluate(recovery: Recovery, course: Course, step: int, tell: Tell) -> float | None:
    if not len(course.heldout):
        return None
    began = time.monotonic()
    recovery.gauge.begin("evaluation")
    total, num_supervised = 0.0, 0
    for start in range(0, len(course.heldout), EVALUATED_ROWS):
        numbers = range(start, min(start + EVALUATED_ROWS, len(course.heldout)))
        rows = [course.heldout[i] for i in numbers]
        loss, num = recovery.run(partial(recovery.engine.evaluate, rows), rows, step)
        total, num_supervised = total + loss, num_supervised + num
    if not num_supervised:
        return None
    tell(Evaluated(step, total / num_supervised, num_supervised, time.monotonic() - began))
    return total / num_supervised


def _save(recovery: Recovery, position: Position, folder: Path, options: Options, tell: Tell) -> CheckpointSaved:
    engine = recovery.engine
    assert engine.optimizer is not None
    recovery.gauge.begin("saving")
    if engine.scale is not None:
        position = replace(position, scale={"value": engine.scale.value, "num_good": engine.scale.num_good})
    carry, keep = None if engine.carrying is None else engine.carrying.state_dict(), options.train.keep_checkpoints
    save = partial(save_checkpoint, folder, position, engine.model, engine.optimizer, keep, carry)
    saved = recovery.run(save, [], position.step)
    tell(saved)
    return saved


def _step_seed(seed: int, step: int) -> int:
    return (seed << 32) + step
