"""``report.html``: one self-contained page about a run, made from ``events.jsonl`` and ``evaluation.json``.

It loads nothing from anywhere, so it can be mailed, archived and opened in ten years; a run of any length stays far
below a megabyte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from narrowboat.events import Event, ModelReady, RunEnded
from narrowboat.machine.drafts import write_whole
from narrowboat.monitor.accounting import account_entries, share
from narrowboat.monitor.charts import Chart, Line, draw, thin
from narrowboat.monitor.diagnosis import diagnose
from narrowboat.monitor.foreseen import beside, forecast
from narrowboat.monitor.history import EVALUATION_FILE, EVENTS_FILE, History, read_history
from narrowboat.monitor.pace import SmoothedLoss
from narrowboat.monitor.wording import how_much, is_histogram, quantity, spell
from narrowboat.units import format_bytes, format_seconds

REPORT_FILE = "report.html"
NUM_CAUSES = 6
"""Causes of memory that get a line of their own."""


class ReportPage:
    """The recorder that leaves the page behind when a session ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def record(self, event: Event) -> None:
        """Write the page at the end; comes after ``JsonLines`` among the recorders, for it reads what that wrote."""
        if isinstance(event, RunEnded):
            write_report(self._folder)

    def close(self) -> None:
        """Nothing is held open."""


def write_report(folder: Path) -> Path:
    """Make ``folder/report.html`` from ``folder/events.jsonl``; gives back its path.

    Raises:
        DataError: if there is no ``events.jsonl`` in the folder, or nothing in it can be read.
        OSError: if the page cannot be written; an older page stays whole.
    """
    path = folder / REPORT_FILE
    write_whole(path, page_of(folder).encode())
    return path


def page_of(folder: Path) -> str:
    """The page of the run in ``folder``, as it is now.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    return render(read_history(folder / EVENTS_FILE), folder.resolve().name, _evaluation(folder))


def _evaluation(folder: Path) -> dict[str, Any] | None:
    """What ``narrowboat eval`` left in the folder."""
    try:
        found = json.loads((folder / EVALUATION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if {"scores", "answers"} <= found.keys() else None


def environment() -> Environment:
    """The templates' surroundings: escaping, and how bytes, seconds and shares are written."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(bytes=format_bytes, seconds=format_seconds, spell=spell, share=share)
    return made


def render(history: History, name: str, evaluation: Mapping[str, Any] | None = None) -> str:
    """The page of a run."""
    columns = series(history)
    positions = thin(len(history.steps), [columns[key] for key in ("loss", "peak", "pace", "rate", "norm")])
    drawn = {key: [column[position] for position in positions] for key, column in columns.items()}
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            name=name,
            title=history.model.name if history.model else name,
            history=history,
            started=history.sessions[0].started,
            error=_error(history),
            summary=history.summary(),
            heldout=history.heldout_losses,
            change=_change(history),
            charts=charts(history, drawn),
            values=_for_script(history, drawn),
            forecast=forecast(history),
            beside=beside(history),
            findings=diagnose(history) if history.sessions[-1].end else [],
            evaluation=evaluation,
            entries=account_entries(history.data.account) if history.data else [],
            plan=rows(history.plan.plan, verbatim=True) if history.plan else [],
            model=_model(history.model) if history.model else [],
            account=rows(history.data.account) if history.data else [],
            options=rows(history.start.options, verbatim=True) if history.start else [],
            versions=history.start.versions if history.start else {},
            num_drawn=len(positions),
        )
    )


def _error(history: History) -> str | None:
    """Why the last session ended, if it did not end well."""
    end = history.sessions[-1].end
    return end.error if end else None


def _model(model: ModelReady) -> list[tuple[str, str]]:
    described = asdict(model)
    described["trainable_share"] = model.num_trainable / max(1, model.num_parameters)
    targets = described.pop("modules_by_target")
    return [*rows(described), ("adapted modules", ", ".join(f"{name} × {count:,}" for name, count in targets.items()))]


def _change(history: History) -> str:
    first, last = history.heldout_losses
    return how_much(first, last) if first is not None and last is not None else ""


def series(history: History) -> dict[str, list[float]]:
    """What is drawn of every step, in order: a column each."""
    steps = history.steps.values()
    smoothed = SmoothedLoss(memory_steps=max(10, len(steps) / 50))
    return {
        "step": [step.step for step in steps],
        "loss": [step.loss for step in steps],
        "smoothed": [smoothed.take(step.loss) for step in steps],
        "peak": [step.peak_bytes for step in steps],
        "budget": [step.budget_bytes or math.nan for step in steps],
        "pace": [step.num_tokens / step.seconds if step.seconds > 0 else math.nan for step in steps],
        "rate": [step.learning_rate for step in steps],
        "norm": [step.gradient_norm for step in steps],
        "elapsed": list(accumulate(step.seconds for step in steps)),
    }


