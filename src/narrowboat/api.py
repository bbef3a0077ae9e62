"""What ``import narrowboat`` offers: train, install, meter; the rooms put together to whole jobs.

Rooms on one floor do not know each other, so what needs several of them (a run needs data, model, planner, engine,
loop and recorders) is put together here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from narrowboat import planning
from narrowboat.assembly import Setting, Wanted, assembled
from narrowboat.choosing import choose
from narrowboat.errors import Interrupted, OptionError
from narrowboat.evaluation.compare import Comparison, compare, refuse_nothing_held_out
from narrowboat.events import Event, Notice, RunEnded, Tell
from narrowboat.memory.install import install
from narrowboat.model.adapters import load_adapter_state
from narrowboat.model.export import base_of, copy_adapter, merge
from narrowboat.monitor.recorders import open_recorders
from narrowboat.options import load
from narrowboat.options.schema import Options
from narrowboat.owner.meter import Meter as meter
from narrowboat.planner.answer import Answer
from narrowboat.preparing import prepared_data, refuse_no_data
from narrowboat.running import ADAPTER, CHECKPOINTS, OPTIONS_FILE, Job
from narrowboat.settling import with_rank
from narrowboat.training.checkpoint import newest_checkpoint
from narrowboat.training.recovery import Recovery

__all__ = ["evaluate", "export", "install", "meter", "plan_for", "train"]


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
    job = Job(options, folder, recorders.record, quiet)
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


def evaluate(folder: Path, tell: Tell = lambda event: None) -> Comparison:
    """Measure the adapter of the run in ``folder`` against its base model, under the run's own options.

    Raises:
        OptionError: the folder holds no run.
        NarrowboatError: what else was refused.
    """
    if not (folder / OPTIONS_FILE).is_file() or not (folder / ADAPTER).is_dir():
        raise OptionError(f"{folder} holds no finished run: {OPTIONS_FILE} and {ADAPTER}/ are looked for.")
    options = load.load(folder / OPTIONS_FILE)
    found = newest_checkpoint(folder / CHECKPOINTS, tell)
    setting = Setting.of(options, tell, found[1].dtype if found else "")
    data = prepared_data(setting)
    refuse_nothing_held_out(data.heldout)
    setting = replace(setting, options=with_rank(options, data, setting.config, setting.device, tell))
    governor = choose(setting, data, trains=False)
    with assembled(setting, Wanted(governor.plan, governor.budget_bytes, trains=False, data=data)) as ready:
        load_adapter_state(ready.model, folder / ADAPTER)
        ready.gauge.begin("evaluation")
        recovery = Recovery(ready.engine, ready.gauge, governor, tell)
        return compare(ready.engine, ready.model, data.heldout, setting.tokenizer, options.evaluate, recovery.patiently)


def _refuse_other_run(folder: Path, resume: bool) -> None:
    if not resume and (folder / CHECKPOINTS).is_dir() and any((folder / CHECKPOINTS).iterdir()):
        raise OptionError(
            f"{folder} holds the checkpoints of another run; go on with --resume, or name another train.folder."
        )
