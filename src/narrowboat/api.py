"""What ``import narrowboat`` offers: train, install, meter; the rooms put together to whole jobs.

Rooms on one floor do not know each other, so what needs several of them (a run needs data, model, planner, engine,
loop and recorders) is put together here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from narrowboat import exporting, planning
from narrowboat.assembly import Setting, Wanted, assembled
from narrowboat.choosing import choose
from narrowboat.errors import Interrupted, OptionError, said_in_words
from narrowboat.evaluation.compare import Comparison, compare, refuse_nothing_held_out
from narrowboat.events import Event, Notice, RunEnded, Tell
from narrowboat.exporting import Onto, Wish
from narrowboat.memory.install import install
from narrowboat.model.gguf_files import GgufType
from narrowboat.model.saved import load_adapter_state
from narrowboat.monitor.recorders import Record
from narrowboat.options import load
from narrowboat.options.schema import Options
from narrowboat.owner.meter import Meter as meter
from narrowboat.planner.answer import Answer
from narrowboat.preparing import prepared_data, refuse_no_data
from narrowboat.running import Job, refuse_many_processes
from narrowboat.settling import with_rank
from narrowboat.training.checkpoint import newest_checkpoint
from narrowboat.training.folder import ADAPTER, CHECKPOINTS, OPTIONS_FILE, opened
from narrowboat.training.recovery import Recovery
from narrowboat.training.signals import StopRequest

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


def train(
    options: Options | Mapping[str, Any] | str | PathLike[str],
    resume: bool = False,
    quiet: bool = False,
    resume_anyway: Sequence[str] = (),
    callbacks: Sequence[Tell] = (),
) -> RunEnded:
    """Train an adapter as ``options`` say and leave it in ``train.folder``/adapter.

    Args:
        options: a file's path, ``{"lora": {"rank": 16}}`` or ``{"lora.rank": 16}``, or what ``options.load`` gives.
        resume: go on from the newest whole checkpoint in the folder.
        quiet: show no progress; files are written all the same.
        resume_anyway: go on although these differ from what the checkpoint was made with: options (``lora.alpha``),
            or ``data``, ``weights``, ``tokenizer``.
        callbacks: each is called with every event (``events.py``); one that fails hears no more, which is told.

    Raises:
        NarrowboatError: its kinds say what was refused, before which nothing in the folder has changed;
            ``Interrupted`` after a signal or ``train.max_minutes``, when the run is saved.
    """
    options = load.of(options)
    refuse_no_data(options)
    refuse_many_processes()
    folder, minutes = Path(options.train.folder), options.train.max_minutes
    resume = resume or bool(resume_anyway)
    with opened(folder, resume), StopRequest(None if minutes is None else 60 * minutes) as stop:
        record = Record(folder, quiet=quiet, callbacks=callbacks)
        job = Job(options, folder, record, quiet, stop)
        try:
            with job.unforeseen_in_a_sentence(), said_in_words():
                return job.run(resume, resume_anyway)
        except BaseException as error:
            job.end("interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed", error)
            raise
        finally:
            record.close()


@said_in_words()
def export(
    folder: Path,
    out: Path,
    merged: bool = True,
    base: str = "",
    say: Callable[[str], None] = print,
    onto: Onto = "dequantised",
    gguf: GgufType | None = None,
    host_bytes: int | None = None,
    verified: bool = True,
) -> dict[str, Any]:
    """Write the model of a run with its adapter added in to ``out``, or the adapter alone; what was written.

    Args:
        folder: a run's folder, or a PEFT adapter's.
        out: must not exist, or be empty.
        merged: whether to add the adapter to the base.
        base: the model; that of the run or of the adapter's configuration if empty.
        say: hears notices.
        onto: for a base that was quantised in training: what the adapter learnt on, or what it was before.
        gguf: write a GGUF file of this type as well.
        host_bytes: of host memory that may be taken.
        verified: whether the merged model is loaded back and its logits compared.

    Raises:
        CheckpointError: there is no whole adapter in ``folder``, or ``out`` cannot be written.
        ModelError: the base cannot be merged with.
    """

    def tell(event: Event) -> None:
        if isinstance(event, Notice):
            say(event.text)

    return exporting.export(folder, out, Wish(merged, base, onto, gguf, host_bytes, verified), tell)


@said_in_words()
def evaluate(folder: Path, tell: Tell = lambda event: None) -> Comparison:
    """Measure the adapter of the run in ``folder`` against its base model, under the run's own options.

    Raises:
        OptionError: the folder holds no run.
        NarrowboatError: what else was refused.
    """
    if not (folder / OPTIONS_FILE).is_file() or not (folder / ADAPTER).is_dir():
        raise OptionError(f"{folder} holds no finished run: {OPTIONS_FILE} and {ADAPTER}/ are looked for.")
    options = load.load_back(folder / OPTIONS_FILE, tell)
    found = newest_checkpoint(folder / CHECKPOINTS, tell)
    setting = Setting.of(options, tell, found[1].dtype if found else "")
    data = prepared_data(setting)
    refuse_nothing_held_out(data.heldout)
    setting = replace(setting, options=with_rank(options, data, setting.config, setting.device, tell))
    governor = choose(setting, data, trains=False)
    with assembled(setting, Wanted(governor.plan, governor.budget_bytes, trains=False, data=data)) as ready:
        load_adapter_state(ready.model, folder / ADAPTER, tell)
        ready.gauge.begin("evaluation")
        recovery = Recovery(ready.engine, ready.gauge, governor, tell)
        return compare(ready.engine, ready.model, data.heldout, setting.tokenizer, options.evaluate, recovery.patiently)
