"""An answer for people: a bar of the causes against the budget, a table over lengths, what else there is."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from narrowboat.planner.amounts import Forecast
from narrowboat.planner.answer import Answer, Choice
from narrowboat.planner.target import Limits
from narrowboat.units import format_bytes, format_seconds

BAR_CELLS = 60
COLOURS = {
    "base weights": "blue",
    "adapters": "bright_cyan",
    "gradients": "cyan",
    "optimizer states": "dark_cyan",
    "layer inputs": "green",
    "keys and values": "yellow",
    "working set": "magenta",
    "loss": "red",
    "margin": "bright_black",
}


def show(answer: Answer, title: str, console: Console) -> None:
    """Print ``answer`` under ``title``."""
    best = answer.best.forecast
    verdict = "fits" if answer.best.fits else "does not fit"
    console.print(Text(f"{title}, {best.num_tokens:,} tokens: {verdict}", style="bold"))
    console.print(best.plan.describe() + _where_else(best) + _time(best))
    console.print(Group(bar(best, answer.limits), legend(best)))
    if best.phases:
        console.print("Peaks: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in best.phases.items()))
    if answer.lengths:
        console.print(_table("Other lengths", answer.lengths, answer.limits))
    if answer.alternatives:
        heading = "Neighbours on the ladder" if answer.best.fits else "What would help"
        console.print(_table(heading, answer.alternatives, answer.limits))
    for note in answer.notes:
        console.print(f"Note: {note}")


def bar(forecast: Forecast, limits: Limits) -> Text:
    """The causes in proportion, with a mark where the budget ends."""
    full = max(forecast.device_bytes, limits.device_bytes)
    text, filled = Text(), 0
    end = round(BAR_CELLS * limits.device_bytes / full)
    done = 0
    for name, size in forecast.by_cause.items():
        done += size
        cells = round(BAR_CELLS * done / full) - filled
        text.append("█" * cells, style=COLOURS.get(name, "white"))
        filled += cells
    text.append("░" * max(0, end - filled), style="bright_black")
    text.append(f" {format_bytes(forecast.device_bytes)} of {format_bytes(limits.device_bytes)}")
    return text


def legend(forecast: Forecast) -> Text:
    """The causes with their bytes, largest first."""
    text = Text()
    for name, size in forecast.by_cause.items():
        text.append("■ ", style=COLOURS.get(name, "white"))
        text.append(f"{name} {format_bytes(size)}  ")
    return text


def _table(title: str, choices: Sequence[Choice], limits: Limits) -> Table:
    table = Table("", "tokens", "plan", "device", "host", "disk", "a step", title=title, title_justify="left", box=None)
    for column in table.columns[3:]:
        column.justify = "right"
    for choice in choices:
        forecast = choice.forecast
        words = f"{choice.option}, {forecast.plan.describe()}" if choice.option else forecast.plan.describe()
        table.add_row(
            Text("✓" if choice.fits else "✗", style="green" if choice.fits else "red"),
            f"{forecast.num_tokens:,}",
            words,
            format_bytes(forecast.device_bytes),
            format_bytes(forecast.host_bytes) if forecast.host_bytes else "",
            format_bytes(forecast.disk_bytes) if forecast.disk_bytes else "",
            seconds_of(forecast),
        )
    return table


def _where_else(forecast: Forecast) -> str:
    places = {"host memory": forecast.host_bytes, "disk": forecast.disk_bytes}
    used = [f"{format_bytes(size)} of {place}" for place, size in places.items() if size]
    return f"; {' and '.join(used)} beside the device" if used else ""


def seconds_of(forecast: Forecast) -> str:
    """Seconds of a step, or a range from the fastest to the slowest card of the size; empty where no rate is known."""
    if forecast.seconds is not None:
        return format_seconds(forecast.seconds)
    if forecast.seconds_range is None:
        return ""
    fastest, slowest = map(format_seconds, forecast.seconds_range)
    return fastest if fastest == slowest else f"{fastest} to {slowest}"


def _time(forecast: Forecast) -> str:
    seconds = seconds_of(forecast)
    others = ", by the card" if forecast.seconds_range else ""
    return f"; forecast {seconds} a step{others}" if seconds else ""
