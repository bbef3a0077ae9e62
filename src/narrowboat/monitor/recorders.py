"""Where events go: a fan-out that outlives a failing recorder, and the run's own record, ``events.jsonl``.

Recorders know neither loop nor engine: they are told values. A disk that fills up, a closed terminal or a missing
library must not end a night's run, so a recorder that fails is dropped, and the others are told so once.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowboat.events import Event, Notice, Recorder
from narrowboat.monitor.history import EVENTS_FILE

if TYPE_CHECKING:
    from rich.console import Console


def open_recorders(folder: Path, console: Console | None = None, quiet: bool = False) -> Fanout:
    """All recorders of a run: ``events.jsonl``, ``tensorboard/``, ``report.html``, and the progress display.

    Args:
        folder: the run folder; it is made if it is not there. A resumed run appends to what lies in it.
        console: where progress goes; the standard output if not given.
        quiet: no progress display.

    Raises:
        OSError: if ``events.jsonl`` cannot be opened: a run that cannot be written down should not start.
    """
    from narrowboat.monitor.progress import Progress
    from narrowboat.monitor.report import ReportPage
    from narrowboat.monitor.tensorboard import TensorBoard

    recorders: list[Recorder] = [
        JsonLines(folder / EVENTS_FILE),
        TensorBoard(folder / "tensorboard"),
        ReportPage(folder),
    ]
    if not quiet:
        recorders.append(Progress(console))
    return Fanout(recorders)


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


class JsonLines:
    """One event a line, each flushed: what a killed run has written stays readable.

    A resumed run appends. Numbers that JSON lacks are written as ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # killed within a line: the next one starts on its own
                self._file.write(b"\n")

    def record(self, event: Event) -> None:
        """Append one line: the event, and the wall-clock time in UTC."""
        line = event.as_dict() | {"time": datetime.now(UTC).isoformat(timespec="milliseconds")}
        self._file.write(json.dumps(_plain(line), ensure_ascii=False, allow_nan=False).encode() + b"\n")
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
