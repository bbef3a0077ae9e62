"""What ``import narrowboat`` offers: train, install, meter; the rooms put together to whole jobs.

Rooms on one floor do not know each other, so what needs several of them (a run needs data, model, planner, engine,
loop and recorders) is put together here, and nowhere else.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2s
from importlib.metadata import version
from pathlib import Path

import torch

from narrowboat.data.batches import StepSchedule
from narrowboat.data.prepare import Prepared, prepare
from narrowboat.engine.engine import Engine
from narrowboat.engine.scaling import loss_scale
from narrowboat.errors import Interrupted, OptionError
from narrowboat.events import DataReady, ModelReady, Notice, PlanChosen, RunEnded, RunStarted, Tell
from narrowboat.machine.hardware import describe_device, pick_device
from narrowboat.machine.precision import Precision, choose_precision, name_of
from narrowboat.memory.gauge import Gauge
from narrowboat.memory.install import install
from narrowboat.memory.meter import Meter as meter
from narrowboat.model.adapters import Adapted, adapt, save_adapter
from narrowboat.model.base import check_weights, hush_transformers, load_base, load_config, load_tokenizer
from narrowboat.monitor.recorders import open_recorders
from narrowboat.optimizers.build import build_optimizer
from narrowboat.optimizers.driving import averaged
from narrowboat.options import load
from narrowboat.options.schema import Options
from narrowboat.planner.forecast import Forecast, Workload
from narrowboat.planner.search import Search
from narrowboat.planner.target import limits_here, target_here
from narrowboat.train.checkpoint import Position, newest_checkpoint, restore
from narrowboat.train.loop import Course, run

__all__ = ["install", "meter", "train"]

OPTIONS_FILE, PLAN_FILE, CHECKPOINTS, ADAPTER, REPORT = (
    "options.yaml", "plan.json", "checkpoints", "adapter", "report.html",
)  # fmt: skip


def train(options: Options, resume: bool = False, quiet: bool = False) -> RunEnded:
    """Train an adapter as ``options`` say and leave it in ``train.folder``/adapter.

    Args:
        options: from ``options.load.load``.
        resume: go on from the newest whole checkpoint in the folder.
        quiet: show no progress; files are written all the same.

    Raises:
        NarrowboatError: its kinds say what was refused; ``Interrupted`` after a signal, when the run is saved.
    """
    folder = Path(options.train.folder)
    _refuse_other_run(folder, resume)
    folder.mkdir(parents=True, exist_ok=True)
    load.dump(options, folder / OPTIONS_FILE)
    recorders = open_recorders(folder, quiet=quiet)
    job = _Job(options, folder, recorders.record)
    try:
        return job.run(resume)
    except BaseException as error:
        job.end("interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed", error)
        raise
    finally:
        recorders.close()


@dataclass
class _Job:
    """One sitting of a run, from options to the last event."""

    options: Options
    folder: Path
    tell: Tell

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._position = Position(0, 0, 0, "", {})
        hush_transformers()
        self._gauge: Gauge | None = None
        self._last_loss: float | None = None

    def run(self, resume: bool) -> RunEnded:
        """Prepare, plan, load, train, save."""
        options = self.options
        found = newest_checkpoint(self.folder / CHECKPOINTS, self.tell) if resume else None
        self.tell(
            RunStarted(str(self.folder), options.model_dump(mode="json"), _versions(), found[1].step if found else 0)
        )
        if resume and found is None:
            self.tell(Notice(f"{self.folder} holds no whole checkpoint; the run begins anew."))
        device = pick_device(options.model.device)
        precision = choose_precision(found[1].dtype if found else options.model.dtype, device)  # type: ignore[arg-type]
        self.tell(Notice(f"{describe_device(device)}; " + "; ".join(precision.lines())))
        config = load_config(options.model.name, self.tell)
        check_weights(options.model.name, self.tell)
        tokenizer = load_tokenizer(options.model.name, self.tell)
        data = prepare(options, tokenizer, config.get_text_config().max_position_embeddings, self.tell)
        self.tell(DataReady(data.account.as_dict()))
        course = self._course(data)
        choice = self._choose_plan(config, precision, course, device)
        position = (
            found[1]
            if found
            else Position(0, course.num_steps, 0, _fingerprint(data), {}, name_of(precision.base.dtype))
        )
        _refuse_other_data(position, course, data)
        adapted = self._load_model(precision, device)
        scale = loss_scale(options.optimizer, precision.compute.dtype)
        optimizer = build_optimizer(options.optimizer, adapted.model.named_parameters(), self.tell)
        if found:
            restore(found[0], adapted.model, optimizer)
        with ExitStack() as stack:
            self._gauge = stack.enter_context(Gauge(device, limits_here(options.memory, device).device_bytes))
            self._gauge.watch_model(adapted.model)
            pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
            engine = stack.enter_context(
                Engine(adapted.model, optimizer, choice.plan, pad_id, options.optimizer.clip_norm, self.tell, scale)
            )
            checkpoints = self.folder / CHECKPOINTS
            self._position, self._last_loss = run(
                engine, course, options, self._gauge, position, checkpoints, self.tell
            )
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

    def _course(self, data: Prepared) -> Course:
        train = self.options.train
        schedule = StepSchedule(data.train.lengths, train.batch_tokens, train.seed, train.longest_first)
        num_steps = train.steps or max(1, round(train.epochs * len(schedule)))
        return Course(data.train, data.heldout, schedule, num_steps)

    def _choose_plan(self, config: object, precision: Precision, course: Course, device: torch.device) -> Forecast:
        options, dtype = self.options, precision.base.dtype
        lengths = [int(n) for rows in (course.rows, course.heldout) for n in rows.lengths]
        limits = limits_here(options.memory, device)
        search = Search(
            Workload(config, options, dtype, device.type == "cuda"), target_here(device, dtype), options.memory.plan
        )
        choice = search.choose(max(lengths), limits)
        choice = search.group_rows(choice, lengths, options.train.batch_tokens, limits)
        (self.folder / PLAN_FILE).write_text(choice.plan.model_dump_json(indent=1), encoding="utf-8")
        self.tell(
            PlanChosen(
                plan=choice.plan.model_dump(),
                description=choice.plan.describe(),
                budget_bytes=limits.device_bytes,
                forecast_bytes=choice.by_cause,
                longest_tokens=max(lengths),
            )
        )
        return choice

    def _load_model(self, precision: Precision, device: torch.device) -> Adapted:
        model, _ = load_base(self.options.model, precision, device, self.tell)
        torch.manual_seed(self.options.train.seed)  # of the adapter's first weights
        adapted = adapt(model, self.options.lora, self.tell)
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


def _refuse_other_run(folder: Path, resume: bool) -> None:
    if not resume and (folder / CHECKPOINTS).is_dir() and any((folder / CHECKPOINTS).iterdir()):
        raise OptionError(
            f"{folder} holds the checkpoints of another run; go on with --resume, or name another train.folder."
        )


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
