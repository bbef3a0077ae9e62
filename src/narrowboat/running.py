"""One sitting of a run, from options to the last event: data, plan, model, steps, adapter."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from hashlib import blake2s
from importlib.metadata import version
from pathlib import Path

from narrowboat.assembly import Assembled, Setting, Wanted, assembled, new_gauge
from narrowboat.choosing import choose
from narrowboat.data.batches import StepSchedule
from narrowboat.data.prepare import Prepared
from narrowboat.data.trains import Trains, TrainSchedule
from narrowboat.errors import OptionError
from narrowboat.events import DataReady, Notice, RunEnded, RunStarted, Tell
from narrowboat.machine.hardware import describe_device
from narrowboat.machine.precision import name_of
from narrowboat.model.adapters import save_adapter
from narrowboat.model.base import check_weights
from narrowboat.optimizers.build import settle_states
from narrowboat.optimizers.driving import averaged
from narrowboat.options.schema import Options
from narrowboat.owner.gauge import Gauge
from narrowboat.plan import MemoryPlan
from narrowboat.preparing import prepared_data
from narrowboat.settling import with_rank
from narrowboat.training.checkpoint import Position, newest_checkpoint, restore
from narrowboat.training.loop import Course
from narrowboat.training.loop import run as train
from narrowboat.training.recovery import Recovery

OPTIONS_FILE, PLAN_FILE, CHECKPOINTS, ADAPTER, REPORT = (
    "options.yaml", "plan.json", "checkpoints", "adapter", "report.html",
)  # fmt: skip


@dataclass
class Job:
    """One sitting of a run, from options to the last event."""

    options: Options
    folder: Path
    tell: Tell
    quiet: bool

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._position = Position(0, 0, 0, "", {})
        self._gauge: Gauge | None = None
        self._last_loss: float | None = None

    def run(self, resume: bool) -> RunEnded:
        """Prepare, plan, load, train, save."""
        found = newest_checkpoint(self.folder / CHECKPOINTS, self.tell) if resume else None
        self._tell_start(resume, found[1] if found else None)
        setting = Setting.of(self.options, self.tell, found[1].dtype if found else "")
        self.tell(Notice(f"{describe_device(setting.device)}; " + "; ".join(setting.precision.lines())))
        check_weights(self.options.model.name, self.tell)
        data = prepared_data(setting, self.quiet)
        self.tell(DataReady(data.account.as_dict()))
        setting = self._settled(setting, data)
        course = self._course(data)
        governor = choose(setting, data)
        if found and found[1].plan:
            governor.begin_with(MemoryPlan(**found[1].plan))
        (self.folder / PLAN_FILE).write_text(governor.plan.model_dump_json(indent=1), encoding="utf-8")
        position = Position(0, course.num_steps, 0, _fingerprint(data), {}, name_of(setting.precision.base.dtype))
        if found:
            position = found[1]
            _refuse_other_data(position, course, data)
        self._gauge = new_gauge(setting, governor.budget_bytes)
        with assembled(setting, Wanted(governor.plan, governor.budget_bytes, data=data), self._gauge) as ready:
            if found:
                _go_on(ready, found[0])
            recovery = Recovery(ready.engine, ready.gauge, governor, self.tell)
            checkpoints = self.folder / CHECKPOINTS
            self._position, self._last_loss = train(recovery, course, self.options, position, checkpoints, self.tell)
            ready.gauge.begin("saving")
            with averaged(ready.optimizer):
                save_adapter(ready.model, self.folder / ADAPTER)
        return self.end("done")

    def end(self, outcome: str, error: BaseException | None = None) -> RunEnded:
        """Tell how it ended."""
        ended = RunEnded(
            outcome=outcome,
            step=self._position.step,
            seconds=time.monotonic() - self._began,
            num_tokens=self._position.num_tokens,
            peak_bytes=self._gauge.highest_bytes if self._gauge else 0,
            budget_bytes=self._gauge.budget_bytes if self._gauge else 0,
            first_heldout_loss=self._position.first_heldout_loss,
            last_heldout_loss=self._last_loss,
            adapter_folder=str(self.folder / ADAPTER) if outcome == "done" else None,
            report_path=str(self.folder / REPORT),
            error=None if error is None else str(error) or type(error).__name__,
            peak_by_phase=self._gauge.by_phase if self._gauge else {},
        )
        self.tell(ended)
        return ended

    def _tell_start(self, resume: bool, position: Position | None) -> None:
        options = self.options.model_dump(mode="json")
        self.tell(RunStarted(str(self.folder), options, _versions(), position.step if position else 0))
        if resume and position is None:
            self.tell(Notice(f"{self.folder} holds no whole checkpoint; the run begins anew."))

    def _settled(self, setting: Setting, data: Prepared) -> Setting:
        options = with_rank(self.options, data, setting.config, setting.device, self.tell)
        states = settle_states(options.optimizer, setting.device, self.tell)
        self.options = options.model_copy(update={"optimizer": states})
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
    """Take up what a checkpoint holds."""
    assert ready.optimizer is not None
    carry = restore(checkpoint, ready.model, ready.optimizer)
    ready.gauge.watch_model(ready.model)
    if ready.engine.carrying is not None and carry:
        ready.engine.carrying.load_state_dict(carry)


def _refuse_other_data(position: Position, course: Course, data: Prepared) -> None:
    if (position.num_steps, position.data_fingerprint) != (course.num_steps, _fingerprint(data)):
        raise OptionError(
            f"The checkpoint at step {position.step} belongs to a run of {position.num_steps} steps over data "
            f"{position.data_fingerprint}; these options give {course.num_steps} steps over {_fingerprint(data)}. "
            "Resume with the options and files of that run, or name another train.folder."
        )


def _fingerprint(data: Prepared) -> str:
    """Of the rows' lengths and learnt tokens: enough to notice other data or another way of cutting it."""
    return blake2s(data.train.lengths.tobytes() + data.train.num_supervised.tobytes(), digest_size=8).hexdigest()


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("narrowboat", "torch", "transformers", "peft")}
