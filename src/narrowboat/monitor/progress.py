"""What one sees while a run goes on: two calm lines at the foot of the terminal, and a single line for each event.

Where the output is no terminal (a log file, a pipe) the same is told in plain lines, one a step, without control codes.
"""

from __future__ import annotations

import time

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from narrowboat.events import Evaluated, Event, PlanChosen, RunEnded, StepDone
from narrowboat.monitor.pace import Pace
from narrowboat.monitor.wording import ending, line, memory_words, step_line
from narrowboat.units import format_seconds

LABEL_STYLES = {"notice": "yellow", "done": "bold green", "interrupted": "bold yellow", "failed": "bold red"}


class Progress:
    """The live display of a run; it never raises, and falls silent when its terminal is gone."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None
        self._foot = _Foot()
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
        pace = self._foot.pace
        if isinstance(event, StepDone):
            pace.take(event)
            if not self._is_live():
                self._say(step_line(event, pace))
        elif isinstance(event, RunEnded):
            self._stop()
            for label, words in ending(event, pace):
                self._say(words, label)
        elif told := line(event):
            self._say(told[1], told[0])
        if isinstance(event, StepDone | PlanChosen | Evaluated) and self._is_live():
            self._redraw()

    def _is_live(self) -> bool:
        return self._console.is_interactive and self._console.file.isatty()

    def _say(self, words: str, label: str = "") -> None:
        """One line: no control codes out of names and paths, and nothing that the terminal cannot spell."""
        words = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(words.split()))
        told = f"{label:<10}  {words}" if label else words
        text = Text(told.encode(self._console.encoding, "replace").decode(self._console.encoding))
        if self._is_live():
            text.stylize(LABEL_STYLES.get(label, "bold"), 0, len(label))
        self._console.print(text, soft_wrap=True, highlight=False)

    def _redraw(self) -> None:
        if self._live is None:
            self._live = Live(self._foot, console=self._console, refresh_per_second=2, transient=True)
            self._live.start()
        self._live.refresh()

    def _stop(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()


class _Foot:
    """The two lines at the foot of the terminal, drawn anew for its present width."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._started = time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        last = self.pace.last
        bar_width = max(10, min(40, options.max_width - 40))
        if last is None:
            waited = format_seconds(round(time.monotonic() - self._started))
            yield _row(ProgressBar(total=None, width=bar_width, pulse=True), f"first step, {waited} so far")
            return
        left = f"{format_seconds(self.pace.seconds_left)} left" if last.step < last.num_steps else "finishing"
        bar = _bar(last.step, max(1, last.num_steps), bar_width)
        yield _row(bar, f"step {last.step:,}/{last.num_steps:,}   {left}")
        rate = f"{self.pace.tokens_per_second:,.0f} tokens/s"
        words = f"loss {self.pace.loss:.4f}   {rate}   memory {memory_words(last.peak_bytes, last.budget_bytes)}"
        if last.budget_bytes and options.max_width >= len(words) + 14:
            style = "red" if last.peak_bytes > last.budget_bytes else "cyan"
            yield _row(words, _bar(last.peak_bytes, last.budget_bytes, 12, style))
        else:
            yield _row(words)


def _bar(completed: float, total: float, width: int, style: str = "cyan") -> ProgressBar:
    return ProgressBar(total, completed, width, complete_style=style, finished_style=style)


def _row(*cells: RenderableType) -> Table:
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") if isinstance(cell, str) else cell for cell in cells))
    return row
