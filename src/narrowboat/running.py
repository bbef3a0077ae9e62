"""One sitting of a run, from options to the last event: data, plan, model, steps, adapter."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2s
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from narrowboat.data.batches import StepSchedule
from narrowboat.data.prepare import Prepared
from narrowboat.data.trains import Trains, TrainSchedule
from narrowboat.engine.engine import Engine
from narrowboat.engine.scaling import loss_scale
from narrowboat.errors import OptionError
from narrowboat.events import DataReady, ModelReady, Notice, PlanChosen, RunEnded, RunStarted, Tell
from narrowboat.machine.hardware import describe_device, device_memory, pick_device
from narrowboat.machine.precision import Precision, choose_precision, name_of
from narrowboat.memory.gauge import Gauge
from narrowboat.model.adapters import Adapted, adapt, save_adapter
from narrowboat.model.base import (
    check_weights,
    hush_transformers,
    load_base,
    load_config,
    load_tokenizer,
    weight_reader,
)
from narrowboat.optimizers.build import build_optimizer, settle_states
from narrowboat.optimizers.driving import averaged
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan
from narrowboat.planner.carried import RUNGS, CarriedWork, choose_carried
from narrowboat.planner.search import search_here
from narrowboat.planner.target import limits_here
from narrowboat.preparing import prepared_data
from narrowboat.settling import carrier_for, scheme_for, with_rank
from narrowboat.training.checkpoint import Position, newest_checkpoint, restore
from narrowboat.training.governor import Governor
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
        hush_transformers()
        self._gauge: Gauge | None = None
        self._last_loss: float | None = None

    def run(self, resume: bool) -> RunEnded:
        """Prepare, plan, load, train, save."""
        found = newest_checkpoint(self.folder / CHECKPOINTS, self.tell) if resume else None
        self._tell_start(resume, found[1] if found else None)
        device = pick_device(self.options.model.device)
        dtype: Any = found[1].dtype if found else self.options.model.dtype
        precision = choose_precision(dtype, device, self.options.model.quantize)
        self.tell(Notice(f"{describe_device(device)}; " + "; ".join(precision.lines())))
        config, tokenizer, data = self._data()
        self._settle(data, config, device)
        course = self._course(data)
        governor = self._plan(config, precision.base.dtype, course, device)
        if found and found[1].plan:
            governor.begin_with(MemoryPlan(**found[1].plan))
        (self.folder / PLAN_FILE).write_text(governor.plan.model_dump_json(indent=1), encoding="utf-8")
        position = Position(0, course.num_steps, 0, _fingerprint(data), {}, name_of(precision.base.dtype))
        if found:
            position = found[1]
            _refuse_other_data(position, course, data)
        adapted = self._load_model(precision, device)
        optimizer = build_optimizer(self.options.optimizer, adapted.model.named_parameters(), self.tell)
        carry = restore(found[0], adapted.model, optimizer) if found else None
        with ExitStack() as stack:
            self._gauge = stack.enter_context(Gauge(device, governor.budget_bytes))
            self._gauge.watch_model(adapted.model)
            engine = Engine(
                adapted.model,
                optimizer,
                governor.plan,
                tokenizer.pad_token_id or 0,
                self.options.optimizer.clip_norm,
                self.tell,
                loss_scale(self.options.optimizer, precision.compute.dtype),
                carrier_for(adapted.model, self.options, data, device, self.tell),
                scheme_for(self.options),
            )
            recovery = Recovery(stack.enter_context(engine), self._gauge, governor, self.tell)
            if engine.carrying is not None and carry:
                engine.carrying.load_state_dict(carry)
            checkpoints = self.folder / CHECKPOINTS
            self._position, self._last_loss = train(recovery, course, self.options, position, checkpoints, self.tell)
        with averaged(optimizer):
            save_adapter(adapted.model, self.folder / ADAPTER)
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
        )
        self.tell(ended)
        return ended

    def _tell_start(self, resume: bool, position: Position | None) -> None:
        options = self.options.model_dump(mode="json")
        self.tell(RunStarted(str(self.folder), options, _versions(), position.step if position else 0))
        if resume and position is None:
            self.tell(Notice(f"{self.folder} holds no whole checkpoint; the run begins anew."))

    def _data(self) -> tuple[Any, Any, Prepared]:
        """The model's configuration, its tokenizer and the rows; its weights are looked at, not loaded."""
        name = self.options.model.name
        config = load_config(name, self.tell)
        check_weights(name, self.tell)
        tokenizer = load_tokenizer(name, self.tell)
        data = prepared_data(self.options, config, tokenizer, self.tell, self.quiet)
        self.tell(DataReady(data.account.as_dict()))
        return config, tokenizer, data

    def _settle(self, data: Prepared, config: Any, device: torch.device) -> None:
        options = with_rank(self.options, data, config, device, self.tell)
        states = settle_states(options.optimizer, device, self.tell)
        self.options = options.model_copy(update={"optimizer": states})

    def _course(self, data: Prepared) -> Course:
        train = self.options.train
        schedule: StepSchedule | TrainSchedule
        if isinstance(data.train, Trains):
            schedule = TrainSchedule(data.train, train.batch_tokens, train.seed)
        else:
            schedule = StepSchedule(data.train.lengths, train.batch_tokens, train.seed, train.longest_first)
        num_steps = train.steps or max(1, round(train.epochs * len(schedule)))
        return Course(data.train, data.heldout, schedule, num_steps)

    def _plan(self, config: object, dtype: torch.dtype, course: Course, device: torch.device) -> Governor:
        """The plan to begin with, and the thriftier ones below it."""
        options, limits = self.options, limits_here(self.options.memory, device)
        trains = [rows for rows in (course.rows, course.heldout) if isinstance(rows, Trains) and len(rows)]
        if trains:
            longest = max(rows.longest_segment for rows in trains)
            longest_train = max(rows.longest_document[1] for rows in trains)
            total_bytes = device_memory(device).total_bytes
            carried = CarriedWork(config, options, dtype, longest, longest_train, total_bytes, device.type == "cuda")
            plan, reading = choose_carried(carried, limits.device_bytes, options.memory.plan)
            rungs, by_cause = RUNGS[RUNGS.index(plan) :], reading.by_cause
        else:
            lengths = [int(n) for rows in (course.rows, course.heldout) for n in rows.lengths]
            longest = max(lengths)
            search = search_here(options, config, dtype, device)
            choice = search.choose(longest, limits)
            choice = search.group_rows(choice, lengths, options.train.batch_tokens, limits)
            rungs, by_cause = search.from_here_down(choice.plan), choice.by_cause
        self.tell(
            PlanChosen(
                plan=rungs[0].model_dump(),
                description=rungs[0].describe(),
                budget_bytes=limits.device_bytes,
                forecast_bytes=by_cause,
                longest_tokens=longest,
            )
        )
        return Governor(rungs, limits.device_bytes, options.memory.high, sum(by_cause.values()))

    def _load_model(self, precision: Precision, device: torch.device) -> Adapted:
        model, _ = load_base(self.options.model, precision, device, self.tell)
        torch.manual_seed(self.options.train.seed)  # of the adapter's first weights
        read = weight_reader(self.options.model.name, self.tell) if self.options.lora.init == "loftq" else None
        adapted = adapt(model, self.options.lora, self.tell, read)
        self.tell(
            ModelReady(
                name=self.options.model.name,
                num_parameters=adapted.num_parameters,
                num_trainable=adapted.num_trainable,
                dtype=name_of(precision.base.dtype),
                device=describe_device(device),
                modules_by_target=adapted.matched,
            )
        )
        return adapted


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
