"""The forecast beside what was read: by cause, by phase, and why they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowboat.events import StepDone
from narrowboat.monitor.history import History
from narrowboat.units import format_bytes

ALIKE = 0.03
"""A difference up to this share needs no reason."""


@dataclass(frozen=True)
class Beside:
    """Rows of what, forecast and reading; and the reason for a difference."""

    rows: list[tuple[str, int, int]]
    reason: str


def forecast(history: History) -> dict[str, Any] | None:
    """The plan's forecast as parts of a bar that is as long as the budget, or as the forecast if that is longer."""
    if history.plan is None or not history.plan.forecast_bytes:
        return None
    parts = sorted(history.plan.forecast_bytes.items(), key=lambda part: -part[1])
    total = sum(num_bytes for _, num_bytes in parts)
    budget = history.plan.budget_bytes
    whole = max(total, budget, history.peak_bytes, 1)
    return {
        "parts": [(cause, num_bytes, 100 * num_bytes / whole) for cause, num_bytes in parts],
        "total": total,
        "budget": budget,
        "budget_percent": 100 * budget / whole,
        "peak_percent": 100 * history.peak_bytes / whole,
    }


def beside(history: History) -> Beside:
    """Phases first, then the causes at the highest step."""
    if history.plan is None:
        return Beside([], "")
    end = next((session.end for session in reversed(history.sessions) if session.end), None)
    phases, read = history.plan.phases, end.peak_by_phase if end else {}
    rows = [(name, phases.get(name, 0), read.get(name, 0)) for name in dict.fromkeys([*read, *phases])]
    highest = max(history.steps.values(), key=lambda step: step.peak_bytes, default=None)
    causes = highest.by_cause if highest else {}
    foreseen = history.plan.forecast_bytes
    if causes:
        rows += [(f"of the step: {name}", foreseen.get(name, 0), causes.get(name, 0))
                 for name in dict.fromkeys([*causes, *foreseen])]  # fmt: skip
    return Beside(rows, _reason(history, highest, foreseen))


def _reason(history: History, highest: StepDone | None, foreseen: Mapping[str, int]) -> str:
    if highest is None or not foreseen or not highest.by_cause:
        return ""
    total = sum(foreseen.values())
    off = highest.peak_bytes / total - 1
    if abs(off) <= ALIKE:
        return ""
    names = dict.fromkeys([*foreseen, *highest.by_cause])
    differences = {name: highest.by_cause.get(name, 0) - foreseen.get(name, 0) for name in names}
    largest = max(differences, key=lambda name: abs(differences[name]))
    words = f"The highest step read {abs(off):.0%} {'more' if off > 0 else 'less'} than the forecast, "
    words += f"most of it as {largest} ({'+' if differences[largest] > 0 else ''}{format_bytes(differences[largest])})"
    assert history.plan is not None
    if history.plan_changes:
        return f"{words}; the plan changed on the way."
    together = max(int(history.plan.plan.get("micro_batch_tokens") or 0), history.plan.longest_tokens)
    if off < 0 and highest.num_tokens < together:
        had = f"{highest.num_tokens:,} in {highest.num_micro_batches:,} micro-batches"
        return f"{words}: it was made for {together:,} tokens together, and the step had {had}."
    if off < 0 and foreseen.get("margin"):
        return f"{words}: {format_bytes(foreseen['margin'])} of it are a margin."
    return f"{words}."
