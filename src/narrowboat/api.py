"""What ``import narrowboat`` offers: train, install, meter; the rooms put together to whole jobs.

Rooms on one floor do not know each other, so what needs several of them (a run needs data, model, planner, engine,
loop and recorders) is put together here, and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import blake2s
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from narrowboat import planning
from narrowboat.data.batches import StepSchedule
from narrowboat.data.prepare import Prepared
from narrowboat.data.trains import Trains, TrainSchedule
from narrowboat.engine.engine import Engine
from narrowboat.engine.scaling import loss_scale
from narrowboat.errors import Interrupted, OptionError
from narrowboat.evaluate.compare import Comparison, compare
from narrowboat.events import DataReady, Event, ModelReady, Notice, PlanChosen, RunEnded, RunStarted, Tell
from narrowboat.machine.hardware import describe_device, device_memory, pick_device
from narrowboat.machine.precision import Precision, choose_precision, name_of
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.memory.gauge import Gauge
from narrowboat.memory.install import install
from narrowboat.memory.meter import Meter as meter
from narrowboat.memory.schemes import Scheme, scheme_of
from narrowboat.model.adapters import Adapted, adapt, load_adapter_state, save_adapter
from narrowboat.model.base import (
    check_weights,
    empty_base,
    hush_transformers,
    load_base,
    load_config,
    load_tokenizer,
    weight_reader,
)
from narrowboat.model.export import base_of, copy_adapter, merge
from narrowboat.model.rank import choose_rank
from narrowboat.monitor.recorders import open_recorders
from narrowboat.optimizers.build import build_optimizer, settle_states
from narrowboat.optimizers.driving import averaged
from narrowboat.options import load
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan
from narrowboat.planner.answer import Answer
from narrowboat.planner.carried import RUNGS, CarriedWork, choose_carried
from narrowboat.planner.search import search_here
from narrowboat.planner.target import limits_here
from narrowboat.preparing import prepared_data, refuse_no_data
from narrowboat.train.checkpoint import Position, newest_checkpoint, restore
from narrowboat.train.governor import Governor
from narrowboat.train.loop import Course, run
from narrowboat.train.recovery import Recovery

__all__ = ["evaluate", "export", "install", "meter", "plan_for", "train"]

OPTIONS_FILE, PLAN_FILE, CHECKPOINTS, ADAPTER, REPORT = (
    "options.yaml", "plan.json", "checkpoints", "adapter", "report.html",
)  # fmt: skip


def plan_for(options: Options, num_tokens: int | None = None, card: str = "") -> Answer:
    """What fits: the fastest plan for a row of ``num_tokens`` and its neighbours, on this machine or on a card.

    Args:
        options: the run's; no weight is read, and a model of the catalogue needs no download.
        num_tokens: of the row; None asks for the longest one that fits.
        card: a name of the catalogue, such as rtx-4090.

    Raises:
        OptionError: the model or card is unknown.
        BudgetError: a budget is above what the machine or card has.
    """
    return planning.plan_for(planning.Question(options, num_tokens, card))


def train(options: Options, resume: bool = False, quiet: bool = False) -> RunEnded:
    """Train an adapter as ``options`` say and leave it in ``train.folder``/adapter.

    Args:
        options: from ``options.load.load``.
        resume: go on from the newest whole checkpoint in the folder.
        quiet: show no progress; files are written all the same.

    Raises:
        NarrowboatError: its kinds say what was refused; ``Interrupted`` after a signal, when the run is saved.
    """
    refuse_no_data(options)
    folder = Path(options.train.folder)
    _refuse_other_run(folder, resume)
    folder.mkdir(parents=True, exist_ok=True)
    load.dump(options, folder / OPTIONS_FILE)
    recorders = open_recorders(folder, quiet=quiet)
    job = _Job(options, folder, recorders.record, quiet)
    try:
        return job.run(resume)
    except BaseException as error:
        job.end("interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed", error)
        raise
    finally:
        recorders.close()


def export(
    folder: Path, out: Path, merged: bool = True, base: str = "", say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Write the model of a run with its adapter added in to ``out``, or the adapter alone; what was written.

    Args:
        folder: a run's folder, or a PEFT adapter's.
        out: must not exist, or be empty.
        merged: whether to add the adapter to the base.
        base: the model; that of the run or of the adapter's configuration if empty.
        say: hears notices.

    Raises:
        CheckpointError: there is no adapter in ``folder``, or ``out`` cannot be written.
        ModelError: the base cannot be merged with.
    """

    def tell(event: Event) -> None:
        if isinstance(event, Notice):
            say(event.text)

    is_run = (folder / OPTIONS_FILE).exists()
    adapter = folder / ADAPTER if is_run else folder
    options = load.load(folder / OPTIONS_FILE).model if is_run else None
    if not merged:
        return {"folder": str(out), "num_bytes": copy_adapter(adapter, out)}
    name = base or (options.name if options else base_of(adapter))
    return asdict(merge(name, adapter, out, tell, options.quantize if options else "none"))


