"""Where events go: a fan-out that outlives a failing recorder, and the run's own record, ``events.jsonl``.

Recorders know neither loop nor engine: they are told values. A disk that fills up, a closed terminal or a missing
library must not end a night's run, so a recorder that fails is dropped, and the others are told so once.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowboat.events import Event, Notice, Recorder, Tell
from narrowboat.monitor.history import EVENTS_FILE, checked_line

if TYPE_CHECKING:
    from rich.console import Console

    from narrowboat.monitor.view import View


class Record:
    """A run's recorders: the display at once, the files in its folder only from ``begin`` on.

    Until a run has passed all checks nothing of an earlier one in its folder may change; what is told before that is
    written down then, each event with the time at which it was told.

    Args:
        folder: the run folder. A resumed run appends to what lies in it.
        console: where progress goes; the standard output if not given.
        quiet: no progress display.
        callbacks: hear of every event at once.
        monitors: who draws curves: tensorboard, wandb, mlflow.

    Raises:
        MachineError: the library of one of them is not installed.
    """

    def __init__(
        self,
        folder: Path,
        console: Console | None = None,
        quiet: bool = False,
        callbacks: Iterable[Tell] = (),
        monitors: Sequence[str] = ("tensorboard",),
    ) -> None:
        from narrowboat.monitor.progress import Progress

        self._folder = folder
        self._monitors = [_monitor(name, folder) for name in monitors]
        self._progress = None if quiet else Progress(console)
        shown = [] if self._progress is None else [self._progress]
        self._fanout = Fanout([*shown, *map(_Callback, callbacks)])
        self._waiting: list[tuple[Event, datetime]] | None = []

    def record(self, event: Event) -> None:
        """Tell everyone."""
        if self._waiting is not None:
            self._waiting.append((event, datetime.now(UTC)))
        self._fanout.record(event)

    def watch(self, view: View) -> None:
        """Let the display look at ``view``."""
        if self._progress is not None:
            self._progress.watch(view)

    @property
    def has_begun(self) -> bool:
        """Whether files are written."""
        return self._waiting is None

    def begin(self) -> None:
        """Open ``events.jsonl`` and what the monitors write, and write down what was told so far.

        Raises:
            OSError: if ``events.jsonl`` cannot be opened: a run that cannot be written down should not start.
        """
        from narrowboat.monitor.report import ReportPage

        if self._waiting is None:
            return
        lines = JsonLines(self._folder / EVENTS_FILE)
        files = Fanout([lines, *self._monitors, ReportPage(self._folder)])
        waiting, self._waiting = self._waiting, None
        for event, told_at in waiting:
            lines.told_at = told_at
            files.record(event)
        lines.told_at = None
        self._fanout.join(files)

    def close(self) -> None:
        """Close everyone."""
        self._fanout.close()


class NoRecord(Record):
    """Of a rank that does not write: rank 0 does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, quiet=True, monitors=())

    def begin(self) -> None:
        """Nothing is written."""
        self._waiting = None


def _monitor(name: str, folder: Path) -> Recorder:
    if name == "wandb":
        from narrowboat.monitor.wandb_runs import WandbRuns

        return WandbRuns(folder)
    if name == "mlflow":
        from narrowboat.monitor.mlflow_runs import MlflowRuns

        return MlflowRuns(folder)
    from narrowboat.monitor.tensorboard import TensorBoard

    return TensorBoard(folder / "tensorboard")


class Fanout:
    """Sends an event to all recorders; its ``record`` is the ``Tell`` of a run."""

    def __init__(self, recorders: Iterable[Recorder]) -> None:
        self._recorders = list(recorders)

    def record(self, event: Event) -> None:
        """Tell everyone. Whoever fails hears no more, and the others hear of that."""
        failures = []
        for recorder in self._recorders:
            try:
                recorder.record(event)
            except Exception as error:  # whatever it is, the run is worth more than its record
                failures.append((recorder, error))
        self._drop(failures)

    def close(self) -> None:
        """Close everyone, in order; the last to close hear of those that failed to."""
        while self._recorders:
            recorder = self._recorders.pop(0)
            try:
                recorder.close()
            except Exception as error:
                self.record(_lost(recorder, error))

    def join(self, others: Fanout) -> None:
        """Tell those of ``others`` first from here on."""
        self._recorders = others._recorders + self._recorders

    def _drop(self, failures: list[tuple[Recorder, Exception]]) -> None:
        for recorder, _ in failures:
            self._recorders.remove(recorder)
            with suppress(Exception):
                recorder.close()
        for recorder, error in failures:
            notice = _lost(recorder, error)
            if self._recorders:
                self.record(notice)
            else:
                with suppress(OSError):
                    print(notice.text, file=sys.stderr)


@dataclass(frozen=True)
class _Callback:
    """Somebody's function as a recorder."""

    record: Tell

    def close(self) -> None:
        """Nothing is open."""


class JsonLines:
    """One event a line, each flushed: what a killed run has written stays readable.

    A resumed run appends. Numbers that JSON lacks are written as ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. Each
    line ends with a check sum of what stands before it. ``told_at`` is the time of what is recorded, None for now.
    """

    def __init__(self, path: Path) -> None:
        self.told_at: datetime | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # killed within a line: the next one starts on its own
                self._file.write(b"\n")

    def record(self, event: Event) -> None:
        """Append one line: the event, and the wall-clock time in UTC."""
        told_at = self.told_at or datetime.now(UTC)
        line = event.as_dict() | {"time": told_at.isoformat(timespec="milliseconds")}
        self._file.write(checked_line(json.dumps(_plain(line), ensure_ascii=False, allow_nan=False).encode()) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _plain(value: Any) -> Any:
    """What every JSON reader can take."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()  # a file's name may hold what UTF-8 does not
        case Mapping():
            return {_plain(str(key)): _plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case None | bool() | int() | float():
            return value
        case _:
            return _plain(str(value))


def _lost(recorder: Recorder, error: Exception) -> Notice:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Notice(
        f"The recorder {type(recorder).__name__} failed and is left out from here on ({reason}). The run goes on."
    )
