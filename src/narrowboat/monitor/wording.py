"""How events are said to people: a label and one line each, numbers with their units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from narrowboat.events import (
    CheckpointSaved,
    DataReady,
    Evaluated,
    Event,
    ModelReady,
    Notice,
    PlanChanged,
    PlanChosen,
    RunEnded,
    RunStarted,
    StepDone,
)
from narrowboat.monitor.accounting import account_lines
from narrowboat.monitor.pace import Pace
from narrowboat.units import format_bytes, format_seconds

SHOWN_ITEMS = 20
"""Longest list that is shown; of a longer one the rest is counted."""


def line(event: Event) -> tuple[str, str] | None:
    """An event's label and words; None for a step and an end, which have words of their own below."""
    match event:
        case RunStarted():
            resumed = f", going on after step {event.resumed_from_step:,}" if event.resumed_from_step else ""
            return "run", f"{event.folder}{resumed}"
        case DataReady():
            return "data", "\n".join(account_lines(event.account))
        case ModelReady():
            share = 100 * event.num_trainable / max(1, event.num_parameters)
            targets = ", ".join(f"{name} x {count:,}" for name, count in event.modules_by_target.items())
            return "model", (
                f"{event.name}, {event.num_parameters:,} parameters in {event.dtype} on {event.device}; "
                f"{event.num_trainable:,} trainable ({share:.2g} %): {targets or 'no modules'}"
            )
        case PlanChosen():
            forecast = memory_words(sum(event.forecast_bytes.values()), event.budget_bytes)
            together = event.plan.get("micro_batch_tokens") or 0
            shared = f", {together:,} together" if together > event.longest_tokens else ""
            words = f"; forecast {forecast} for {event.longest_tokens:,} tokens{shared}" if event.forecast_bytes else ""
            return "plan", event.description + words
        case PlanChanged():
            return "plan", f"from step {event.step:,}: {event.new}, was: {event.old} ({event.reason})"
        case Evaluated():
            measured = f"on {event.num_supervised_tokens:,} tokens, {format_seconds(event.seconds)}"
            return "held out", f"loss {event.loss:.4f} after step {event.step:,}, {measured}"
        case CheckpointSaved():
            return "saved", f"{event.folder}, {format_bytes(event.num_bytes)}, {format_seconds(event.seconds)}"
        case Notice():
            return "notice", event.text
    return None


def step_line(step: StepDone, pace: Pace) -> str:
    """A step for a log: with its own loss, not the smoothed one."""
    left = f", {format_seconds(pace.seconds_left())} left" if step.step < step.num_steps else ""
    return (
        f"step {step.step:,}/{step.num_steps:,}, loss {step.loss:.4f}, {pace.tokens_per_second:,.1f} tokens/s, "
        f"memory {memory_words(step.peak_bytes, step.budget_bytes)}{left}"
    )


def ending(end: RunEnded, pace: Pace) -> list[tuple[str, str]]:
    """The closing summary, a label and its words a line."""
    reason = f": {end.error}" if end.error else ""
    lines = [(end.outcome, f"after step {end.step:,}, {format_seconds(end.seconds)}{reason}")]
    if end.first_heldout_loss is not None:
        lines.append(("held out", f"loss {change_in_loss(end.first_heldout_loss, end.last_heldout_loss)}"))
    if end.peak_bytes:
        share = f" ({100 * end.peak_bytes / end.budget_bytes:.0f} % of the budget)" if end.budget_bytes else ""
        lines.append(("peak", memory_words(end.peak_bytes, end.budget_bytes) + share))
    if pace.seconds:
        steps = f"{pace.num_tokens:,} tokens in {format_seconds(pace.seconds)} of steps"
        lines.append(("pace", f"{pace.overall_tokens_per_second:,.1f} tokens/s, {steps}"))
    if end.adapter_folder:
        lines.append(("adapter", end.adapter_folder))
    if end.report_path:
        lines.append(("report", end.report_path))
    return lines


def memory_words(peak_bytes: int, budget_bytes: int) -> str:
    """``5.91 GiB of 8.00 GiB``."""
    return format_bytes(peak_bytes) + (f" of {format_bytes(budget_bytes)}" if budget_bytes else "")


def is_histogram(value: Any) -> bool:
    """Counts by upper bound, as ``{"2048": 17}``."""
    return isinstance(value, Mapping) and bool(value) and all(str(key).isdecimal() for key in value)


def spell(key: str) -> str:
    """A key in words, ``num_supervised_tokens`` as "supervised tokens"; a unit that its value carries is left out."""
    words = key.removeprefix("num_").removesuffix("_bytes").removesuffix("_seconds")
    return words.replace("_", " ").strip() or key


def quantity(key: str, value: Any) -> str:
    """A value with the unit that its key ends in."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(key, value)
    if isinstance(value, Mapping):
        return ", ".join(f"{spell(str(name))} {quantity(str(name), item)}" for name, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return _listed(key, value)
    return str(value)


def _listed(key: str, values: Sequence[Any]) -> str:
    """Numbers by their mean, of other things the first ones. A pair is a place and what it holds."""
    if _are_numbers(values):
        return f"{_number(key, sum(values) / len(values))} on average of {len(values):,}"
    more = f"; and {len(values) - SHOWN_ITEMS:,} more" if len(values) > SHOWN_ITEMS else ""
    is_paired = all(isinstance(value, list | tuple) for value in values)
    words = [": ".join(map(str, value)) if is_paired else quantity(key, value) for value in values[:SHOWN_ITEMS]]
    return ("; " if is_paired else ", ").join(words) + more or "none"


def _are_numbers(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, int | float) for value in values)


def _number(key: str, value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key.endswith("_seconds"):
        return format_seconds(value)
    if key.endswith("share"):
        return f"{100 * value:.4g} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def change_in_loss(first: float, last: float | None) -> str:
    """``2.4120 -> 1.9871 (17.6 % lower)``."""
    if last is None:
        return f"{first:.4f}"
    change = how_much(first, last)
    return f"{first:.4f} -> {last:.4f}" + (f" ({change})" if change else "")


def how_much(first: float, last: float) -> str:
    """``17.6 % lower``; nothing where that cannot be said."""
    if not (math.isfinite(first) and math.isfinite(last)) or first <= 0:
        return ""
    if first == last:
        return "unchanged"
    return f"{100 * abs(last - first) / first:.1f} % {'lower' if last < first else 'higher'}"
