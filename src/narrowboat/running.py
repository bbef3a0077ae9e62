"""One session of a run, from options to the last event: data, plan, model, steps, adapter."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from narrowboat.assembly import Assembled, Setting, Wanted, assembled, new_gauge
from narrowboat.choosing import choose
from narrowboat.data.batches import StepSchedule
from narrowboat.data.prepare import Prepared
from narrowboat.data.show import chosen, parts
from narrowboat.data.trains import Trains, TrainSchedule
from narrowboat.distributed.ranks import Ranks
from narrowboat.errors import DataError
from narrowboat.events import DataReady, Notice, RunEnded, RunStarted, Tell
from narrowboat.exporting import public_name, write_beside
from narrowboat.machine.drafts import write_whole
from narrowboat.machine.hardware import describe_device
from narrowboat.machine.precision import name_of
from narrowboat.machine.unforeseen import Work
from narrowboat.machine.vitals import Pulse
from narrowboat.model.base import check_weights, model_folder
from narrowboat.model.fingerprints import tokenizer_digest, weights_digest
from narrowboat.model.saved import save_adapter
from narrowboat.model.serving import advice, config_of, refusals
from narrowboat.monitor.history import EVENTS_FILE, History, read_history
from narrowboat.monitor.recorders import Record
from narrowboat.monitor.view import View
from narrowboat.optimizers.build import settle_states
from narrowboat.optimizers.driving import averaged
from narrowboat.options.load import text_of
from narrowboat.options.schema import Options
from narrowboat.owner.gauge import Gauge
from narrowboat.plan import MemoryPlan
from narrowboat.preparing import prepared_data
from narrowboat.seeing import how_it_sees
from narrowboat.settling import with_rank
from narrowboat.training.checkpoint import Position, newest_checkpoint, restore
from narrowboat.training.folder import ADAPTER, CHECKPOINTS, OPTIONS_FILE, PLAN_FILE, REPORT, holds_run
from narrowboat.training.governor import Governor
from narrowboat.training.loop import Course
from narrowboat.training.loop import run as train
from narrowboat.training.recovery import Recovery
from narrowboat.training.sameness import Identity, refuse_other_run
from narrowboat.training.saver import NoSaver, Saver
from narrowboat.training.signals import StopRequest

NUM_SAMPLES, MOST_PARTS, MOST_CHARS = 2, 40, 800
"""Number of examples that a report shows."""


@dataclass
class Job:
    """One session of a run, from options to the last event.

    Args:
        options: the options as the user gave them.
        folder: the run's folder; no other process uses it.
        record: writes the events; nothing is written to ``folder`` before all checks have passed.
        quiet: show no progress.
        stop: notices signals; already entered.
        ranks: the processes of the run; only rank 0 writes to ``folder``.
    """

    options: Options
    folder: Path
    record: Record
    quiet: bool
    stop: StopRequest
    ranks: Ranks

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._asked_for = self.options
        self._position = Position(0, 0)
        self._gauge: Gauge | None = None
        errors_into = None if self.ranks.rank else self.folder
        self.work = Work(self.options.model.name, "reading its configuration", errors_into, "Try another memory.plan")
        self.tell: Tell = self.record.record

    def run(self, resume: bool, accepted: Sequence[str] = ()) -> RunEnded:
        """Prepare, plan, load, train, save; ``accepted`` names differences with which a resumed run may continue."""
        found = newest_checkpoint(self.folder / CHECKPOINTS, self.tell) if resume else None
        self._tell_start(resume, found[1] if found else None)
        dtype = found[1].dtype if found and self.options.model.dtype == "auto" else ""
        setting = Setting.of(self.options, self.tell, dtype)
        self.work.model, self.work.doing = setting.kind, "reading the data"
        self.tell(Notice(f"{describe_device(setting.device)}; {setting.precision.words()}"))
        check_weights(self.options.model.name, self.tell)
        data = prepared_data(setting, self.quiet)
        self.tell(DataReady(data.account.as_dict(), list(_samples(data, setting))))
        self.work.doing = "planning"
        setting = self._settled(setting, data)
        course = self._course(data)
        governor = self._chosen(setting, data)
        if found and found[1].plan:
            governor.begin_with(found[1].plan)
        position = self._begin_at(found, accepted, setting, data, course)
        self._gauge = new_gauge(setting, governor.budget_bytes)
        self.work.doing = "loading the model"
        wanted = Wanted(governor.plan, governor.budget_bytes, data=data, ranks=self.ranks)
        with assembled(setting, wanted, self._gauge) as ready:
            if found:
                _go_on(ready, found[0])
            self._begin(governor.plan)
            self._let_watch(ready)
            self.tell(ready.gauge.mark("after loading", position.step))
            self.work.doing = f"training under the plan {governor.plan.layers}"
            train_options, memory = self.options.train, self.options.memory
            kind = NoSaver if self.ranks.rank else Saver
            saver = kind(self.folder, train_options.keep_checkpoints, self._gauge, memory.high, self.tell)
            recovery = Recovery(ready.engine, ready.gauge, governor, self.tell)
            self._position = position
            train(recovery, course, self.options, position, saver, self.stop, self.tell, self._reached)
            ready.gauge.begin("saving")
            if self.ranks.rank == 0:
                with averaged(ready.optimizer):
                    self._save(ready)
            saver.raise_failures()
        return self.end("done")

    def _save(self, ready: Assembled) -> None:
        """Save the adapter with all that a server needs: tokenizer, template, generation settings, card, base's
        name.
        """
        folder, name = self.folder / ADAPTER, self.options.model.name
        source = model_folder(name, self.tell)
        history = self._history()
        save_adapter(
            ready.model,
            folder,
            {"step": self._position.step, **how_it_sees(self.options)},
            public_name(name, source, folder),
            lambda draft: write_beside(draft, source, name, self.options, history),
        )

    def _history(self) -> History | None:
        """What this run wrote down; None where somebody has deleted it meanwhile."""
        try:
            return read_history(self.folder / EVENTS_FILE)
        except DataError:
            self.tell(Notice(f"{self.folder / EVENTS_FILE} is gone: the model card says nothing of data and results."))
            return None

    def end(self, outcome: str, error: BaseException | None = None) -> RunEnded:
        """Report how the session ended; a failure is also written down where the folder held no run before."""
        if self.ranks.rank == 0 and not self.record.has_begun and not holds_run(self.folder):
            with suppress(OSError):  # the error is what matters
                self._begin(None)
        ended = RunEnded(
            outcome=outcome,
            step=self._position.step,
            seconds=time.monotonic() - self._began,
            num_tokens=self._position.num_tokens,
            peak_bytes=self._gauge.highest_bytes if self._gauge else 0,
            budget_bytes=self._gauge.budget_bytes if self._gauge else 0,
            first_heldout_loss=self._position.first_heldout_loss,
            last_heldout_loss=self._position.last_heldout_loss,
            adapter_folder=str(self.folder / ADAPTER) if outcome == "done" else None,
            report_path=str(self.folder / REPORT),
            error=None if error is None else str(error) or type(error).__name__,
            peak_by_phase=self._gauge.by_phase if self._gauge else {},
        )
        self.tell(ended)
        return ended

    def _begin(self, plan: MemoryPlan | None) -> None:
        """Begin writing to the run's folder; all checks have passed."""
        if self.ranks.rank:
            return
        write_whole(self.folder / OPTIONS_FILE, text_of(self._asked_for))
        if plan is not None:
            write_whole(self.folder / PLAN_FILE, plan.model_dump_json(indent=1).encode())
        self.record.begin()

    def _chosen(self, setting: Setting, data: Prepared) -> Governor:
        """By rank 0, for all."""
        return self.ranks.same(choose(setting, data, num_ranks=self.ranks.num) if self.ranks.rank == 0 else None)  # type: ignore[return-value]

    def _let_watch(self, ready: Assembled) -> None:
        engine, stop = ready.engine, self.stop
        pulse = Pulse(engine.device)
        self.record.watch(View(engine.underway, ready.gauge.now, pulse, lambda: stop.heard, stop.patience_seconds))

    def _reached(self, position: Position) -> None:
        self._position = position

    def _begin_at(
        self,
        found: tuple[Path, Position] | None,
        accepted: Sequence[str],
        setting: Setting,
        data: Prepared,
        course: Course,
    ) -> Position:
        """The position of the first step, or the one at which the found checkpoint continues.

        Raises:
            OptionError: the checkpoint belongs to another run.
        """
        dtype = name_of(setting.precision.base.dtype)
        identity = self._identity(setting, data, dtype)
        if found is None:
            return Position(0, course.num_steps, identity=identity, dtype=dtype)
        path, position = found
        refuse_other_run(position.identity, identity, accepted, str(path), self.tell)
        if position.step >= course.num_steps:
            self.tell(Notice(f"Step {position.step:,} of {course.num_steps:,} is done: there is nothing left to do."))
        return replace(position, num_steps=course.num_steps, identity=identity, dtype=dtype)

    def _identity(self, setting: Setting, data: Prepared, dtype: str) -> Identity:
        folder = model_folder(self.options.model.name, self.tell)
        contents = {
            "data": data.train.fingerprint,
            "heldout": data.heldout.fingerprint,
            "weights": weights_digest(folder),
            "tokenizer": tokenizer_digest(setting.tokenizer),
        }
        options = {
            f"{group}.{name}": value
            for group, values in self.options.model_dump(mode="json").items()
            for name, value in values.items()
        }
        return Identity(contents, options | {"model.dtype": dtype})

    def _tell_start(self, resume: bool, position: Position | None) -> None:
        options = self.options.model_dump(mode="json")
        self.tell(RunStarted(str(self.folder), options, _versions(), position.step if position else 0))
        if self.ranks.num > 1:
            self.tell(Notice(f"{self.ranks.num} processes share each step batch; gradients are those of one."))
        if resume and position is None:
            self.tell(Notice(f"{self.folder} holds no checkpoint; the run starts from step 1."))

    def _settled(self, setting: Setting, data: Prepared) -> Setting:
        options = with_rank(self.options, data, setting.config, setting.device, self.tell)
        states = settle_states(options.optimizer, setting.device, self.tell)
        self.options = options.model_copy(update={"optimizer": states})
        if words := advice(refusals(config_of(options.lora))):
            self.tell(Notice(f"Not every server will take this adapter: {words}"))
        return replace(setting, options=self.options)

    def _course(self, data: Prepared) -> Course:
        train = self.options.train
        schedule: StepSchedule | TrainSchedule
        if isinstance(data.train, Trains):
            schedule = TrainSchedule(data.train, train.batch_tokens, train.seed)
        else:
            schedule = StepSchedule(data.train.lengths, train.batch_tokens, train.seed, train.longest_first)
        num_steps = train.steps or max(1, round(train.epochs * len(schedule)))
        return Course(data.train, data.heldout, schedule, num_steps)


def _go_on(ready: Assembled, checkpoint: Path) -> None:
    """Restore the states of a checkpoint."""
    assert ready.optimizer is not None
    carry = restore(checkpoint, ready.model, ready.optimizer)
    ready.gauge.watch_model(ready.model)
    if carry:
        ready.engine.feed.load_state_dict(carry)


def _samples(data: Prepared, setting: Setting) -> Iterator[dict[str, Any]]:
    """A few examples for the report, with what is learnt in them; the middle of long parts is left out."""
    for example in chosen(data, NUM_SAMPLES):
        shown = [{"text": _shortened(text), "kind": kind} for text, kind in parts(example, setting.tokenizer)]
        yield {"source": Path(example.source).name, "parts": shown[:MOST_PARTS]}


def _shortened(text: str) -> str:
    half = MOST_CHARS // 2
    return (
        text
        if len(text) <= MOST_CHARS
        else f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
    )


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("narrowboat", "torch", "transformers", "peft")}
