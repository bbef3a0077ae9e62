"""The foot of the terminal: where the run is, where its step is, and what memory and machine hold.

Drawn anew for the terminal's present width, twice a second; each line is cut to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from narrowboat.events import PlanChanged
from narrowboat.monitor.pace import Pace
from narrowboat.monitor.view import View
from narrowboat.monitor.wording import memory_words
from narrowboat.units import format_seconds

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE_STEPS = 24


class Foot:
    """What is known of the run so far, and how it is drawn.

    Attributes:
        pace: hears each step.
        view: eyes on the run; None before there is a model.
        tokens_per_second: as forecast.
        budget_bytes: of the device.
        change: the last change of plan.
    """

    def __init__(self) -> None:
        self.pace = Pace()
        self.view: View | None = None
        self.tokens_per_second: float | None = None
        self.budget_bytes = 0
        self.change: PlanChanged | None = None
        self._started = time.monotonic()

    @property
    def step(self) -> int:
        """The number of the step under way."""
        return 1 if self.pace.last is None else self.pace.last.step + 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(10, min(40, options.max_width - 40))
        yield self._run_line(width)
        if self.view is not None and self.view.underway.work:
            yield self._step_line(self.view, width)
        if self.pace.last is not None:
            yield self._loss_line(options.max_width, console.encoding.lower().startswith("utf"))
        if self.view is not None:
            words = [self.view.memory_words(self.budget_bytes), self.view.vitals_words(), *self._last_words()]
            yield from (_row(line) for line in words if line)

    def _run_line(self, width: int) -> Table:
        last = self.pace.last
        left_of_step = None if self.view is None else self.view.underway.seconds_left
        if last is None:
            waited = format_seconds(round(time.monotonic() - self._started))
            return _row(ProgressBar(total=None, width=width, pulse=True), f"first step, {waited} so far")
        is_over = last.step >= last.num_steps
        left = "finishing" if is_over else f"{format_seconds(self.pace.seconds_left(left_of_step))} left"
        return _row(
            bar(last.step, max(1, last.num_steps), width), f"step {last.step:,}/{last.num_steps:,} done   {left}"
        )

    def _step_line(self, view: View, width: int) -> Table:
        underway = view.underway
        name = f"step {self.step:,}" if underway.work == "step" else underway.work
        words = f"{name}: {underway.words()}, {format_seconds(underway.seconds)}"
        return _row(bar(underway.share, 1.0, width, "blue"), words)

    def _loss_line(self, max_width: int, can_spell: bool) -> Table:
        last, pace = self.pace.last, self.pace
        assert last is not None
        spark = f" {sparkline(list(pace.losses)[-SPARKLINE_STEPS:])}" if can_spell and max_width >= 80 else ""
        foreseen = self.tokens_per_second
        share = f" ({100 * pace.tokens_per_second / foreseen:.0f} % of the forecast)" if foreseen else ""
        memory = f"peak {memory_words(last.peak_bytes, last.budget_bytes)}"
        words = f"loss {pace.loss:.4f}{spark}   {pace.tokens_per_second:,.0f} tokens/s{share}   {memory}"
        if last.budget_bytes and max_width >= len(words) + 14:
            style = "red" if last.peak_bytes > last.budget_bytes else "cyan"
            return _row(words, bar(last.peak_bytes, last.budget_bytes, 12, style))
        return _row(words)

    def _last_words(self) -> Iterator[str]:
        if self.change is not None:
            yield f"plan since step {self.change.step:,}: {self.change.new} ({self.change.reason})"


def sparkline(values: Sequence[float]) -> str:
    """A block a value, between the lowest and the highest; ``!`` for what is no number."""
    numbers = [value for value in values if math.isfinite(value)]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    steps = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((v - low) * steps)] if math.isfinite(v) else "!" for v in values)


def bar(completed: float, total: float, width: int, style: str = "cyan") -> ProgressBar:
    """A bar of its own width."""
    return ProgressBar(total, completed, width, complete_style=style, finished_style=style)


def _row(*cells: RenderableType) -> Table:
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") if isinstance(cell, str) else cell for cell in cells))
    return row
