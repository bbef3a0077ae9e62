"""How fast a run goes and where its loss is heading: losses, tokens a second, time left from a median of steps."""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median

from narrowboat.events import StepDone

RECENT_STEPS = 20
"""How many steps the present pace and the time left are taken from."""

KEPT_LOSSES = 64
"""Losses that a sparkline may show."""


class SmoothedLoss:
    """An exponential mean that is right from the first value on; what is no number is passed over."""

    def __init__(self, memory_steps: float = 10) -> None:
        self._past = 1 - 1 / memory_steps
        self._sum = self._weight = 0.0

    def take(self, loss: float) -> float:
        """Count one more loss; gives back the mean so far, NaN if there was no number yet."""
        if math.isfinite(loss):
            self._sum = self._past * self._sum + (1 - self._past) * loss
            self._weight = self._past * self._weight + (1 - self._past)
        return self._sum / self._weight if self._weight else math.nan


class Pace:
    """The course of one session. Reckoned when a step ends, for the display reads it from a thread of its own."""

    def __init__(self) -> None:
        self.last: StepDone | None = None
        self.num_tokens = 0
        self.seconds = 0.0
        self.loss = math.nan
        """Smoothed; while the loss is not a number, the last one as it is."""
        self.tokens_per_second = 0.0
        """Of the last steps."""
        self._usual_seconds = 0.0
        self.losses: deque[float] = deque(maxlen=KEPT_LOSSES)
        self._smoothed = SmoothedLoss()
        self._recent: deque[StepDone] = deque(maxlen=RECENT_STEPS)
        self._heard = time.monotonic()

    def take(self, step: StepDone) -> None:
        """Count one more step."""
        self.last = step
        self.num_tokens += step.num_tokens
        self.seconds += step.seconds
        smoothed = self._smoothed.take(step.loss)
        self.loss = smoothed if math.isfinite(step.loss) else step.loss
        self._recent.append(step)
        recent_seconds = sum(step.seconds for step in self._recent)
        self.tokens_per_second = _rate(sum(step.num_tokens for step in self._recent), recent_seconds)
        self._usual_seconds = median(step.seconds for step in self._recent)
        self.losses.append(step.loss)
        self._heard = time.monotonic()

    @property
    def overall_tokens_per_second(self) -> float:
        """Tokens a second over the steps of the whole session."""
        return _rate(self.num_tokens, self.seconds)

    def seconds_left(self, of_this_step: float | None = None) -> float:
        """The median of the last steps for each that is left; the present one takes ``of_this_step``, where known."""
        if self.last is None or self.last.step >= self.last.num_steps:
            return 0.0
        if of_this_step is None:
            of_this_step = max(0.0, self._usual_seconds - (time.monotonic() - self._heard))
        return self._usual_seconds * (self.last.num_steps - self.last.step - 1) + of_this_step


def _rate(num_tokens: int, seconds: float) -> float:
    return num_tokens / seconds if seconds > 0 else 0.0
