"""Keyframes: which exchanges of a long dialogue matter most for its last answer.

Two scorers. By attention: the share of attention that the last answer pays to an exchange under the base model, which
costs a forward of the whole dialogue. By words: how much of the information that the last exchange's tokens carry
within the dialogue an exchange shares with it, which costs nothing to speak of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from narrowboat.data.examples import Tokens

AttentionMass = Callable[[Tokens, Sequence[tuple[int, int]], tuple[int, int]], NDArray[np.float64]]
"""``(input_ids, spans, answer)`` to the attention that the tokens ``answer`` pay to each of ``spans``."""


def lexical_scores(input_ids: Tokens, spans: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
    """Shared information of each span with the last one, in nats.

    A token that stands in few spans tells much: its weight is ``log(spans / spans that hold it)`` (inverse document
    frequency, Sparck Jones 1972). A span's score is the weight of the different tokens it shares with the last span.
    """
    kinds = [np.unique(input_ids[start:end]) for start, end in spans]
    values, counts = np.unique(np.concatenate(kinds), return_counts=True)
    weights = np.log(len(spans) / counts)
    last = np.isin(values, kinds[-1])
    return np.array([weights[np.isin(values, kind) & last].sum() for kind in kinds])


def keep_best(scores: ArrayLike, costs: ArrayLike, budget: int) -> list[int]:
    """Indices in rising order: the highest scores whose costs fit into ``budget`` together, the newest among equals."""
    values, sizes = np.asarray(scores, np.float64), np.asarray(costs, np.int64)
    kept: list[int] = []
    for index in sorted(range(len(values)), key=lambda i: (-values[i], -i)):
        if sizes[index] <= budget:
            kept.append(index)
            budget -= int(sizes[index])
    return sorted(kept)
