"""Several runs on one page: what they have apart, what they came to, and their curves in the same charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowboat.machine.drafts import write_whole
from narrowboat.monitor.charts import Chart, Line, draw, thin
from narrowboat.monitor.history import EVENTS_FILE, History, read_history
from narrowboat.monitor.report import environment, series
from narrowboat.monitor.wording import how_much

COMPARISON_FILE = "comparison.html"
NUM_COLOURS = 8


@dataclass(frozen=True)
class Run:
    """A run under a short name."""

    name: str
    history: History

    @property
    def summary(self) -> dict[str, Any]:
        """What it came to."""
        return self.history.summary()

    @property
    def options(self) -> dict[str, str]:
        """``{"lora.rank": "16", ...}``."""
        groups = self.history.start.options if self.history.start else {}
        return {
            f"{group}.{name}": str(value)
            for group, values in groups.items()
            if isinstance(values, Mapping)
            for name, value in values.items()
        }

    @property
    def change(self) -> str:
        """The curve of the held-out loss."""
        first, last = self.history.heldout_losses
        return how_much(first, last) if first is not None and last is not None else ""


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write the page about the runs in ``folders`` to ``path``.

    Raises:
        DataError: one of them holds no run.
        OSError: the page cannot be written.
    """
    runs = [Run(name, read_history(folder / EVENTS_FILE)) for name, folder in _named(folders).items()]
    write_whole(path, compared(runs).encode())
    return path


def compared(runs: Sequence[Run]) -> str:
    """The page."""
    keys = dict.fromkeys(key for run in runs for key in run.options)
    apart = {key: values for key in keys if len(set(values := [run.options.get(key, "") for run in runs])) > 1}
    charts = {
        "loss": ("Loss", "nats a token, smoothed", "smoothed", False),
        "peak": ("Memory", "peak of each step", "peak", True),
        "pace": ("Pace", "tokens a second", "pace", False),
    }
    drawn = [_chart(runs, key, *what) for key, what in charts.items()]
    return (
        environment()
        .get_template("comparison.html.j2")
        .render(runs=runs, apart=apart, charts=[chart for chart in (drawn[0], _heldout(runs), *drawn[1:]) if chart])
    )


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """The folders by their last names, or by all of them where those are the same."""
    names = [folder.resolve().name for folder in folders]
    return {str(folder) if names.count(name) > 1 else name: folder for name, folder in zip(names, folders, strict=True)}


def _chart(runs: Sequence[Run], key: str, title: str, unit: str, column: str, in_bytes: bool) -> Chart | None:
    lines = []
    for number, run in enumerate(runs):
        columns = series(run.history)
        kept = thin(len(columns["step"]), [columns[column]])
        steps, values = ([columns[name][place] for place in kept] for name in ("step", column))
        lines.append(Line(run.name, f"c{number % NUM_COLOURS}", steps, values))
    return draw(key, title, unit, lines, _span(runs), from_zero=key != "loss", in_bytes=in_bytes)


def _heldout(runs: Sequence[Run]) -> Chart | None:
    lines = []
    for number, run in enumerate(runs):
        measured = run.history.evaluations
        css, losses = f"c{number % NUM_COLOURS}", [event.loss for event in measured.values()]
        lines += [Line(run.name, css, list(measured), losses), Line("", css, list(measured), losses, dots=True)]
    return draw("heldout", "Held-out loss", "nats a token", lines, _span(runs), from_zero=False)


def _span(runs: Sequence[Run]) -> tuple[float, float]:
    return 0, max([1, *(max(run.history.steps, default=1) for run in runs)])
