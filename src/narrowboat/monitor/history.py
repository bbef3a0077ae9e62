"""A run read back from ``events.jsonl``: what holds in the end, whatever was killed, resumed or repeated on the way.

A session that resumes from step n takes the run back to step n: what earlier sessions recorded after it was never
part of the run's result and is left out, with its number of steps. Lines that cannot be read are counted, not fatal:
a killed run tears its last one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from zlib import crc32

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from narrowboat import events
from narrowboat.errors import DataError

EVENTS_FILE = "events.jsonl"
EVALUATION_FILE = "evaluation.json"
_CHECK = re.compile(rb', "check": "([0-9a-f]{8})"\}$')


@dataclass
class Session:
    """From one start of the program to its end."""

    started: datetime
    resumed_from_step: int
    last_heard: datetime
    end: events.RunEnded | None = None
    is_last: bool = True

    @property
    def outcome(self) -> str:
        """``done``, ``interrupted``, ``failed``; without an end ``cut short``, or ``not ended`` if it may still run."""
        if self.end:
            return self.end.outcome
        return "not ended" if self.is_last else "cut short"

    @property
    def seconds(self) -> float:
        """Seconds as the run measured them, or up to its last event."""
        heard = (self.last_heard - self.started).total_seconds()
        return self.end.seconds if self.end else max(0.0, heard)  # a clock may be put back


@dataclass
class History:
    """What one run folder's events come to."""

    sessions: list[Session] = field(default_factory=list)
    start: events.RunStarted | None = None
    data: events.DataReady | None = None
    model: events.ModelReady | None = None
    plan: events.PlanChosen | None = None
    steps: dict[int, events.StepDone] = field(default_factory=dict)
    evaluations: dict[int, events.Evaluated] = field(default_factory=dict)
    checkpoints: dict[int, events.CheckpointSaved] = field(default_factory=dict)
    plan_changes: list[events.PlanChanged] = field(default_factory=list)
    notices: dict[str, int] = field(default_factory=dict)
    """Each text with the number of times it was said."""
    num_steps_taken_back: int = 0
    unreadable_lines: list[int] = field(default_factory=list)
    torn_at_end: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the steps that count."""
        return sum(step.num_tokens for step in self.steps.values())

    @property
    def step_seconds(self) -> float:
        """Time within steps: without loading, measuring and saving."""
        return sum(step.seconds for step in self.steps.values())

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all steps by the time within them."""
        return self.num_tokens / self.step_seconds if self.step_seconds > 0 else None

    @property
    def peak_bytes(self) -> int:
        """The highest reading of any step or session."""
        ends = [session.end.peak_bytes for session in self.sessions if session.end]
        return max([step.peak_bytes for step in self.steps.values()] + ends, default=0)

    @property
    def budget_bytes(self) -> int:
        """The last budget that was told; 0 if none was."""
        end = self.sessions[-1].end if self.sessions else None
        if end and end.budget_bytes:
            return end.budget_bytes
        if self.steps:
            return self.steps[max(self.steps)].budget_bytes
        return self.plan.budget_bytes if self.plan else 0

    @property
    def heldout_losses(self) -> tuple[float | None, float | None]:
        """The first and the last held-out loss; the second is None if there was only one."""
        if self.evaluations:
            first, last = min(self.evaluations), max(self.evaluations)
            return self.evaluations[first].loss, self.evaluations[last].loss if last > first else None
        end = self.sessions[-1].end if self.sessions else None
        return (end.first_heldout_loss, end.last_heldout_loss) if end else (None, None)

    @property
    def strange_losses(self) -> list[int]:
        """Steps whose loss was not a finite number."""
        return sorted(step.step for step in self.steps.values() if not math.isfinite(step.loss))

    def summary(self) -> dict[str, Any]:
        """The run in a few numbers, for machines."""
        first, last = self.heldout_losses
        return {
            "outcome": self.sessions[-1].outcome if self.sessions else "not ended",
            "steps": max(self.steps, default=0),
            "tokens": self.num_tokens,
            "seconds": sum(session.seconds for session in self.sessions),
            "tokens_per_second": self.tokens_per_second,
            "first_heldout_loss": first,
            "last_heldout_loss": last,
            "peak_bytes": self.peak_bytes,
            "budget_bytes": self.budget_bytes,
        }

    def _take(self, event: events.Event, time: datetime) -> None:
        if isinstance(event, events.RunStarted) or not self.sessions:
            resumed_from = event.resumed_from_step if isinstance(event, events.RunStarted) else 0
            if self.sessions:
                self.sessions[-1].is_last = False
            self.sessions.append(Session(time, resumed_from, time))
        self.sessions[-1].last_heard = time
        match event:
            case events.RunStarted():
                self.start = event
                self._take_back_to(event.resumed_from_step)
            case events.DataReady():
                self.data = event
            case events.ModelReady():
                self.model = event
            case events.PlanChosen():
                self.plan = event
            case events.StepDone():
                self.num_steps_taken_back += event.step in self.steps
                self.steps[event.step] = event
            case events.Evaluated():
                self.evaluations[event.step] = event
            case events.CheckpointSaved():
                self.checkpoints[event.step] = event
            case events.PlanChanged():
                self.plan_changes.append(event)
            case events.Notice():
                self.notices[event.text] = self.notices.get(event.text, 0) + 1
            case events.RunEnded():
                self.sessions[-1].end = event

    def _take_back_to(self, step: int) -> None:
        self.num_steps_taken_back += sum(number > step for number in self.steps)
        self.steps = {number: event for number, event in self.steps.items() if number <= step}
        self.evaluations = {number: event for number, event in self.evaluations.items() if number <= step}
        self.checkpoints = {number: event for number, event in self.checkpoints.items() if number <= step}
        self.plan_changes = [event for event in self.plan_changes if event.step <= step]


def read_history(path: Path) -> History:
    """Read an ``events.jsonl``.

    Raises:
        DataError: if there is no such file, or no line of it can be read.
    """
    history = History()
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        reason = (
            "there is no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        )
        raise DataError(f"{path}: {reason}. Name a run folder, the one that train.folder named.") from None
    history.torn_at_end = bool(lines[-1])
    for number, event, time in _parse(lines):
        if event is None:
            history.unreadable_lines.append(number)
        else:
            history._take(event, time)
    if not history.sessions:
        raise DataError(f"{path}: none of its {len(history.unreadable_lines)} lines is an event of a run.")
    history.steps = dict(sorted(history.steps.items()))
    return history


def checked_line(line: bytes) -> bytes:
    """A JSON object on a line, with the check sum of that line (CRC-32) as its last field."""
    return line[:-1] + b', "check": "%08x"}' % crc32(line)


def _is_as_written(line: bytes) -> bool:
    found = _CHECK.search(line)
    return found is not None and int(found[1], 16) == crc32(line[: found.start()] + b"}")


def _parse(lines: list[bytes]) -> Iterator[tuple[int, events.Event | None, datetime]]:
    """Each line's number, event and time; None for a line that is no event that we know."""
    kinds = {kind.__name__: TypeAdapter(kind) for kind in events.Event.__subclasses__()}
    are_checked = any(map(_CHECK.search, lines))  # other tools' are not; a damaged one of ours may look so
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            if are_checked and not _is_as_written(line):
                raise ValueError("damaged")
            record = from_json(line)
            time = datetime.fromisoformat(record["time"])
            yield number, kinds[record["event"]].validate_python(record), time
        except (ValueError, KeyError, TypeError, ValidationError):
            yield number, None, datetime.min
