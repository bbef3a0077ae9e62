"""What ``import narrowboat`` offers: plan, train, evaluate, generate, export and push, each as one function.

The functions are thin: the modules below this one do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

from narrowboat import exporting, measuring, planning
from narrowboat.distributed.processes import joined
from narrowboat.errors import Interrupted, Mistake, OptionError, said_in_words
from narrowboat.evaluation.compare import Comparison
from narrowboat.events import Event, Notice, RunEnded, Tell
from narrowboat.exporting import Onto, Wish
from narrowboat.memory.install import install
from narrowboat.model.gguf_files import GgufType
from narrowboat.monitor.recorders import NoRecord, Record
from narrowboat.options import load
from narrowboat.options.judge import of_processes
from narrowboat.options.schema import Options
from narrowboat.owner.meter import Meter as meter
from narrowboat.planner.answer import Answer
from narrowboat.preparing import refuse_no_data
from narrowboat.running import Job
from narrowboat.training.folder import opened
from narrowboat.training.signals import StopRequest

__all__ = ["evaluate", "export", "generate", "install", "meter", "plan_for", "push", "train"]


def plan_for(options: Options, num_tokens: int | None = None, card: str = "") -> Answer:
    """Find the fastest plan that fits for a row of ``num_tokens``, and its neighbours, on this machine or on a card.

    Args:
        options: the options of the run. No weight is read, and a model of the catalogue needs no download.
        num_tokens: length of the row; None finds the longest row that fits.
        card: a name of the catalogue, such as rtx-4090; empty plans for this machine.

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
        callbacks: each is called with every event (``events.py``). One that raises is not called again; a notice says
            so.

    Raises:
        NarrowboatError: a subclass says what was refused. A refusal comes before anything in the folder is changed.
        RankError: another process of the run failed or is gone.
        Interrupted: a signal came, or ``train.max_minutes`` are over; the run is saved.
    """
    options = load.of(options)
    refuse_no_data(options)
    folder, minutes = Path(options.train.folder), options.train.max_minutes
    resume = resume or bool(resume_anyway)
    with ExitStack() as stack:
        ranks = stack.enter_context(joined(options.parallel.data))
        _refuse_what_many_cannot(options, ranks.num)
        if ranks.rank == 0:
            stack.enter_context(opened(folder, resume))
        stop = stack.enter_context(StopRequest(None if minutes is None else 60 * minutes))
        ranks.meet()  # the folder is open
        record = (
            NoRecord(folder)
            if ranks.rank
            else Record(folder, quiet=quiet, callbacks=callbacks, monitors=options.train.monitor)
        )
        job = Job(options, folder, record, quiet or bool(ranks.rank), stop, ranks)
        try:
            with job.work.in_a_sentence():
                return job.run(resume, resume_anyway)
        except BaseException as error:
            job.end("interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed", error)
            raise
        finally:
            record.close()


def _refuse_what_many_cannot(options: Options, num: int) -> None:
    mistakes = [Mistake("torchrun", key, num, problem) for key, problem in of_processes(options, num)]
    if mistakes:
        raise OptionError(mistakes)


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
    """Write a run's model with the adapter merged into it to ``out``, or the adapter alone. Return what was written.

    Args:
        folder: a run's folder, or a PEFT adapter's.
        out: must not exist, or be empty.
        merged: True merges the adapter into the base; False writes the adapter alone.
        base: the base model; empty takes the one that the run or the adapter's configuration names.
        say: receives notices.
        onto: for a base that was quantised in training: ``dequantised`` merges into the weights that the adapter was
            trained on, ``original`` into the weights as they were before quantising.
        gguf: also write a GGUF file of this type.
        host_bytes: limit of host memory, in bytes.
        verified: load the merged model back and compare its logits with those of base and adapter.

    Raises:
        CheckpointError: there is no whole adapter in ``folder``, or ``out`` cannot be written.
        ModelError: the adapter cannot be merged into this base.
    """

    def tell(event: Event) -> None:
        if isinstance(event, Notice):
            say(event.text)

    return exporting.export(folder, out, Wish(merged, base, onto, gguf, host_bytes, verified), tell)


def push(folder: Path, name: str, private: bool = False, say: Callable[[str], None] = print) -> str:
    """Upload the adapter of the run in ``folder`` to the hub's repository ``name`` (owner/name). Return its address.

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
        folder: a run's folder (measured under the run's options) or an adapter's folder.
        tell: receives notices.
        data: files to measure on; empty takes the run's held-out data.
        base: the base model, where the adapter does not name it.
        num_answers: how many answers to generate at most; None takes the run's ``evaluate.answers``.

    Raises:
        OptionError: the folder holds neither run nor adapter, or there is nothing to measure on.
        NarrowboatError: any other refusal.
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
    """Generate the answer of a run's model, or of an adapter's, within the run's memory budget.

    Args:
        folder: a run's folder or an adapter's folder.
        messages: the question, or a dialogue as ``{"role": "user", "content": "..."}`` messages.
        most_tokens: longest answer, in tokens.
        base: the base model, where the adapter does not name it.
        tell: receives notices.

    Raises:
        OptionError: the folder holds neither run nor adapter.
        NarrowboatError: any other refusal.
    """
    asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    with measuring.speaking(folder, tell, base) as speaker:
        return speaker.answer(asked, most_tokens)
