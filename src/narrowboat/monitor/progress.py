"""What one sees while a run goes on: a calm foot of the terminal that shows where the step is, and a line an event.

Where the output is no terminal (a log file, a pipe) the same is told in plain lines without control codes, of steps one
a minute, also within a long one. A thread of its own looks twice a second: being asked to stop is acknowledged there at
once, whatever the thread that works is busy with. Price: well below 1 % of one core (``benchmarks/overhead.py``).
"""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from narrowboat.events import Evaluated, Event, PlanChanged, PlanChosen, RunEnded, StepDone
from narrowboat.monitor.foot import Foot
from narrowboat.monitor.view import View
from narrowboat.monitor.wording import ending, line, step_line
from narrowboat.units import format_seconds

LABEL_STYLES = {"notice": "yellow", "done": "bold green", "interrupted": "bold yellow", "failed": "bold red"}
LOOK_SECONDS = 0.5
LINE_SECONDS = 60.0
"""Between two lines about steps where there is no terminal."""


class Progress:
    """The live display of a run; it never raises, and falls silent when its terminal is gone."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None
        self._foot = Foot()
        self._is_silent = self._is_acknowledged = False
        self._lock, self._over = threading.RLock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._told_at = time.monotonic()

    def record(self, event: Event) -> None:
        """Show the event: a step moves the bar, everything else is a line above it."""
        with self._lock:
            if self._is_silent:
                return
            try:
                self._show(event)
            except (Exception, SystemExit):  # rich ends the program when its pipe is closed; a run must go on
                self._is_silent = True

    def watch(self, view: View) -> None:
        """Look at ``view`` from here on."""
        self._foot.view = view
        self._thread = threading.Thread(target=self._look_on, name="narrowboat display", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the terminal as it was found."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(2 * LOOK_SECONDS)
        try:
            self._stop()
        except (Exception, SystemExit):
            self._is_silent = True

    def look(self) -> None:
        """One look: acknowledge what was asked for, draw the foot anew, tell a minute that brought no step."""
        view = self._foot.view
        if view is None or self._is_silent:
            return
        view.look()
        with self._lock:
            if not self._is_acknowledged and (words := view.stopping_words(self._foot.step)):
                self._is_acknowledged = True
                self._say(words, "stopping")
            if self._is_live():
                self._redraw()
            elif view.underway.work and time.monotonic() - self._told_at >= LINE_SECONDS:
                self._tell_minute(view)

    def _look_on(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            try:
                self.look()
            except (Exception, SystemExit):
                self._is_silent = True

    def _show(self, event: Event) -> None:
        foot, pace = self._foot, self._foot.pace
        if isinstance(event, StepDone):
            pace.take(event)
            is_end = event.step == event.num_steps
            if not self._is_live() and (self._is_first_step(event) or is_end or self._is_due()):
                self._say(step_line(event, pace))
                self._told_at = time.monotonic()
        elif isinstance(event, RunEnded):
            self._over.set()
            self._stop()
            for label, words in ending(event, pace):
                self._say(words, label)
        elif told := line(event):
            self._say(told[1], told[0])
        if isinstance(event, PlanChosen):
            foot.budget_bytes, foot.tokens_per_second = event.budget_bytes, event.tokens_per_second
        if isinstance(event, PlanChanged):
            foot.change = event
        if isinstance(event, StepDone | PlanChosen | Evaluated) and self._is_live():
            self._redraw()

    def _is_first_step(self, event: StepDone) -> bool:
        return event.num_tokens == self._foot.pace.num_tokens

    def _is_due(self) -> bool:
        return time.monotonic() - self._told_at >= LINE_SECONDS

    def _tell_minute(self, view: View) -> None:
        underway = view.underway
        name = f"step {self._foot.step:,}" if underway.work == "step" else underway.work
        left = underway.seconds_left
        when = f", about {format_seconds(left)} left of it" if left is not None else ""
        so_far = f"{format_seconds(underway.seconds)} so far{when}"
        self._say(f"{name}: {underway.words()} ({100 * underway.share:.0f} %), {so_far}; {view.memory_words(0)}")
        self._told_at = time.monotonic()

    def _is_live(self) -> bool:
        return self._console.is_interactive and self._console.file.isatty()

    def _say(self, words: str, label: str = "") -> None:
        """Lines: no control codes out of names and paths, and nothing that the terminal cannot spell."""
        for number, text in enumerate(words.split("\n") if label == "data" else [" ".join(words.split())]):
            shown = "".join(c if c.isprintable() else "\ufffd" for c in text)
            told = f"{'' if number else label:<10}  {shown}" if label else shown
            spelt = Text(told.encode(self._console.encoding, "replace").decode(self._console.encoding))
            if self._is_live() and not number:
                spelt.stylize(LABEL_STYLES.get(label, "bold"), 0, len(label))
            self._console.print(spelt, soft_wrap=True, highlight=False)

    def _redraw(self) -> None:
        if self._over.is_set():
            return
        if self._live is None:
            self._live = Live(self._foot, console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.refresh()

    def _stop(self) -> None:
        with self._lock:
            if self._live is not None:
                live, self._live = self._live, None
                live.stop()
