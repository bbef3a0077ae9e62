"""The loop: when to step, evaluate, save and stop. How a step is made is the engine's affair.

The order of the data, the learning rate and the dropout of a step follow from its number, so a run that was stopped
and resumed is the same run, to the last bit on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from narrowboat.data.batches import StepSchedule
from narrowboat.data.store import Rows
from narrowboat.data.trains import TrainSchedule
from narrowboat.distributed.ranks import Said
from narrowboat.engine.engine import Engine, Outcome
from narrowboat.errors import CheckpointError, Interrupted, ModelError
from narrowboat.events import Evaluated, Notice, StepDone, Tell
from narrowboat.model.adapters import idle_adapters
from narrowboat.model.anatomy import Anatomy
from narrowboat.optimizers.schedule import learning_rate
from narrowboat.options.schema import Options
from narrowboat.training.checkpoint import Position, snapshot
from narrowboat.training.recovery import Recovery
from narrowboat.training.saver import Saver
from narrowboat.training.signals import GivenUp, StopRequest
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
    recovery: Recovery,
    course: Course,
    options: Options,
    position: Position,
    saver: Saver,
    stop: StopRequest,
    tell: Tell,
    reached: Callable[[Position], None] = lambda position: None,
) -> Position:
    """Go from ``position`` to the last step; the position then.

    Args:
        recovery: with an engine that is entered and has an optimizer, and a gauge that is entered.
        course: the data.
        options: the run's.
        position: where to begin; all zero for a new run.
        saver: takes the checkpoints; all are on disk, or have failed, at the end.
        stop: entered.
        tell: hears what happens.
        reached: hears how far it came, also where it does not end well.

    Raises:
        Interrupted: the run was asked to stop, and is saved.
        CheckpointError: it was asked to stop, and cannot be saved.
        ModelError: when an adapter did not move in the first step, or too many steps in a row were skipped.
        OutOfMemory: under the thriftiest plan.
    """
    engine = recovery.engine
    if engine.scale is not None and position.scale:
        engine.scale.value, engine.scale.num_good = position.scale["value"], int(position.scale["num_good"])
    leg = _Leg(recovery, course, options, saver, stop, tell, position)
    layers = [layer.module for layer in Anatomy.of(engine.model).layers]
    with stop.patiently(), stop.checked_in(layers):
        try:
            leg.run()
        except Exception:
            saver.settle()
            raise
        finally:
            reached(leg.position)
    return leg.position


@dataclass
class _Leg:
    """The steps of one session; ``position`` is how far it has come."""

    recovery: Recovery
    course: Course
    options: Options
    saver: Saver
    stop: StopRequest
    tell: Tell
    position: Position

    def __post_init__(self) -> None:
        self._begun_at = self.position.step
        self._ranks = self.recovery.engine.ranks

    def run(self) -> None:
        """Measure, save, step, until there is nothing left to do or the run was asked to stop."""
        try:
            while True:
                if self._is_unmeasured:
                    self._measure()
                if self._has_stalled:
                    self._end_early()
                    return
                self._save_if_due()
                if self.position.step >= self.course.num_steps or self._is_asked():
                    break
                self._step()
        except GivenUp:
            self._is_asked()  # by whom
        if self.position.step >= self.course.num_steps and not self._is_unmeasured:
            self.saver.settle()
            return
        self._save(at_once=True)
        saved = self.saver.newest()
        if saved is None:
            raise CheckpointError(f"Stopped, and not saved: {self.saver.failures[-1]}")
        raise Interrupted(self.stop.received, str(saved))

    def _step(self) -> None:
        """The next step; one that changed nothing is none, and the next is tried."""
        before = self.position.step
        while self.position.step == before and not self._is_asked():
            self.position = _step(self.recovery, self.course, self.options, self.position, self.tell)
            self.saver.look()

    def _is_asked(self) -> bool:
        """Whether this rank or another was asked to stop, or to save."""
        asked = self.stop.received if self.stop.is_asked else 0
        said = self._ranks.meet(Said(stop=asked, saves=self.stop.wants_save))
        self.stop.received = self.stop.received or said.stop
        self.stop.wants_save = self.stop.wants_save or said.saves
        return bool(said.stop)

    @property
    def _has_stalled(self) -> bool:
        """Whether ``train.patience`` evaluations in a row brought nothing; the last step ends the run anyway."""
        train, position = self.options.train, self.position
        since_best = position.step - (position.best_step or 0)
        is_last = position.step >= self.course.num_steps
        return bool(train.patience) and not is_last and since_best >= train.patience * train.evaluate_every

    def _end_early(self) -> None:
        position, best, patience = self.position, self.position.best_heldout_loss, self.options.train.patience
        lowest = "" if best is None else f" since step {position.best_step:,} ({best:.4f})"
        self.tell(
            Notice(
                f"The run ends after step {position.step:,} of {self.course.num_steps:,}: {patience:,} evaluations in "
                f"a row brought no lower held-out loss{lowest}."
            )
        )
        self._save(at_once=True)
        self.saver.settle()

    @property
    def _is_unmeasured(self) -> bool:
        every, step = self.options.train.evaluate_every, self.position.step
        is_due = step in (0, self.course.num_steps) or bool(every and step % every == 0)
        return is_due and self.position.evaluated_step != step

    def _measure(self) -> None:
        step, best = self.position.step, self.position.best_heldout_loss
        with self.stop.losing_nothing():
            loss = _evaluate(self.recovery, self.course, step, self.tell)
        self.position = replace(self.position, evaluated_step=step, last_heldout_loss=loss)
        if step == 0:
            self.position = replace(self.position, first_heldout_loss=loss)
        elif loss is not None and (best is None or loss < best) and self._keep_best(step, loss):
            self.position = replace(self.position, best_heldout_loss=loss, best_step=step)

    def _keep_best(self, step: int, loss: float) -> bool:
        """Whether this is the best from here on: not if it was to be kept, and could not be."""
        if not self.options.train.keep_best:
            return True
        return self._ranks.same(self.saver.keep_best(self.recovery.engine, step, loss))

    def _save_if_due(self) -> None:
        every, step = self.options.train.save_every, self.position.step
        is_last = step == self.course.num_steps
        is_due = step > self._begun_at and (is_last or bool(every and step % every == 0))
        if is_due or self.stop.wants_save:
            self.stop.wants_save = False
            self._save(at_once=is_last)

    def _save(self, at_once: bool) -> None:
        engine, scale, position = self.recovery.engine, self.recovery.engine.scale, self.position
        assert engine.optimizer is not None
        self.recovery.gauge.begin("saving")
        if scale is not None:
            position = replace(position, scale={"value": scale.value, "num_good": scale.num_good})
        take = partial(snapshot, position, engine.model, engine.optimizer, engine.feed.state_dict())
        self.saver.save(partial(self.recovery.alone, take, position.step), position, at_once)


def _step(recovery: Recovery, course: Course, options: Options, position: Position, tell: Tell) -> Position:
    engine, gauge, step = recovery.engine, recovery.gauge, position.step + 1
    began = time.monotonic()
    is_first = "first step" not in gauge.by_phase
    if is_first:
        tell(gauge.mark("before the first step", position.step))
    gauge.begin("first step" if is_first else "step")
    rows = [course.rows[i] for i in course.schedule[position.step + position.num_passed_over]]
    rate = learning_rate(options.optimizer, step, course.num_steps)
    seed = _step_seed(options.train.seed, step)
    watch = partial(recovery.after_micro_batch, rows, step)
    outcome = recovery.run(partial(engine.step, rows, rate, seed, watch), rows, step)
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
            by_cause=gauge.peak_by_cause,
        )
    )
    if is_first:
        tell(gauge.mark("after the first step", step))
    recovery.after_step(step)
    return replace(
        position,
        step=step,
        num_tokens=position.num_tokens + outcome.num_tokens,
        plan=engine.plan,
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
    tell(recovery.gauge.mark("evaluation", step))
    tell(Evaluated(step, total / num_supervised, num_supervised, time.monotonic() - began))
    return total / num_supervised


def _step_seed(seed: int, step: int) -> int:
    return (seed << 32) + step