def charts(history: History, drawn: Mapping[str, list[float]]) -> list[Chart]:
    """The page's charts; those without a number are left out."""
    if not drawn["step"] and not history.evaluations:
        return []
    steps = [*drawn["step"], *history.evaluations]
    span = (min(0, *steps), max(1, *steps))
    changes = [(change.step, "changed") for change in history.plan_changes]
    is_short, is_long = len(drawn["step"]) <= 40, len(drawn["step"]) < len(history.steps)

    def line(key: str, name: str, css: str = "train") -> list[Line]:
        dots = Line("", css, drawn["step"], drawn[key], dots=True)
        return [Line(name, css, drawn["step"], drawn[key]), *([dots] if is_short else [])]

    def strange(key: str) -> list[tuple[float, str]]:
        return [(s, "strange") for s, v in zip(drawn["step"], drawn[key], strict=True) if not math.isfinite(v)]

    losses = line("loss", "training")
    if not is_short:
        losses = [*line("loss", "training", "train faint"), *line("smoothed", "training, smoothed")]
    measured, heldout = list(history.evaluations), [event.loss for event in history.evaluations.values()]
    losses += [Line("", "heldout", measured, heldout), Line("held out", "heldout", measured, heldout, dots=True)]
    budget = Line("budget", "budget", [span[0], *drawn["step"]], [*drawn["budget"][:1], *drawn["budget"]])
    memory = [*line("peak", "peak"), budget]
    norm = line("norm", "gradient norm", "train faint" if is_long else "train")
    laid_out = [
        draw("loss", "Loss", "nats a token", losses, span, from_zero=False, marks=strange("loss")),
        draw("peak", "Memory", "peak of each step", memory, span, in_bytes=True, marks=changes),
        _by_cause(history, span),
        draw("pace", "Pace", "tokens a second", line("pace", "tokens a second"), span, marks=changes),
        draw("rate", "Learning rate", "", line("rate", "learning rate"), span),
        draw("norm", "Gradient norm", "before clipping", norm, span, marks=strange("norm")),
    ]
    return [chart for chart in laid_out if chart]


def _by_cause(history: History, span: tuple[float, float]) -> Chart | None:
    """What each step's peak was made of; of a long run, the steps that are drawn."""
    told = [step for step in history.steps.values() if step.by_cause]
    if not told:
        return None
    kept = [told[position] for position in thin(len(told), [[step.peak_bytes for step in told]])]
    largest = sorted(
        {name for step in kept for name in step.by_cause}, key=lambda n: -max(s.by_cause.get(n, 0) for s in kept)
    )
    steps = [step.step for step in kept]
    lines = [
        Line(name, f"c{number}", steps, [step.by_cause.get(name, 0) for step in kept])
        for number, name in enumerate(largest[:NUM_CAUSES])
    ]
    return draw("causes", "Memory by cause", "at the peak of each step", lines, span, in_bytes=True)


def _for_script(history: History, drawn: Mapping[str, list[float]]) -> dict[str, list[float | None]]:
    """Exact values of the drawn steps; JSON has no word for what is not a number."""
    columns = dict(drawn)
    columns["heldout_step"] = [event.step for event in history.evaluations.values()]
    columns["heldout"] = [event.loss for event in history.evaluations.values()]
    return {key: [value if math.isfinite(value) else None for value in column] for key, column in columns.items()}


def rows(tree: Mapping[str, Any], verbatim: bool = False, prefix: str = "") -> list[tuple[str, str]]:
    """A tree of values as the two columns of a table; ``verbatim`` keeps option names as one writes them."""
    return list(_rows(tree, verbatim, prefix))


def _rows(tree: Mapping[str, Any], verbatim: bool, prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        label = prefix + (str(key) if verbatim else spell(str(key)))
        if is_histogram(value) and not verbatim:
            yield from ((f"{label}: up to {int(bound):,}", f"{count:,}") for bound, count in value.items())
        elif isinstance(value, Mapping) and value:
            yield from _rows(value, verbatim, f"{label}." if verbatim else f"{label}: ")
        elif verbatim:
            yield label, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        elif str(key).endswith("_bytes") and isinstance(value, int):
            yield label, f"{format_bytes(value)} ({value:,} B)"
        else:
            yield label, quantity(str(key), value)
