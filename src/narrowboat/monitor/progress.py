"""What one sees while a run goes on: two calm lines at the foot of the terminal, and a single line for each event.

Where the output is no terminal (a log file, a pipe) the same is told in plain lines, one a step, without control codes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from narrowboat.events import (
    CheckpointSaved,
    DataReady,
    Evaluated,
    Event,
    ModelReady,
    Notice,
    PlanChanged,
    PlanChosen,
    RunEnded,
    RunStarted,
    StepDone,
)
from narrowboat.monitor.wording import account_line, change_in_loss
from narrowboat.units import format_bytes, format_seconds

SMOOTHING = 0.9
"""Share of the past in the smoothed loss."""
RECENT_STEPS = 20
"""How many steps tokens a second and time left are taken from."""


class Pace:
    """Smoothed loss, tokens a second and time left of the sitting so far."""

    def __init__(self) -> None:
        self.last: StepDone | None = None
        self.num_tokens = 0
        self.seconds = 0.0
        self._recent: deque[StepDone] = deque(maxlen=RECENT_STEPS)
        self._loss_sum = self._loss_weight = 0.0
        self._heard = time.monotonic()

    def take(self, step: StepDone) -> None:
        """Count one more step."""
        self.last = step
        self.num_tokens += step.num_tokens
        self.seconds += step.seconds
        self._recent.append(step)
        self._heard = time.monotonic()
        if math.isfinite(step.loss):  # the weights' sum makes the first steps right, too
            self._loss_sum = SMOOTHING * self._loss_sum + (1 - SMOOTHING) * step.loss
            self._loss_weight = SMOOTHING * self._loss_weight + (1 - SMOOTHING)

    @property
    def loss(self) -> float:
        """The smoothed loss; the last one as it is while it is not a number."""
        if self.last is None or not self._loss_weight:
            return math.nan
        return self._loss_sum / self._loss_weight if math.isfinite(self.last.loss) else self.last.loss

    @property
    def tokens_per_second(self) -> float:
        """Of the last steps."""
        seconds = sum(step.seconds for step in self._recent)
        return sum(step.num_tokens for step in self._recent) / seconds if seconds > 0 else 0.0

    @property
    def overall_tokens_per_second(self) -> float:
        """Of the whole sitting, within steps."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float:
        """From the mean of the last steps, less the time since the last one."""
        if self.last is None:
            return math.nan
        mean = sum(step.seconds for step in self._recent) / len(self._recent)
        steps_left = self.last.num_steps - self.last.step
        since = min(time.monotonic() - self._heard, mean)
        return max(0.0, mean * steps_left - since) if steps_left > 0 else 0.0


class Progress:
    """The live display of a run; it never raises, and falls silent when its terminal is gone."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None
        self._pace = Pace()
        self._started = time.monotonic()
        self._silent = False

    def record(self, event: Event) -> None:
        """Show the event: a step moves the bar, everything else is a line above it."""
        if self._silent:
            return
        try:
            self._show(event)
        except (Exception, SystemExit):  # rich ends the program when its pipe is closed; a run must go on
            self._silent = True

    def close(self) -> None:
        """Leave the terminal as it was found."""
        try:
            self._stop()
        except (Exception, SystemExit):
            self._silent = True

    def _show(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._pace.take(event)
            if self._is_live():
                self._redraw()
            else:
                self._say(step_line(event, self._pace))
            return
        if isinstance(event, RunEnded):
            self._stop()
            for label, text in ending(event, self._pace):
                self._say(text, label)
            return
        told = line(event)
        if told is not None:
            self._say(told[1], told[0])
        if isinstance(event, PlanChosen | Evaluated) and self._is_live():
            self._redraw()

    def _is_live(self) -> bool:
        return self._console.is_interactive and self._console.file.isatty()

    def _say(self, text: str, label: str = "") -> None:
        """One line: no control codes from names and paths, and nothing that the terminal cannot spell."""
        words = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
        shown = (f"{label:<10}  " if label else "") + words
        shown = shown.encode(self._console.encoding, "replace").decode(self._console.encoding)
        told = Text(shown)
        if label and self._is_live():
            told.stylize("yellow" if label == "notice" else "bold", 0, len(label))
        self._console.print(told, soft_wrap=True, highlight=False)

    def _redraw(self) -> None:
        if self._live is None:
            self._live = Live(_Foot(self), console=self._console, refresh_per_second=2, transient=True)
            self._live.start()
        self._live.refresh()

    def _stop(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()


class _Foot:
    """The two lines at the foot of the terminal, drawn anew for its present width."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pace, width = self._progress._pace, options.max_width
        last = pace.last
        if last is None:
            waited = format_seconds(round(time.monotonic() - self._progress._started))
            yield _row(
                ProgressBar(total=None, width=max(10, min(40, width - 40)), pulse=True), f"first step, {waited} so far"
            )
            return
        where = f"step {last.step:,}/{last.num_steps:,}"
        left = f"{format_seconds(pace.seconds_left)} left" if last.step < last.num_steps else "finishing"
        bar = ProgressBar(total=max(1, last.num_steps), completed=last.step, width=max(10, min(40, width - 40)))
        memory = memory_words(last.peak_bytes, last.budget_bytes)
        words = f"loss {pace.loss:.4f}   {pace.tokens_per_second:,.0f} tokens/s   memory {memory}"
        rows = [_row(bar, f"{where}   {left}")]
        if last.budget_bytes and width >= len(words) + 16:
            style = "red" if last.peak_bytes > last.budget_bytes else "cyan"
            rows.append(
                _row(
                    words,
                    ProgressBar(last.budget_bytes, last.peak_bytes, 12, complete_style=style, finished_style=style),
                )
            )
        else:
            rows.append(_row(words))
        yield Group(*rows)


