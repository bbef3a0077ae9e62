"""The search: the fastest plan that fits the budget, and the longest row that any plan fits in.

Going down the ladder, the first rung that fits is found; what it leaves free of the budget is then spent on time: as
many layers as fit keep their activations, and short rows go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from narrowboat.errors import AnatomyError, BudgetError
from narrowboat.plan import LayerMode, MemoryPlan
from narrowboat.planner.amounts import Forecast, Forecasts
from narrowboat.planner.cost import seconds
from narrowboat.planner.ladder import Wanted, ladder
from narrowboat.planner.target import Limits, Target
from narrowboat.units import format_bytes

LOOK_AHEAD = 1
"""Rungs beyond the best so far that may be better all the same: neighbours are close."""

LENGTH_STEP = 1024
"""Longest rows are found to this many tokens."""

MOST_TOGETHER = 32
"""Questions that are answered together: with more the arithmetic takes longer than going through the weights."""

WORKING_SET = "working set"

FIRST_GUESS, LONGEST_TOKENS = 2**16, 2**24


class Search:
    """Plans for one workload on one machine; forecasts are made once."""

    def __init__(self, forecasts: Forecasts, target: Target, wanted: Wanted = "auto") -> None:
        self.work, self.target = forecasts.work, target
        self._forecaster = forecasts
        refused = forecasts.refused
        self.rungs = tuple(ladder(target.on_card, refused, wanted))
        if not self.rungs:
            raise AnatomyError(
                f"memory.plan: {wanted} does not give right gradients for this model: "
                f"{refused[cast(LayerMode, wanted)]}; use memory.plan: auto."
            )

    def forecast(self, plan: MemoryPlan, num_tokens: int, num_rows: int = 1, many: bool = False) -> Forecast:
        """With margin and seconds; ``many`` as for ``Forecaster.forecast``."""
        bare = self._forecaster.forecast(plan, num_tokens, num_rows, many)
        target, margin = self.target, self.target.margin.of(bare.device_bytes)
        range_ = sorted(seconds(bare.work, rates, target.on_card) for rates in target.others)
        return replace(
            bare,
            device_bytes=bare.device_bytes + margin,
            by_cause=bare.by_cause | ({"margin": margin} if margin else {}),
            seconds=None if target.rates is None else seconds(bare.work, target.rates, target.on_card),
            seconds_range=(range_[0], range_[-1]) if range_ else None,
        )

    def in_every_phase(self, found: Forecast) -> Forecast:
        """The same with the peak of each phase; the highest is what the device has to hold."""
        bare = self._forecaster.phases(found.plan, found.num_tokens, found.num_rows)
        phases = {name: size + self.target.margin.of(size) for name, size in bare.items()}
        device_bytes = max(found.device_bytes, *phases.values())
        more = device_bytes - found.device_bytes
        by_cause = found.by_cause | ({WORKING_SET: found.by_cause.get(WORKING_SET, 0) + more} if more else {})
        return replace(found, phases=phases, device_bytes=device_bytes, by_cause=by_cause)

    def choose(self, num_tokens: int, limits: Limits, shorter: MemoryPlan | None = None) -> Forecast:
        """The fastest plan for a row of ``num_tokens``.

        Args:
            num_tokens: of the row.
            limits: what may be taken.
            shorter: the fastest plan for a shorter row, if that is known: what did not fit it need not be tried.

        Raises:
            BudgetError: with the thriftiest plan, its largest parts and the limits.
        """
        rungs = self.rungs if shorter is None else self.from_here_down(shorter)
        for i, plan in enumerate(rungs):
            found = self.forecast(plan, num_tokens)
            if limits.allow(found):
                near = (self.forecast(other, num_tokens) for other in rungs[i + 1 : i + 1 + LOOK_AHEAD])
                fitting = [found, *(other for other in near if limits.allow(other))]
                best = min((self._keep_layers(each, limits) for each in fitting), key=lambda each: each.slowest)
                found = self.in_every_phase(best)
                if limits.allow(found):
                    return found
        raise BudgetError(self._refusal(found, limits))

    def from_here_down(self, plan: MemoryPlan) -> tuple[MemoryPlan, ...]:
        """``plan``, which was chosen from the ladder, and the rungs below it."""
        plain = plan.model_copy(update={"num_kept_layers": 0, "micro_batch_tokens": self.rungs[0].micro_batch_tokens})
        below = self.rungs[self.rungs.index(plain) + (plan.num_kept_layers == 0) :]
        return (plan, *below)

    def longest(self, limits: Limits) -> Forecast:
        """The longest row that fits, and the fastest plan for it.

        Raises:
            BudgetError: not even a short row fits.
        """
        best: Forecast | None = None
        num_shorter = 0
        # The last rung takes longest to rehearse, so the one before it sets the mark.
        for plan in (*self.rungs[-2:-1], self.rungs[-1], *reversed(self.rungs[:-2])):
            mark = 0 if best is None else best.num_tokens
            num_tokens = self._longest(plan, limits, mark)
            if num_tokens > mark or (num_tokens == mark > 0 and plan != self.rungs[-1]):
                best, num_shorter = self.forecast(plan, num_tokens), 0
            elif plan != self.rungs[-1]:
                num_shorter += 1
            if num_shorter > LOOK_AHEAD:
                break
        if best is None:
            raise BudgetError(self._refusal(self.forecast(self.rungs[-1], LENGTH_STEP), limits))
        return self.in_every_phase(self._keep_layers(best, limits))

    def _longest(self, plan: MemoryPlan, limits: Limits, mark: int) -> int:
        """Tokens of the longest row that ``plan`` fits in, in whole steps, if that is ``mark`` or more."""

        def fits(num_tokens: int, many: bool = False) -> bool:
            return limits.allow(self.forecast(plan, num_tokens, many=many))

        if mark and plan != self.rungs[-1] and not fits(mark):
            return 0
        if mark and not fits(mark + LENGTH_STEP):
            return mark
        first = mark // LENGTH_STEP + 1 if mark else FIRST_GUESS // LENGTH_STEP
        return LENGTH_STEP * largest(LONGEST_TOKENS // LENGTH_STEP, lambda n: fits(n * LENGTH_STEP, many=True), first)

    def _keep_layers(self, found: Forecast, limits: Limits) -> Forecast:
        """The same plan with as many layers kept as fit."""
        plan = found.plan
        if plan.layers == "keep" or plan.weights != "device" or plan.input_stride > 1:
            return found

        def kept(num_layers: int) -> Forecast:
            return self.forecast(
                plan.model_copy(update={"num_kept_layers": num_layers}), found.num_tokens, found.num_rows
            )

        num_layers = largest(self._forecaster.num_layers - 1, lambda n: limits.allow(kept(n)))
        return kept(num_layers) if num_layers else found

    def group_rows(self, found: Forecast, lengths: Sequence[int], batch_tokens: int, limits: Limits) -> Forecast:
        """The same plan with as many tokens in a forward as fit, so that short rows go together, and its forecast.

        Args:
            found: the plan for the longest row.
            lengths: of all rows.
            batch_tokens: of a step batch; no forward holds more.
            limits: what may be taken.
        """
        ordered = sorted(lengths)
        typical = {ordered[0], ordered[len(ordered) // 2], ordered[-1]}

        tokens, highest = found.num_tokens, found
        while 2 * tokens <= batch_tokens:
            full = [self.forecast(found.plan, n, rows) for n in typical if (rows := 2 * tokens // n) > 1]
            if not all(limits.allow(forecast) for forecast in full):
                break
            tokens, highest = 2 * tokens, max(found, *full, key=lambda forecast: forecast.device_bytes)
        together = replace(highest, plan=found.plan.model_copy(update={"micro_batch_tokens": tokens}))
        return self.in_every_phase(together)

    def group_answers(self, found: Forecast, most: int, limits: Limits) -> Forecast:
        """The same plan with as many questions answered together as fit, at most ``most``, and its forecast.

        Args:
            found: the plan for the longest question with its expected answer.
            most: answers that are wanted.
            limits: what may be taken.
        """
        if found.plan.inputs != "device":
            return found  # what several leave on the host or the disk nobody has forecast
        each = found.num_tokens + self.work.options.evaluate.answer_tokens

        def together(num: int) -> Forecast:
            plan = found.plan.model_copy(update={"micro_batch_tokens": num * each})
            return self.in_every_phase(replace(found, plan=plan))

        num = largest(min(most, MOST_TOGETHER), lambda num: limits.allow(together(num)))
        return together(num) if num > 1 else found

    def _refusal(self, thriftiest: Forecast, limits: Limits) -> str:
        largest_parts = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in list(thriftiest.by_cause.items())[:3]
        )
        where = _where_it_fails(thriftiest, limits)
        layer_bytes = self._forecaster.layer_bytes
        layer = f" Its largest layer takes {format_bytes(layer_bytes)}." if layer_bytes > limits.device_bytes else ""
        return (
            f"The thriftiest exact plan ({thriftiest.plan.describe()}) peaks at "
            f"{format_bytes(thriftiest.device_bytes)} for a row of {thriftiest.num_tokens:,} tokens; {where}. "
            f"Largest parts: {largest_parts}.{layer}"
        )


def _where_it_fails(forecast: Forecast, limits: Limits) -> str:
    if forecast.device_bytes > limits.device_bytes:
        return f"memory.budget is {format_bytes(limits.device_bytes)}"
    if limits.host_bytes is not None and forecast.host_bytes > limits.host_bytes:
        needed = format_bytes(forecast.host_bytes)
        return f"it needs {needed} of host memory, and memory.host_budget is {format_bytes(limits.host_bytes)}"
    needed, free = format_bytes(forecast.disk_bytes), format_bytes(limits.disk_bytes or 0)
    return f"it needs a scratch file of {needed}, and {free} are free"


def largest(limit: int, fits: Callable[[int], bool], first: int = 1) -> int:
    """The largest number up to ``limit`` that fits, 0 if 1 does not; ``first`` is tried first.

    Whatever is smaller than a number that fits has to fit too.
    """
    low, high = 0, first
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
