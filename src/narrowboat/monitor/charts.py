"""Line charts as values for the page's template: paths in a square of 1000 by 1000, and labels placed in per cent.

The square is stretched to any width while lines keep theirs (``vector-effect``) and labels stay HTML text, so a chart
is sharp and readable on a phone without any script. A chart library would make the page some fifty times as large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SIDE = 1000
NUM_BUCKETS = 300
"""A run of more steps than twice this is thinned: of each bucket stay the steps with the extremes."""


@dataclass(frozen=True)
class Line:
    """A series: its name, the class that colours it, and one value a step; NaN leaves a gap."""

    name: str
    css: str
    steps: Sequence[float]
    values: Sequence[float]
    dots: bool = False


@dataclass(frozen=True)
class Tick:
    """A label on an axis, in per cent of its length from the lower or left end."""

    percent: float
    label: str


@dataclass(frozen=True)
class Chart:
    """A chart ready to be drawn."""

    key: str
    title: str
    unit: str
    lines: list[tuple[Line, str]]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    first_step: float
    last_step: float
    low: float
    high: float
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Upright lines: per cent from the left, and the class that colours them."""

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Names and colours of lines and marks, each once."""
        said = {"strange": "not a number", "changed": "plan changed"}
        entries = {line.name: line.css for line, _ in self.lines if line.name and line.values}
        return [*entries.items(), *((said[css], css) for css in dict.fromkeys(css for _, css in self.marks))]

    @property
    def alt(self) -> str:
        """The chart in words, for those who do not see it."""
        sentences = []
        for line, _ in self.lines:
            numbers = [value for value in line.values if math.isfinite(value)]
            if line.name and numbers:
                ends = f"from {numbers[0]:.6g} to {numbers[-1]:.6g}"
                sentences.append(f"{line.name} {ends}, lowest {min(numbers):.6g}, highest {max(numbers):.6g}")
        return "; ".join(sentences)


def draw(
    key: str,
    title: str,
    unit: str,
    lines: list[Line],
    steps: tuple[float, float],
    *,
    from_zero: bool = True,
    in_bytes: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> Chart | None:
    """Lay out a chart from one step to another; None when there is not a single number to draw."""
    numbers = [value for line in lines for value in line.values if math.isfinite(value)]
    if not numbers:
        return None
    low, high = (0.0 if from_zero else min(numbers)), max(numbers)
    if high <= low:
        high = low + (abs(low) or 1.0)
    room = 0.06 * (high - low)
    low, high = (low if from_zero and low == 0 else low - room), high + room
    first, last = steps
    x = _onto(first, last)
    y = _onto(low, high)
    return Chart(
        key=key,
        title=title,
        unit=unit,
        lines=[(line, _path(line, x, y)) for line in lines],
        x_ticks=[Tick(x(t) * 100, f"{t:,.0f}") for t in nice_ticks(first, last, 6, whole=True)],
        y_ticks=[Tick(y(t) * 100, label) for t, label in _y_ticks(low, high, in_bytes)],
        first_step=first,
        last_step=last,
        low=low,
        high=high,
        marks=[(x(step) * 100, css) for step, css in marks if first <= step <= last],
    )


def thin(num_steps: int, series: Sequence[Sequence[float]]) -> list[int]:
    """Which positions to draw: all of a short run; of a long one each bucket's first, smallest, largest and strange."""
    if num_steps <= 2 * NUM_BUCKETS:
        return list(range(num_steps))
    kept = {num_steps - 1}
    for bucket in range(NUM_BUCKETS):
        positions = range(bucket * num_steps // NUM_BUCKETS, (bucket + 1) * num_steps // NUM_BUCKETS)
        kept.add(positions[0])
        for values in series:
            numbers = [position for position in positions if math.isfinite(values[position])]
            if numbers:
                kept |= {min(numbers, key=values.__getitem__), max(numbers, key=values.__getitem__)}
            if len(numbers) < len(positions):
                kept.add(next(position for position in positions if not math.isfinite(values[position])))
    return sorted(kept)


def nice_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """At most ``most + 1`` round values within ``[low, high]``: multiples of 1, 2, 2.5 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    distances = [power * factor for factor in (1, 2, 2.5, 5, 10)]
    if whole:
        distances = [distance for distance in distances if distance >= 1 and distance.is_integer()] or [1.0]
    distance = next((distance for distance in distances if distance >= rough), distances[-1])
    first = math.ceil(low / distance - 1e-9)
    return [n * distance for n in range(first, math.floor(high / distance + 1e-9) + 1)]


def _y_ticks(low: float, high: float, in_bytes: bool) -> list[tuple[float, str]]:
    power = int(math.log(max(high, 1), 1024)) if in_bytes else 0
    unit, name = 1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")[min(power, 5)] if in_bytes else ""
    numbers = nice_ticks(low / unit, high / unit, 5)
    return [
        (n * unit, f"{label} {name}" if name and n else label)
        for n, label in zip(numbers, _labels(numbers), strict=True)
    ]


def _labels(numbers: list[float]) -> list[str]:
    """All with as many decimals as the one that needs most; very small ones as 2e-5."""
    largest = max(map(abs, numbers), default=0.0)
    if 0 < largest < 2e-3:
        return [f"{n:.1e}".replace(".0e", "e").replace("e-0", "e-") if n else "0" for n in numbers]
    decimals = max((len(f"{n:.6f}".rstrip("0").partition(".")[2]) for n in numbers), default=0)
    return [f"{n:,.{decimals}f}" if n else "0" for n in numbers]


def _onto(low: float, high: float) -> Callable[[float], float]:
    """The share of the way from ``low`` to ``high``."""
    return lambda value: (value - low) / (high - low)


def _path(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """SVG path data; dots are strokes of no length with round ends."""
    parts: list[str] = []
    pen_down = False
    for step, value in zip(line.steps, line.values, strict=True):
        if not math.isfinite(value):
            pen_down = False
            continue
        place = f"{x(step) * SIDE:.1f} {(1 - y(value)) * SIDE:.1f}"
        if line.dots:
            parts.append(f"M{place}h0")
        else:
            parts.append(f"L{place}" if pen_down else f"M{place}h0")
        pen_down = True
    return "".join(parts)
