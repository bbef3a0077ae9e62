"""How sure a difference is: a paired bootstrap over documents (Efron 1979; for scores of texts, Koehn 2004).

The same documents are drawn with replacement for both models, so what makes a document hard for both falls out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowboat.evaluation.scores import Score

NUM_DRAWS = 2000
SURE = 0.95
FEWEST = 5
"""With fewer documents an interval would say more than is known."""


@dataclass(frozen=True)
class Compared:
    """A score of base and adapter; ``low`` to ``high`` holds the true difference 95 times in 100, None if unknown."""

    name: str
    base: float
    adapter: float
    low: float | None
    high: float | None
    num: int
    is_share: bool = True

    @property
    def difference(self) -> float:
        """Adapter less base."""
        return self.adapter - self.base

    def line(self) -> str:
        """``ROUGE-L              12.0 %     31.5 %    +19.5 (+11.2 to +26.8)``."""
        factor, unit, digits = (100, " %", 1) if self.is_share else (1, "", 4)
        told = [f"{factor * value:.{digits}f}{unit}" for value in (self.base, self.adapter)]
        line = f"{self.name:<18} {told[0]:>10} {told[1]:>10}   {factor * self.difference:+.{digits}f}"
        if self.low is None or self.high is None:
            return line
        return f"{line} ({factor * self.low:+.{digits}f} to {factor * self.high:+.{digits}f})"

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {"base": self.base, "adapter": self.adapter, "difference": self.difference,
                "interval": None if self.low is None else [self.low, self.high], "num": self.num}  # fmt: skip


def compared(score: Score) -> Compared:
    """The score of all, and the interval of the difference; the draws are the same each time."""
    num = len(score.base)
    both = [float(score.of(rows.sum(0, keepdims=True))[0]) for rows in (score.base, score.adapter)]
    low = high = None
    if num >= FEWEST:
        draws = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), NUM_DRAWS)  # [draws, documents]
        differences = score.of(draws @ score.adapter) - score.of(draws @ score.base)
        low, high = (float(value) for value in np.nanquantile(differences, ((1 - SURE) / 2, (1 + SURE) / 2)))
    return Compared(score.name, both[0], both[1], low, high, num, score.is_share)
