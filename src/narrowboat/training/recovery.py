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
from typing import TypeVar, get_args

import torch

from narrowboat.data.examples import Row
from narrowboat.distributed.ranks import Said
from narrowboat.engine.engine import Engine
from narrowboat.errors import OutOfMemory, RankError, first_line
from narrowboat.events import Notice, PlanChanged, Tell
from narrowboat.owner.causes import ADAPTERS, BASE_WEIGHTS, GRADIENTS, OPTIMIZER_STATES
from narrowboat.owner.gauge import Gauge
from narrowboat.plan import MemoryPlan
from narrowboat.training.governor import Governor, Memory
from narrowboat.training.signals import GivenUp
from narrowboat.units import format_bytes

GIVEN_UP, MEMORIES = "given up", get_args(Memory)

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
        self._ranks = engine.ranks

    def run(self, work: Callable[[], Result], rows: Sequence[Row], step: int) -> Result:
        """``work()``, which goes through ``rows`` in step ``step``; again after each time that memory ran out.

        All ranks do it together: where it fails on one, all take it back, and all go on under the same plan.

        Raises:
            OutOfMemory: it ran out under the thriftiest plan.
            RankError: it failed on another rank for another reason.
        """
        random, num_same = _random_state(), 0
        for attempt in itertools.count():
            try:
                self._apply()
                result = work()
                self._ranks.meet()
                return result
            except GivenUp:
                self._ranks.fail(GIVEN_UP, "it was asked to stop")
                _set_random_state(random)
                raise
            except RankError as error:
                if error.kind == GIVEN_UP:
                    _set_random_state(random)
                    raise GivenUp from None
                if error.kind not in MEMORIES:
                    raise
                failure = Failure(error.kind, str(error))  # type: ignore[arg-type]
            except Exception as error:
                found = failure_of(error)
                self._ranks.fail(found.memory if found else "", found.words if found else first_line(error))
                if found is None:
                    raise
                failure = found
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

    def alone(self, work: Callable[[], Result], step: int) -> Result:
        """``work()`` of this rank only; where there are others, no plan is changed for it."""
        return self.run(work, [], step) if self._ranks.num == 1 else work()

    def after_micro_batch(self, rows: Sequence[Row], step: int) -> None:
        """Step down before memory runs out; called inside ``work``."""
        old, peak_bytes = self.governor.plan, self._highest(self.gauge.read())
        if self.governor.after_micro_batch(peak_bytes, _longest(rows)):
            self._tell_change(old, step, f"{format_bytes(peak_bytes)} of {self._budget} were used")
            self._apply()
            self.gauge.read()

    def after_step(self, step: int) -> None:
        """Step up where there is room; the next work begins with it."""
        old, peak_bytes = self.governor.plan, self._highest(self.gauge.peak_bytes)
        if self.governor.after_step(peak_bytes):
            self._tell_change(old, step + 1, f"{format_bytes(peak_bytes)} of {self._budget} were used")

    @property
    def _budget(self) -> str:
        return format_bytes(self.gauge.budget_bytes)

    def _highest(self, peak_bytes: int) -> int:
        """Of all ranks, so that all decide alike."""
        return self._ranks.meet(Said(peak_bytes=peak_bytes)).peak_bytes

    def _has_room(self) -> bool:
        is_full = sum(self.gauge.by_cause().values()) >= 0.9 * self.gauge.budget_bytes
        return not self._ranks.meet(Said(is_full=is_full)).is_full

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
    if not isinstance(error, RuntimeError | MemoryError):
        return None
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