@dataclass
class _Job:
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
        options = self.options
        found = newest_checkpoint(self.folder / CHECKPOINTS, self.tell) if resume else None
        self.tell(
            RunStarted(str(self.folder), options.model_dump(mode="json"), _versions(), found[1].step if found else 0)
        )
        if resume and found is None:
            self.tell(Notice(f"{self.folder} holds no whole checkpoint; the run begins anew."))
        device = pick_device(options.model.device)
        dtype: Any = found[1].dtype if found else options.model.dtype
        precision = choose_precision(dtype, device, options.model.quantize)
        self.tell(Notice(f"{describe_device(device)}; " + "; ".join(precision.lines())))
        config = load_config(options.model.name, self.tell)
        check_weights(options.model.name, self.tell)
        tokenizer = load_tokenizer(options.model.name, self.tell)
        data = prepared_data(options, config, tokenizer, self.tell, self.quiet)
        self.tell(DataReady(data.account.as_dict()))
        options = self.options = with_rank(options, data, config, device, self.tell)
        states = settle_states(options.optimizer, device, self.tell)
        options = self.options = options.model_copy(update={"optimizer": states})
        course = self._course(data)
        governor = self._plan(config, precision.base.dtype, course, device)
        if found and found[1].plan:
            governor.begin_with(MemoryPlan(**found[1].plan))
        (self.folder / PLAN_FILE).write_text(governor.plan.model_dump_json(indent=1), encoding="utf-8")
        position = (
            found[1]
            if found
            else Position(0, course.num_steps, 0, _fingerprint(data), {}, name_of(precision.base.dtype))
        )
        _refuse_other_data(position, course, data)
        adapted = self._load_model(precision, device)
        scale = loss_scale(options.optimizer, precision.compute.dtype)
        optimizer = build_optimizer(options.optimizer, adapted.model.named_parameters(), self.tell)
        carry = None
        if found:
            carry = restore(found[0], adapted.model, optimizer)
        carrier = carrier_for(adapted.model, options, data, device, self.tell)
        with ExitStack() as stack:
            self._gauge = stack.enter_context(Gauge(device, governor.budget_bytes))
            self._gauge.watch_model(adapted.model)
            pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
            engine = stack.enter_context(
                Engine(
                    adapted.model,
                    optimizer,
                    governor.plan,
                    pad_id,
                    options.optimizer.clip_norm,
                    self.tell,
                    scale,
                    carrier,
                    scheme_for(options),
                )
            )
            if engine.carrying is not None and carry:
                engine.carrying.load_state_dict(carry)
            checkpoints = self.folder / CHECKPOINTS
            recovery = Recovery(engine, self._gauge, governor, self.tell)
            self._position, self._last_loss = run(recovery, course, options, position, checkpoints, self.tell)
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


def evaluate(folder: Path, tell: Tell = lambda event: None) -> Comparison:
    """Measure the adapter of the run in ``folder`` against its base model, under the run's own options.

    Raises:
        OptionError: the folder holds no run.
        NarrowboatError: what else was refused.
    """
    if not (folder / OPTIONS_FILE).is_file() or not (folder / ADAPTER).is_dir():
        raise OptionError(f"{folder} holds no finished run: {OPTIONS_FILE} and {ADAPTER}/ are looked for.")
    options = load.load(folder / OPTIONS_FILE)
    hush_transformers()
    device = pick_device(options.model.device)
    found = newest_checkpoint(folder / CHECKPOINTS, tell)
    precision = choose_precision(found[1].dtype if found else options.model.dtype, device)  # type: ignore[arg-type]
    config, tokenizer = load_config(options.model.name, tell), load_tokenizer(options.model.name, tell)
    data = prepared_data(options, config, tokenizer, tell)
    options = with_rank(options, data, config, device, tell)
    model, _ = load_base(options.model, precision, device, tell)
    adapted = adapt(model, options.lora, tell).model
    load_adapter_state(adapted, folder / ADAPTER)
    plan = MemoryPlan.model_validate_json((folder / PLAN_FILE).read_text(encoding="utf-8"))
    carrier = carrier_for(adapted, options, data, device, tell)
    with Engine(
        adapted, None, plan, tokenizer.pad_token_id or 0, tell=tell, carrier=carrier, scheme=scheme_for(options)
    ) as engine:
        return compare(engine, adapted, data.heldout, tokenizer, options.evaluate)


def carrier_for(
    model: torch.nn.Module, options: Options, data: Prepared, device: torch.device, tell: Tell
) -> Carrier | None:
    """What carries for ``data``, which is looked at for what the model has no positions for; None without a carry."""
    if not options.carry.is_on:
        return None
    carrier = Carrier(model, options.carry, device_memory(device).total_bytes, tell)
    for rows in (data.train, data.heldout):
        if isinstance(rows, Trains):
            carrier.check_positions(rows.longest_document[0], rows.longest_segment)
    return carrier


def scheme_for(options: Options) -> Scheme | None:
    """The attention that ``options`` want, None for full.

    Raises:
        OptionError: together with a carry.
    """
    scheme = scheme_of(options.attention.scheme, options.attention.window)
    if scheme is not None and options.carry.is_on:
        raise OptionError(
            f"attention.scheme: {options.attention.scheme} and carry.policy: {options.carry.policy} both say what a "
            "token sees; choose one of them."
        )
    return scheme


def with_rank(options: Options, data: Prepared, config: Any, device: torch.device, tell: Tell) -> Options:
    """``options`` with a number where lora.rank says auto: by what the carry, or else dialogues.policy, leaves out."""
    if options.lora.rank != "auto":
        return options
    why = f"dialogues.policy {options.dialogues.policy}"
    num_read, num_left = data.account.compressed_from_tokens, data.account.compressed_to_tokens
    dropped = 1 - num_left / num_read if num_read else 0.0
    if isinstance(data.train, Trains):
        why = f"carry.policy {options.carry.policy}"
        carrier = Carrier(empty_base(config, torch.bfloat16), options.carry, device_memory(device).total_bytes)
        dropped = data.train.share_beyond(carrier.num_tokens, options.carry.retention_ratio)
    return options.model_copy(update={"lora": choose_rank(options.lora, dropped, why, tell)})


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
