"""What ``import narrowboat`` offers: train, install, meter; the rooms put together to whole jobs.

Rooms on one floor do not know each other, so what needs several of them (a run needs data, model, planner, engine,
loop and recorders) is put together here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from narrowboat import planning
from narrowboat.engine.engine import Engine
from narrowboat.errors import Interrupted, OptionError
from narrowboat.evaluation.compare import Comparison, compare
from narrowboat.events import Event, Notice, RunEnded, Tell
from narrowboat.machine.hardware import pick_device
from narrowboat.machine.precision import choose_precision
from narrowboat.memory.install import install
from narrowboat.memory.meter import Meter as meter
from narrowboat.model.adapters import adapt, load_adapter_state
from narrowboat.model.base import hush_transformers, load_base, load_config, load_tokenizer
from narrowboat.model.export import base_of, copy_adapter, merge
from narrowboat.monitor.recorders import open_recorders
from narrowboat.options import load
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan
from narrowboat.planner.answer import Answer
from narrowboat.preparing import prepared_data, refuse_no_data
from narrowboat.running import ADAPTER, CHECKPOINTS, OPTIONS_FILE, PLAN_FILE, Job
from narrowboat.settling import carrier_for, scheme_for, with_rank
from narrowboat.training.checkpoint import newest_checkpoint

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


def _refuse_other_run(folder: Path, resume: bool) -> None:
    if not resume and (folder / CHECKPOINTS).is_dir() and any((folder / CHECKPOINTS).iterdir()):
        raise OptionError(
            f"{folder} holds the checkpoints of another run; go on with --resume, or name another train.folder."
        )
