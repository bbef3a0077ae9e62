"""Line and bar charts as SVG text: axes, a legend, nothing else; no library is needed to draw or to read them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#9c6b4e", "#9498a0")
WIDTH, HEIGHT, LEFT, TOP = 430, 300, 62, 34


@dataclass(frozen=True)
class Line:
    """A named line through points (x, y), all above 0."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    """A number of a group, such as a task, under a name that comes in every group."""

    group: str
    name: str
    value: float


def chart(charts: Sequence[tuple[str, Sequence[Line]]], x_name: str, linear: Collection[str] = ()) -> str:
    """Charts side by side, one legend below; axes are logarithmic but for the heights of those titled in ``linear``."""
    names = list(dict.fromkeys(line.name for _, lines in charts for line in lines))
    parts = []
    for number, (title, lines) in enumerate(charts):
        parts += _one(title, lines, x_name, names, LEFT + number * (WIDTH + LEFT), title in linear)
    return _page(len(charts), names, parts)


def bars(charts: Sequence[tuple[str, Sequence[Bar]]], groups: Sequence[str]) -> str:
    """Bar charts side by side, heights from 0 on, one legend below; a line where 1 is."""
    names = list(dict.fromkeys(bar.name for _, some in charts for bar in some))
    parts, bottom, width = [], TOP + HEIGHT, WIDTH - 20
    for number, (title, some) in enumerate(charts):
        left, highest = LEFT + number * (WIDTH + LEFT), 1.05 * max([1.0, *(bar.value for bar in some)])
        parts.append(f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{escape(title)}</text>')
        for tick in _ticks(0, highest, is_linear=True):
            y = bottom - HEIGHT * tick / highest
            parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{tick:g}</text>')
            parts.append(f'<path d="M{left},{y:.1f}h{width}" stroke="{"#888" if tick == 1 else "#eee"}"/>')
        for i, group in enumerate(groups):
            start = left + width * (i + 0.1) / len(groups)
            each = 0.8 * width / len(groups) / len(names)
            for bar in (bar for bar in some if bar.group == group):
                place, height = names.index(bar.name), HEIGHT * bar.value / highest
                parts.append(
                    f'<rect x="{start + place * each:.1f}" y="{bottom - height:.1f}" width="{each - 1:.1f}" '
                    f'height="{height:.1f}" fill="{COLOURS[place % len(COLOURS)]}"/>'
                )
            middle = start + 0.4 * width / len(groups)
            parts.append(f'<text x="{middle:.0f}" y="{bottom + 16}" text-anchor="middle">{escape(group)}</text>')
    return _page(len(charts), names, parts)


def _page(num_charts: int, names: Sequence[str], parts: Sequence[str]) -> str:
    """Charts on white, with their legend."""
    total_width, total_height = (WIDTH + LEFT) * num_charts + 20, HEIGHT + TOP + 60 + 18 * math.ceil(len(names) / 3)
    legend = []
    for i, name in enumerate(names):
        x, y = LEFT + 240 * (i % 3), HEIGHT + TOP + 60 + 18 * (i // 3)
        legend.append(f'<rect x="{x}" y="{y - 9}" width="14" height="4" fill="{COLOURS[i % len(COLOURS)]}"/>')
        legend.append(f'<text x="{x + 20}" y="{y}">{escape(name)}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width} {total_height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="{total_width}" height="{total_height}" fill="white"/>'
    )
    return "\n".join([head, *parts, *legend, "</svg>"]) + "\n"


def _one(
    title: str, lines: Sequence[Line], x_name: str, names: Sequence[str], left: float, is_linear: bool
) -> list[str]:
    points = [point for line in lines for point in line.points]
    (x0, x1), (y0, y1) = _span([x for x, _ in points]), _span([max(y, 1e-9) for _, y in points])
    if is_linear:
        y0, y1 = 0.0, 1.05 * max(y for _, y in points)
    width, bottom = WIDTH - 20, TOP + HEIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        height = y if is_linear else math.log(y)
        return (left + width * (math.log(x) - x0) / (x1 - x0), bottom - HEIGHT * (height - y0) / (y1 - y0))

    parts = [f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{escape(title)}</text>']
    parts.append(f'<path d="M{left},{TOP}V{bottom}H{left + width}" fill="none" stroke="#888"/>')
    for x in sorted({x for x, _ in points}):
        parts.append(f'<text x="{at(x, 1)[0]:.0f}" y="{bottom + 16}" text-anchor="middle">{_plain(x)}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{bottom + 34}" text-anchor="middle">{escape(x_name)}</text>')
    for tick in _ticks(y0, y1, is_linear):
        y = at(1, tick)[1]
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{tick:g}</text>')
        parts.append(f'<path d="M{left},{y:.1f}H{left + width}" stroke="#eee"/>')
    for line in lines:
        colour = COLOURS[names.index(line.name) % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line.points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>' for p in path.split()
        ]
    return parts


def _plain(x: float) -> str:
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


def _ticks(low: float, high: float, is_linear: bool) -> list[float]:
    """Powers of ten, and where there are fewer than two 2 and 5 between them; or fifths of the greatest."""
    if is_linear:
        step = 10.0 ** math.floor(math.log10(high)) / 5
        step *= next(factor for factor in (1, 2, 5, 10) if factor * step * 6 >= high)
        return [i * step for i in range(int(high / step) + 1)]
    powers = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    for digits in ((1,), (1, 2, 5)):
        ticks = [d * 10.0**power for power in powers for d in digits if low <= math.log(d * 10.0**power) <= high]
        if len(ticks) > 1:
            break
    return ticks


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Logarithms of the ends, somewhat widened."""
    low, high = math.log(min(values)), math.log(max(values))
    margin = max(0.04 * (high - low), 0.1)
    return low - margin, high + margin
