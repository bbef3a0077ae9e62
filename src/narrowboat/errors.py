"""Every error that Narrowboat raises. Its message says a fact, its numbers and the next action.

NarrowboatError                     exit code 1
├── OptionError                     2   a mistake in the configuration; all of them are reported together
├── DataError                       1   a file or record that cannot be used
├── ModelError                      1   a model or adapter that cannot be loaded or trained
│   └── AnatomyError                1   a model whose structure is not understood
├── BudgetError                     3   no plan fits the budget
├── OutOfMemory                     3   memory ran out although the plan should have fitted
├── CheckpointError                 1   a checkpoint that cannot be written or read
├── MachineError                    1   a device, driver or disk that cannot do what was asked
├── RankError                       1   another process of the run failed or is gone
└── Interrupted                     130 or 143   stopped by a signal, after saving
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches

MAX_SHOWN = 400
"""Characters of a wrong value that a message shows."""

NO_HOST_MEMORY = ("DefaultCPUAllocator", "can't start new thread")
"""What a ``RuntimeError`` says when it is about host memory."""


class NarrowboatError(Exception):
    """The base class: catch it to catch every refusal of Narrowboat."""

    exit_code = 1


@dataclass(frozen=True)
class Mistake:
    """One wrong entry of a configuration: its place, key and value, and what is wrong with it."""

    where: str
    key: str
    value: object
    problem: str

    def __str__(self) -> str:
        where, key, problem = cut(self.where), cut(self.key), cut(self.problem)
        return f"{where}: {key} = {cut(repr(self.value))}: {problem}"


class OptionError(NarrowboatError):
    """One or many mistakes in a configuration, found before anything was loaded."""

    exit_code = 2

    def __init__(self, mistakes: Iterable[Mistake] | str) -> None:
        self.mistakes = [] if isinstance(mistakes, str) else list(mistakes)
        lines = [mistakes] if isinstance(mistakes, str) else [str(m) for m in self.mistakes]
        super().__init__("\n".join(lines))


class DataError(NarrowboatError):
    """A file or record that cannot be used; the message names file and line."""


class ModelError(NarrowboatError):
    """A model or adapter that cannot be loaded or trained."""


class AnatomyError(ModelError):
    """A model whose embedding, layers, norm or head were not found, or a layer that cannot be tiled."""


class BudgetError(NarrowboatError):
    """No plan fits the budget; the message names the thriftiest plan, its largest part and the option that would
    help.
    """

    exit_code = 3


class OutOfMemory(NarrowboatError):
    """Memory ran out under the thriftiest plan."""

    exit_code = 3


class CheckpointError(NarrowboatError):
    """A checkpoint that cannot be written or read; earlier ones stay whole."""


class MachineError(NarrowboatError):
    """A device, driver or disk that cannot do what was asked."""


class RankError(NarrowboatError):
    """Another process of the run failed or is gone; ``kind`` is the memory that ran out there, ``given up``, ``lost``
    or empty.
    """

    def __init__(self, words: str, kind: str = "") -> None:
        self.kind = kind
        super().__init__(words)


class Interrupted(NarrowboatError):
    """Stopped by SIGINT or SIGTERM after the step in progress was finished and saved."""

    def __init__(self, signal_number: int, saved: str) -> None:
        self.exit_code = 128 + signal_number
        name = signal.Signals(signal_number).name
        super().__init__(f"Stopped by {name}; the run is saved in {saved}. Continue it with --resume.")


@contextmanager
def said_in_words() -> Iterator[None]:
    """Turn errors of the system (memory, files) that were not handled inside into a ``NarrowboatError``.

    Raises:
        OutOfMemory: host memory ran out.
        MachineError: a file could not be created, read or written; the message names it.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in NO_HOST_MEMORY):
            raise
        reason = str(error).partition("\n")[0] or "no room for another object"
        raise OutOfMemory(f"Host memory ran out: {cut(reason)}. Free some, or give this process more.") from error
    except OSError as error:
        reason, place = error.strerror or str(error) or type(error).__name__, error.filename
        raise MachineError(f"{cut(str(place))}: {reason}" if place else reason) from error


def cut(text: str) -> str:
    """``text`` for a message: only its beginning where it is longer than ``MAX_SHOWN`` characters."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text):,} characters)"


def first_line(error: Exception) -> str:
    """The first line of an error from another library; the error's class where its message is empty."""
    return cut((str(error).strip() or type(error).__name__).splitlines()[0])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``". Did you mean 'rank'?"``, or an empty string when no known name is similar."""
    near = get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f". Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
