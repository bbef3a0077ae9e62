"""The search: the fastest plan on the ladder that fits the budget."""

from __future__ import annotations

from dataclasses import dataclass

from narrowboat.errors import BudgetError
from narrowboat.memory.meter import Reading
from narrowboat.plan import MemoryPlan
from narrowboat.planner.forecast import Workload, forecast
from narrowboat.units import format_bytes

LADDER = (
    MemoryPlan(layers="keep"),
    MemoryPlan(layers="recompute"),
    MemoryPlan(layers="stream", tile_tokens=512),
    MemoryPlan(layers="stream", tile_tokens=256, chunk_tokens=128),
    MemoryPlan(layers="stream", tile_tokens=256, chunk_tokens=128, inputs="disk"),
    MemoryPlan(layers="stream", tile_tokens=64, chunk_tokens=32, inputs="disk"),
)
"""From fastest to thriftiest."""


@dataclass(frozen=True)
class Choice:
    """A plan and what it is forecast to take."""

    plan: MemoryPlan
    forecast: Reading


def choose(work: Workload, budget_bytes: int, wanted: str = "auto") -> Choice:
    """The fastest plan that fits ``budget_bytes``; only plans whose layers are ``wanted`` if that is not auto.

    Raises:
        BudgetError: with the thriftiest plan, its largest parts and the budget.
    """
    rungs = [plan for plan in LADDER if wanted in ("auto", plan.layers)]
    for plan in rungs:
        reading = forecast(work, plan)
        if reading.device_bytes <= budget_bytes:
            return Choice(plan, reading)
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in list(reading.by_cause.items())[:3])
    raise BudgetError(
        f"The thriftiest exact plan ({plan.describe()}) peaks at {format_bytes(reading.device_bytes)} for a row of "
        f"{work.row_tokens:,} tokens; memory.budget is {format_bytes(budget_bytes)}. Largest parts: {largest}. "
        "A smaller data.max_tokens or a larger memory.budget would do."
    )
