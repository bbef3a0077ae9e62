"""What ``import narrowboat`` offers: train, install, meter; the rooms put together to whole jobs.

Rooms on one floor do not know each other, so what needs several of them (a run needs data, model, planner, engine,
loop and recorders) is put together here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from narrowboat import exporting, measuring, planning
from narrowboat.errors import Interrupted, said_in_words
from narrowboat.evaluation.compare import Comparison
from narrowboat.events import Event, Notice, RunEnded, Tell
from narrowboat.exporting import Onto, Wish
from narrowboat.memory.install import install
from narrowboat.model.gguf_files import GgufType
from narrowboat.monitor.recorders import Record
from narrowboat.options import load
from narrowboat.options.schema import Options
from narrowboat.owner.meter import Meter as meter
from narrowboat.planner.answer import Answer
from narrowboat.preparing import refuse_no_data
from narrowboat.running import Job, refuse_many_processes
from narrowboat.training.folder import opened
from narrowboat.training.signals import StopRequest

__all__ = ["evaluate", "export", "generate", "install", "meter", "plan_for", "push", "train"]


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
        record = Record(folder, quiet=quiet, callbacks=callbacks, monitors=options.train.monitor)
        job = Job(options, folder, record, quiet, stop)
        try:
            with job.work.in_a_sentence():
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


def push(folder: Path, name: str, private: bool = False, say: Callable[[str], None] = print) -> str:
    """Upload the adapter of the run in ``folder`` to the hub's repository ``name`` (owner/name); its address.

    Raises:
        OptionError: ``name`` is no name of a repository.
        CheckpointError: there is no whole adapter in ``folder``.
        MachineError: the hub cannot be reached, or refuses.
    """

    def tell(event: Event) -> None:
        if isinstance(event, Notice):
            say(event.text)

    return exporting.push(folder, name, private, tell)


@said_in_words()
def evaluate(
    folder: Path,
    tell: Tell = lambda event: None,
    data: Sequence[str] = (),
    base: str = "",
    num_answers: int | None = None,
) -> Comparison:
    """Measure an adapter against its base model: loss, perplexity by place, answers and their scores.

    Args:
        folder: a run's, measured under its own options, or an adapter's.
        tell: hears notices.
        data: files to measure on; the run's held-out data if empty.
        base: the model, if the adapter does not say.
        num_answers: most that are generated; as the run's ``evaluate.answers`` if None.

    Raises:
        OptionError: the folder holds neither run nor adapter, or there is nothing to measure on.
        NarrowboatError: what else was refused.
    """
    return measuring.measure(measuring.Measurement(folder, data, base, num_answers), tell)


@said_in_words()
def generate(
    folder: Path,
    messages: str | Sequence[Mapping[str, str]],
    most_tokens: int = 256,
    base: str = "",
    tell: Tell = lambda event: None,
) -> str:
    """What the model of a run, or of an adapter, answers, under the run's budget.

    Args:
        folder: the run's or the adapter's.
        messages: the question, or a dialogue as ``{"role": "user", "content": "..."}`` messages.
        most_tokens: of the answer.
        base: the model, if the adapter does not say.
        tell: hears notices.

    Raises:
        OptionError: the folder holds neither run nor adapter.
        NarrowboatError: what else was refused.
    """
    asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    with measuring.speaking(folder, tell, base) as speaker:
        return speaker.answer(asked, most_tokens)
