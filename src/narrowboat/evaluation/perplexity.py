"""Held-out loss, and perplexity by place: how well the model predicts early and late in a document.

A carry that loses what matters shows in the late places. Places are grouped by powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from narrowboat.engine.engine import TokenLosses

FIRST_GROUP_TOKENS = 64


@dataclass(frozen=True)
class Group:
    """Tokens predicted at places ``start`` to ``stop`` of their documents."""

    start: int
    stop: int
    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """How many equally likely tokens the model wavers between."""
        return math.exp(self.loss)


@dataclass(frozen=True)
class Perplexity:
    """Mean loss in nats over all learnt tokens, and by place."""

    loss: float
    num_tokens: int
    by_place: tuple[Group, ...]

    @property
    def perplexity(self) -> float:
        """How many equally likely tokens the model wavers between."""
        return math.exp(self.loss)


def perplexity(found: Iterable[TokenLosses]) -> Perplexity:
    """Put the losses of held-out rows together; with no learnt token the loss is NaN."""
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for row in found:
        groups = np.maximum(np.ceil(np.log2((row.places + 1) / FIRST_GROUP_TOKENS)), 0).astype(np.int64)
        for group in np.unique(groups).tolist():
            here = row.losses[groups == group]
            sums[group] = sums.get(group, 0.0) + float(here.sum(dtype=np.float64))
            counts[group] = counts.get(group, 0) + len(here)
    total = sum(counts.values())
    by_place = tuple(
        Group(FIRST_GROUP_TOKENS * 2 ** (group - 1) if group else 0, FIRST_GROUP_TOKENS * 2**group,
              sums[group] / counts[group], counts[group])
        for group in sorted(sums)
    )  # fmt: skip
    return Perplexity(sum(sums.values()) / total if total else math.nan, total, by_place)