def _row(*cells: Any) -> Table:
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") if isinstance(cell, str) else cell for cell in cells))
    return row


def memory_words(peak_bytes: int, budget_bytes: int) -> str:
    """``5.91 GiB of 8.00 GiB``."""
    return format_bytes(peak_bytes) + (f" of {format_bytes(budget_bytes)}" if budget_bytes else "")


def step_line(step: StepDone, pace: Pace) -> str:
    """A step for a log: its own loss, not the smoothed one."""
    left = f", {format_seconds(pace.seconds_left)} left" if step.step < step.num_steps else ""
    return (
        f"step {step.step:,}/{step.num_steps:,}, loss {step.loss:.4f}, {pace.tokens_per_second:,.1f} tokens/s, "
        f"memory {memory_words(step.peak_bytes, step.budget_bytes)}{left}"
    )


def line(event: Event) -> tuple[str, str] | None:
    """An event's label and words; None for what has nothing to say here."""
    match event:
        case RunStarted():
            resumed = f", going on after step {event.resumed_from_step:,}" if event.resumed_from_step else ""
            return "run", f"{event.folder}{resumed}"
        case DataReady():
            return "data", account_line(event.account)
        case ModelReady():
            share = 100 * event.num_trainable / max(1, event.num_parameters)
            targets = ", ".join(f"{name} x {count:,}" for name, count in event.modules_by_target.items())
            return "model", (
                f"{event.name}, {event.num_parameters:,} parameters in {event.dtype} on {event.device}; "
                f"{event.num_trainable:,} trainable ({share:.2g} %): {targets or 'no modules'}"
            )
        case PlanChosen():
            forecast = sum(event.forecast_bytes.values())
            return "plan", (
                f"{event.description}; forecast {memory_words(forecast, event.budget_bytes)} "
                f"for {event.longest_tokens:,} tokens"
            )
        case PlanChanged():
            return "plan", f"from step {event.step:,}: {event.new}, was: {event.old} ({event.reason})"
        case Evaluated():
            return "held out", (
                f"loss {event.loss:.4f} after step {event.step:,}, on {event.num_supervised_tokens:,} tokens, "
                f"{format_seconds(event.seconds)}"
            )
        case CheckpointSaved():
            return "saved", f"{event.folder}, {format_bytes(event.num_bytes)}, {format_seconds(event.seconds)}"
        case Notice():
            return "notice", event.text
    return None


def ending(end: RunEnded, pace: Pace) -> list[tuple[str, str]]:
    """The closing summary, a label and its words a line."""
    lines = [
        (
            end.outcome,
            f"after step {end.step:,}, {format_seconds(end.seconds)}" + (f": {end.error}" if end.error else ""),
        )
    ]
    if end.first_heldout_loss is not None:
        lines.append(("held out", f"loss {change_in_loss(end.first_heldout_loss, end.last_heldout_loss)}"))
    if end.peak_bytes:
        share = f" ({100 * end.peak_bytes / end.budget_bytes:.0f} % of the budget)" if end.budget_bytes else ""
        lines.append(("peak", memory_words(end.peak_bytes, end.budget_bytes) + share))
    if pace.seconds:
        rate = f"{pace.overall_tokens_per_second:,.1f} tokens/s, {pace.num_tokens:,} tokens in {format_seconds(pace.seconds)} of steps"
        lines.append(("pace", rate))
    if end.adapter_folder:
        lines.append(("adapter", end.adapter_folder))
    if end.report_path:
        lines.append(("report", end.report_path))
    return lines
