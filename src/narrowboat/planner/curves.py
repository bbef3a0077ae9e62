"""Curves: what rehearsals of a few lengths say of every length, so that a question is answered by arithmetic.

A step's bytes grow in nearly straight lines with the tokens of a row, its operations a token too. So each plan is
rehearsed at a few lengths, the knots, and every other length lies between two of them; the rank moves each amount in
a straight line as well. Exact at the knots, and within one per cent between them on all that was tried. No torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from narrowboat.options.schema import Options
from narrowboat.plan import LayerMode, MemoryPlan
from narrowboat.planner.amounts import Forecast, Work

Point = Mapping[str, float]
"""The amounts of one plan at one length, by name."""

KNOTS = (1024, 8192, 32768, 131072, 1048576)
FEW_KNOTS = (1024, 131072, 1048576)
"""Of the plan that takes longest to rehearse."""

STEP, PHASES = "step", "phases"
ENDS = (KNOTS[0], 131072)
"""Where the phases are rehearsed, and what another rank adds."""

_CAUSE, _WORK = "cause ", "work "


@dataclass(frozen=True)
class About:
    """What is forecast: ``options`` of a run, the ``positions`` that its model was made for; its curves are shipped."""

    options: Options
    positions: int | None
    is_shipped: bool = True


@dataclass(frozen=True)
class Facts:
    """Facts about a model: its layers, the bytes of its largest layer's weights, and why kinds of plan are refused."""

    num_layers: int
    layer_bytes: int
    refused: Mapping[LayerMode, str]


class Points(Protocol):
    """Where a curve's points come from: a file, or rehearsals as they are needed."""

    facts: Facts

    def at(self, kind: str, plan: MemoryPlan, num_tokens: int) -> Point:
        """The amounts of ``plan`` at a knot: those of a ``STEP``, or the device's peaks in its ``PHASES``."""

    def has(self, num_tokens: int) -> bool:
        """Whether a length that is no knot can be asked for as well."""


class Curves:
    """Forecasts for one workload and rows of any length.

    Args:
        work: what is forecast.
        points: the amounts at the knots.
    """

    def __init__(self, work: Any, points: Points) -> None:
        self.work, self._points = work, points
        self.num_layers, self.layer_bytes = points.facts.num_layers, points.facts.layer_bytes
        self.refused = points.facts.refused

    def forecast(self, plan: MemoryPlan, num_tokens: int, num_rows: int = 1, many: bool = False) -> Forecast:
        """A step over one row of ``num_tokens``.

        Raises:
            ValueError: for several rows, whose bytes are another curve.
        """
        if num_rows != 1:
            raise ValueError(f"curves are those of one row, not of {num_rows}")
        point = self._at(STEP, plan, num_tokens)
        causes = _named(point, _CAUSE)
        return Forecast(
            plan=plan,
            num_rows=1,
            num_tokens=num_tokens,
            device_bytes=sum(causes.values()),
            host_bytes=round(point.get("host", 0)),
            disk_bytes=round(point.get("disk", 0)),
            by_cause=dict(sorted(causes.items(), key=lambda item: -item[1])),
            work=Work(**{name.removeprefix(_WORK): n for name, n in point.items() if name.startswith(_WORK)}),
            weights_away_bytes=round(point.get("away", 0)),
            file_bytes=round(point.get("file", 0)),
        )

    def phases(self, plan: MemoryPlan, num_tokens: int, num_rows: int = 1) -> dict[str, int]:
        """The device's peak bytes in each phase of a run."""
        return _named(self._at(PHASES, plan, num_tokens), "")

    def _at(self, kind: str, plan: MemoryPlan, num_tokens: int) -> Point:
        num_kept = plan.num_kept_layers
        if num_kept:  # on the line from none to all, which is never below the step
            none = self._at(kind, plan.model_copy(update={"num_kept_layers": 0}), num_tokens)
            every = self._at(kind, MemoryPlan(layers="keep", chunk_tokens=512), num_tokens)
            return mixed((none, 0), (every, self.num_layers), num_kept)
        if self._points.has(num_tokens):
            return self._points.at(kind, plan, num_tokens)
        return between(knots_of(kind, plan), num_tokens, lambda knot: self._points.at(kind, plan, knot))


def knots_of(kind: str, plan: MemoryPlan) -> Sequence[int]:
    """Where ``plan`` is rehearsed."""
    if kind == PHASES:
        return ENDS
    return FEW_KNOTS if plan.input_stride > 1 else KNOTS


def between(knots: Sequence[int], num_tokens: int, at: Any) -> Point:
    """The point at ``num_tokens``, from the two knots around it or the last two before it."""
    if num_tokens in knots:
        return at(num_tokens)
    place = min(max(bisect_left(knots, num_tokens), 1), len(knots) - 1)
    below, above = knots[place - 1 : place + 1]
    return mixed((at(below), below), (at(above), above), max(num_tokens, knots[0]))


def mixed(a: tuple[Point, int], b: tuple[Point, int], x: int) -> Point:
    """The point at ``x`` on the line through two; of operations, the operations a token are on a line."""
    (one, x1), (other, x2) = a, b
    share = (x - x1) / (x2 - x1)

    def on_line(name: str) -> float:
        y1, y2 = one.get(name, 0), other.get(name, 0)
        if x1 and name.startswith(_WORK):
            return max(0, x * (y1 / x1 + share * (y2 / x2 - y1 / x1)))
        return max(0, y1 + share * (y2 - y1))

    return {name: on_line(name) for name in {**one, **other}}


def point_of(forecast: Forecast) -> Point:
    """A forecast as the amounts of one point."""
    names = Work.__dataclass_fields__
    amounts: dict[str, float] = {_CAUSE + name: size for name, size in forecast.by_cause.items()}
    amounts |= {_WORK + name: n for name, n in zip(names, forecast.work.counts, strict=True)}
    amounts |= {"host": forecast.host_bytes, "disk": forecast.disk_bytes}
    amounts |= {"away": forecast.weights_away_bytes, "file": forecast.file_bytes}
    return {name: n for name, n in amounts.items() if n}


def key_of(plan: MemoryPlan) -> str:
    """``plan`` as the name of its curve."""
    return " ".join(str(value) for value in plan.model_dump(exclude={"micro_batch_tokens", "documents"}).values())


def _named(point: Point, prefix: str) -> dict[str, int]:
    found = {name.removeprefix(prefix): round(n) for name, n in point.items() if name.startswith(prefix)}
    return {name: size for name, size in found.items() if size}
