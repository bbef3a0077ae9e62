"""The governor: readings of memory in, plans out. It knows no engine and no device; its tests are tables.

Above ``high`` of the budget, and above what was foreseen, the run goes one step down: fewer rows together, then the
next rung of the ladder. After some steps well below that it goes one step up again, never beyond where it began. The
step batch stays the same all the while, and so does the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from narrowboat.plan import MemoryPlan

LOW = 0.7
"""Share of the threshold below which there is room to step up."""

PATIENCE_STEPS = 3
"""Steps in a row with room after which the run steps up."""

Memory = Literal["device", "pinned", "host"]
"""Which memory ran out."""


class Governor:
    """Holds the plan in force.

    Args:
        rungs: the plan that the run begins with, then thriftier ones; the ``micro_batch_tokens`` of the first count.
        budget_bytes: of the device.
        high: share of the budget above which to step down.
        foreseen_bytes: what the first plan was forecast to take; a reading up to it is no surprise.
    """

    def __init__(
        self, rungs: Sequence[MemoryPlan], budget_bytes: int, high: float = 0.9, foreseen_bytes: int = 0
    ) -> None:
        self.budget_bytes = budget_bytes
        self._rungs = tuple(rungs)
        self._most_tokens = self._tokens = self._rungs[0].micro_batch_tokens
        self._threshold_bytes = max(high * budget_bytes, min(foreseen_bytes, budget_bytes))
        self._rung = 0
        self._num_roomy = 0

    @property
    def plan(self) -> MemoryPlan:
        """The plan in force."""
        return self._rungs[self._rung].model_copy(update={"micro_batch_tokens": self._tokens})

    @property
    def is_last(self) -> bool:
        """Whether there is no thriftier rung."""
        return self._rung == len(self._rungs) - 1

    def begin_with(self, plan: MemoryPlan) -> None:
        """Start from a plan that an earlier session learnt."""
        plain = [rung.model_copy(update={"micro_batch_tokens": plan.micro_batch_tokens}) for rung in self._rungs]
        if plan in plain:
            self._rung = plain.index(plan)
        else:
            self._rungs = (plan, *self._rungs[1:])
        self._tokens = min(plan.micro_batch_tokens, self._most_tokens)

    def after_micro_batch(self, peak_bytes: int, row_tokens: int) -> bool:
        """Whether the plan changed, now that memory has reached ``peak_bytes`` with rows up to ``row_tokens``."""
        return peak_bytes > self._threshold_bytes and self._step_down(row_tokens)

    def after_step(self, peak_bytes: int) -> bool:
        """Whether the plan changed, now that a whole step has peaked at ``peak_bytes``."""
        self._num_roomy = self._num_roomy + 1 if peak_bytes < LOW * self._threshold_bytes else 0
        return self._num_roomy >= PATIENCE_STEPS and self._step_up()

    def after_failure(self, which: Memory, row_tokens: int) -> bool:
        """Whether there is a thriftier plan, now that memory has run out with rows up to ``row_tokens``."""
        if which == "device":
            return self._step_down(row_tokens)
        self._num_roomy = 0
        below = range(self._rung + 1, len(self._rungs))
        spared = [i for i in below if "host" not in self._rungs[i].places]
        self._rung = spared[0] if spared else self._rung
        return bool(spared)

    def _step_down(self, row_tokens: int) -> bool:
        self._num_roomy = 0
        if self._tokens >= 2 * row_tokens:  # rows go together
            self._tokens = max(row_tokens, self._tokens // 2)
            return True
        if self.is_last:
            return False
        self._rung += 1
        return True

    def _step_up(self) -> bool:
        self._num_roomy = 0
        if self._rung > 0:
            self._rung -= 1
            return True
        if self._tokens < self._most_tokens:
            self._tokens = min(self._most_tokens, 2 * self._tokens)
            return True
        return False
