"""Line charts as SVG text: logarithmic axes, a legend, nothing else; no library is needed to draw or to read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#9c6b4e", "#9498a0")
WIDTH, HEIGHT, LEFT, TOP = 430, 300, 62, 34


@dataclass(frozen=True)
class Line:
    """A named line through points (x, y), all above 0."""

    name: str
    points: Sequence[tuple[float, float]]


def chart(charts: Sequence[tuple[str, Sequence[Line]]], x_name: str) -> str:
    """Charts of the same lines side by side, one legend below."""
    names = list(dict.fromkeys(line.name for _, lines in charts for line in lines))
    total_width, total_height = (WIDTH + LEFT) * len(charts) + 20, HEIGHT + TOP + 60 + 18 * math.ceil(len(names) / 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width} {total_height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{total_width}" height="{total_height}" fill="white"/>',
    ]
    for number, (title, lines) in enumerate(charts):
        parts += _one(title, lines, x_name, names, LEFT + number * (WIDTH + LEFT))
    for i, name in enumerate(names):
        x, y = LEFT + 240 * (i % 3), HEIGHT + TOP + 60 + 18 * (i // 3)
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="4" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _one(title: str, lines: Sequence[Line], x_name: str, names: Sequence[str], left: float) -> list[str]:
    points = [point for line in lines for point in line.points]
    (x0, x1), (y0, y1) = _span([x for x, _ in points]), _span([y for _, y in points])
    width, bottom = WIDTH - 20, TOP + HEIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return (left + width * (math.log(x) - x0) / (x1 - x0), bottom - HEIGHT * (math.log(y) - y0) / (y1 - y0))

    parts = [f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{escape(title)}</text>']
    parts.append(f'<path d="M{left},{TOP}V{bottom}H{left + width}" fill="none" stroke="#888"/>')
    for x in sorted({x for x, _ in points}):
        parts.append(f'<text x="{at(x, 1)[0]:.0f}" y="{bottom + 16}" text-anchor="middle">{x:,.0f}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{bottom + 34}" text-anchor="middle">{escape(x_name)}</text>')
    for power in range(math.ceil(y0 / math.log(10)), math.floor(y1 / math.log(10)) + 1):
        y = at(1, 10.0**power)[1]
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{10.0**power:g}</text>')
        parts.append(f'<path d="M{left},{y:.1f}H{left + width}" stroke="#eee"/>')
    for line in lines:
        colour = COLOURS[names.index(line.name) % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line.points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>' for p in path.split()
        ]
    return parts


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Logarithms of the ends, somewhat widened."""
    low, high = math.log(min(values)), math.log(max(values))
    margin = max(0.04 * (high - low), 0.1)
    return low - margin, high + margin
