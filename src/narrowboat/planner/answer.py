"""The answer to "what fits?": the plan, its neighbours with what each costs, and what would help where nothing fits.

``as_dict`` is what ``narrowboat plan --json`` prints, and stays stable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from narrowboat.errors import BudgetError
from narrowboat.options.schema import Options
from narrowboat.planner.amounts import Forecast
from narrowboat.planner.search import LENGTH_STEP, Search
from narrowboat.planner.target import Limits

NUM_NEIGHBOURS = 2
"""Rungs above and below the chosen one that are shown."""


@dataclass(frozen=True)
class Choice:
    """A plan beside others.

    Attributes:
        forecast: what it takes.
        fits: whether that is allowed.
        option: what the user would have to set for it, which may change the result; empty for an exact plan.
    """

    forecast: Forecast
    fits: bool
    option: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The values as a dictionary for JSON."""
        forecast = self.forecast
        return {
            "fits": self.fits,
            "option": self.option or None,
            "tokens": forecast.num_tokens,
            "plan": forecast.plan.model_dump(),
            "description": forecast.plan.describe(),
            "forecast": bytes_of(forecast),
            "seconds_per_step": forecast.seconds,
            "seconds_per_step_range": forecast.seconds_range,
        }


@dataclass(frozen=True)
class Answer:
    """What ``plan`` found out.

    Attributes:
        best: the fastest plan that fits, or the thriftiest one if none does.
        alternatives: its neighbours on the ladder; where nothing fits, options that would help.
        lengths: the same question for other lengths.
        limits: what may be taken.
        notes: sentences for people.
    """

    best: Choice
    alternatives: list[Choice]
    lengths: list[Choice]
    limits: Limits
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The values as a dictionary for JSON."""
        best = self.best
        return {
            "fits": best.fits,
            "tokens": best.forecast.num_tokens,
            "plan": best.forecast.plan.model_dump(),
            "forecast": bytes_of(best.forecast),
            "seconds_per_step": best.forecast.seconds,
            "seconds_per_step_range": best.forecast.seconds_range,
            "alternatives": [choice.as_dict() for choice in self.alternatives],
        }


def bytes_of(forecast: Forecast) -> dict[str, Any]:
    """The values as a dictionary for JSON."""
    return {
        "device_bytes": forecast.device_bytes,
        "host_bytes": forecast.host_bytes,
        "disk_bytes": forecast.disk_bytes,
        "file_bytes": forecast.file_bytes,
        "by_cause": forecast.by_cause,
        "phases": forecast.phases,
    }


def answer(
    search: Search,
    limits: Limits,
    num_tokens: int | None,
    other_search: Callable[[Options], Search],
    with_lengths: bool = False,
) -> Answer:
    """Ask for a row of ``num_tokens``, or for the longest one if None.

    Args:
        search: plans for the workload.
        limits: what may be taken.
        num_tokens: of the row.
        other_search: the same under other options.
        with_lengths: ask for other lengths as well, which takes longer.
    """
    try:
        best = search.longest(limits) if num_tokens is None else search.choose(num_tokens, limits)
        fits = True
    except BudgetError:
        best, fits = search.forecast(search.rungs[-1], num_tokens or LENGTH_STEP), False
    alternatives = list(_neighbours(search, best, limits) if fits else _offers(search, best, limits, other_search))
    lengths = list(_lengths(search, best.num_tokens, limits)) if with_lengths and fits else []
    return Answer(Choice(best, fits), alternatives, lengths, limits, _notes(search, best))


def _neighbours(search: Search, best: Forecast, limits: Limits) -> Iterator[Choice]:
    place = len(search.rungs) - len(search.from_here_down(best.plan)) + (best.plan.num_kept_layers > 0)
    near = search.rungs[max(0, place - NUM_NEIGHBOURS) : place + NUM_NEIGHBOURS + 1]
    for plan in near:
        if plan != best.plan:
            forecast = search.forecast(plan, best.num_tokens)
            yield Choice(forecast, limits.allow(forecast))


def _offers(
    search: Search, thriftiest: Forecast, limits: Limits, other_search: Callable[[Options], Search]
) -> Iterator[Choice]:
    """What lossy options would need, the thriftiest plan taken with each; and how long a row would fit exactly."""
    for option, options in _lossy(search.work.options):
        other = other_search(options)
        forecast = other.forecast(other.rungs[-1], thriftiest.num_tokens)
        yield Choice(forecast, limits.allow(forecast), option)
    try:
        shorter = search.longest(limits)
        yield Choice(shorter, True, f"data.max_tokens: {shorter.num_tokens}")
    except BudgetError:
        return


def _lossy(options: Options) -> Iterator[tuple[str, Options]]:
    if options.model.quantize == "none":
        yield "model.quantize: nf4", _with(options, "model", quantize="nf4")
    if options.optimizer.name == "adamw" and options.optimizer.states == "device":
        yield "optimizer.name: adamw8bit", _with(options, "optimizer", name="adamw8bit")
    if isinstance(options.lora.rank, int) and options.lora.rank >= 16:
        rank = options.lora.rank // 2
        yield f"lora.rank: {rank}", _with(options, "lora", rank=rank)


def _with(options: Options, group: str, **changes: Any) -> Options:
    return options.model_copy(update={group: getattr(options, group).model_copy(update=changes)})


def _lengths(search: Search, num_tokens: int, limits: Limits) -> Iterator[Choice]:
    """Doubled from ``LENGTH_STEP`` to the first that does not fit."""
    length, plan = LENGTH_STEP, None
    while length <= 2 * num_tokens:
        try:
            found = search.choose(length, limits, plan)
            yield Choice(found, True)
            plan = found.plan
        except BudgetError:
            yield Choice(search.forecast(search.rungs[-1], length), False)
            return
        length *= 2


def _notes(search: Search, best: Forecast) -> list[str]:
    positions = search.work.positions
    if positions and best.num_tokens > positions:
        return [
            f"{best.num_tokens:,} tokens are more than the model's {positions:,} positions: RoPE scaling by a factor "
            f"of {-(-best.num_tokens // positions)} (yarn or dynamic) would be needed."
        ]
    return []
