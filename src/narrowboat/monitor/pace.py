"""How fast a run goes and where its loss is heading: smoothed loss, tokens a second, time left."""

from __future__ import annotations

import math
import time
from collections import deque

from narrowboat.events import StepDone

RECENT_STEPS = 20
"""How many steps the present pace and the time left are taken from."""


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
    """The course of one sitting. Reckoned when a step ends, for the display reads it from a thread of its own."""

    def __init__(self) -> None:
        self.last: StepDone | None = None
        self.num_tokens = 0
        self.seconds = 0.0
        self.loss = math.nan
        """Smoothed; while the loss is not a number, the last one as it is."""
        self.tokens_per_second = 0.0
        """Of the last steps."""
        self._mean_seconds = 0.0
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
        self._mean_seconds = recent_seconds / len(self._recent)
        self._heard = time.monotonic()

    @property
    def overall_tokens_per_second(self) -> float:
        """Of the whole sitting, within steps."""
        return _rate(self.num_tokens, self.seconds)

    @property
    def seconds_left(self) -> float:
        """From the mean of the last steps, less the time since the last one ended."""
        if self.last is None or self.last.step >= self.last.num_steps:
            return 0.0
        since = min(time.monotonic() - self._heard, self._mean_seconds)
        return self._mean_seconds * (self.last.num_steps - self.last.step) - since


def _rate(num_tokens: int, seconds: float) -> float:
    return num_tokens / seconds if seconds > 0 else 0.0
