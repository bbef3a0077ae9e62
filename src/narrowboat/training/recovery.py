"""Running out of memory is an event, not an end: the same work again, one rung lower.

What failed has changed nothing: the engine takes back a step that ran out of memory. It is tried again outside of the
``except`` block, where the error and all the tensors that its traceback holds are gone. Each retry is one event with
the old and the new plan; on the last rung, where memory really is too small, the run ends with what would help.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine
from narrowboat.errors import OutOfMemory
from narrowboat.events import Notice, PlanChanged, Tell
from narrowboat.owner.causes import ADAPTERS, BASE_WEIGHTS, GRADIENTS, OPTIMIZER_STATES
from narrowboat.owner.gauge import Gauge
from narrowboat.plan import MemoryPlan
from narrowboat.training.governor import Governor, Memory
from narrowboat.training.signals import GivenUp
from narrowboat.units import format_bytes

MAX_SAME = 3
"""Tries under the last plan where memory ran out although the reading leaves room: holes, or somebody else's use."""

HELP = {
    BASE_WEIGHTS: "model.quantize: nf4",
    OPTIMIZER_STATES: "optimizer.name: adamw8bit",
    ADAPTERS: "a smaller lora.rank",
    GRADIENTS: "a smaller lora.rank",
}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """Which memory ran out, and what the error said."""

    memory: Memory
    words: str


class Recovery:
    """Runs work of an engine until it has the memory it needs.

    Args:
        engine: whose plan is changed.
        gauge: read after each micro-batch.
        governor: decides.
        tell: hears each change of plan.
    """

    def __init__(self, engine: Engine, gauge: Gauge, governor: Governor, tell: Tell) -> None:
        self.engine, self.gauge, self.governor, self._tell = engine, gauge, governor, tell

    def run(self, work: Callable[[], Result], rows: Sequence[Row], step: int) -> Result:
        """``work()``, which goes through ``rows`` in step ``step``; again after each time that memory ran out.

        Raises:
            OutOfMemory: it ran out under the thriftiest plan.
        """
        random, num_same = _random_state(), 0
        for attempt in itertools.count():
            try:
                self._apply()
                return work()
            except GivenUp:
                _set_random_state(random)
                raise
            except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
                failure = failure_of(error)
                if failure is None:
                    raise
            _clean_up(self.engine, thoroughly=attempt > 0)
            _set_random_state(random)
            ran_out, old = f"{failure.memory} memory ran out", self.governor.plan
            if self.governor.after_failure(failure.memory, _longest(rows)):
                self._tell_change(old, step, ran_out)
            else:
                num_same += 1
                if num_same > MAX_SAME or failure.memory != "device" or not self._has_room():
                    raise OutOfMemory(self._last_words(failure, step, rows))
                self._tell(
                    Notice(
                        f"{_where(step)}: {ran_out} under the thriftiest plan, though there is room; it is tried again."
                    )
                )
            self.gauge.read()  # what was seen before a change says nothing of what comes after it
        raise AssertionError("unreachable")

    def patiently(self, work: Callable[[], Result], rows: Sequence[Row]) -> Result:
        """The same outside of any step."""
        return self.run(work, rows, 0)

    def after_micro_batch(self, rows: Sequence[Row], step: int) -> None:
        """Step down before memory runs out; called inside ``work``."""
        old, peak_bytes = self.governor.plan, self.gauge.read()
        if self.governor.after_micro_batch(peak_bytes, _longest(rows)):
            self._tell_change(old, step, f"{format_bytes(peak_bytes)} of {self._budget} were used")
            self._apply()
            self.gauge.read()

    def after_step(self, step: int) -> None:
        """Step up where there is room; the next work begins with it."""
        old, peak_bytes = self.governor.plan, self.gauge.peak_bytes
        if self.governor.after_step(peak_bytes):
            self._tell_change(old, step + 1, f"{format_bytes(peak_bytes)} of {self._budget} were used")

    @property
    def _budget(self) -> str:
        return format_bytes(self.gauge.budget_bytes)

    def _has_room(self) -> bool:
        return sum(self.gauge.by_cause().values()) < 0.9 * self.gauge.budget_bytes

    def _tell_change(self, old: MemoryPlan, step: int, reason: str) -> None:
        new = self.governor.plan
        self._tell(PlanChanged(step, reason, _words(old), _words(new), new.model_dump()))

    def _apply(self) -> None:
        if self.engine.plan != self.governor.plan:
            self.engine.replan(self.governor.plan)

    def _last_words(self, failure: Failure, step: int, rows: Sequence[Row]) -> str:
        causes = self.gauge.by_cause()
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in list(causes.items())[:3])
        helps = dict.fromkeys(HELP.get(name, "a smaller data.max_tokens") for name in list(causes)[:2])
        advice = " or ".join(helps) or "a smaller data.max_tokens"
        return (
            f"{failure.memory.capitalize()} memory ran out in {_where(step)} under the thriftiest plan "
            f"({self.engine.plan.describe()}): {failure.words} memory.budget is {self._budget}.{_longest_words(rows)} "
            f"Largest parts at the peak: {parts or 'unknown'}. {advice.capitalize()} would help, or a larger "
            "memory.budget."
        )


def failure_of(error: BaseException) -> Failure | None:
    """Which memory ran out; None if it was something else."""
    words = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    words = words if words.endswith(".") else f"{words}."
    if isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in words:  # the latter: cuBLAS, for itself
        return Failure("device", words)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in words:
        return Failure("host", words)
    if "CUDA error: out of memory" in words:  # an allocation by the driver and not by torch's allocator: pinned
        return Failure("pinned", words)
    return None


def _where(step: int) -> str:
    return f"step {step}" if step else "evaluation"


def _words(plan: MemoryPlan) -> str:
    return f"{plan.describe()}, up to {plan.micro_batch_tokens:,} tokens together"


def _longest(rows: Sequence[Row]) -> int:
    return max((row.num_tokens for row in rows), default=1)


def _longest_words(rows: Sequence[Row]) -> str:
    """Which row it was: the longest, and the examples in it."""
    if not rows:
        return ""
    row = max(rows, key=lambda row: row.num_tokens)
    which = f", example {', '.join(f'{number:,}' for number in row.examples[:5])} of the data" if row.examples else ""
    return f" The longest row has {row.num_tokens:,} tokens{which}."


def _clean_up(engine: Engine, thoroughly: bool) -> None:
    """Let go of all that the failed work held; rings of old objects are looked for only where it was not enough."""
    engine.forget()
    gc.collect(2 if thoroughly else 1)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _set_random_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
