"""Keyframes: which exchanges of a long dialogue matter most for its last answer.

There are two scorers. ``attention`` takes the share of attention that the last answer pays to an exchange in the base
model; it costs a forward of the whole dialogue. ``lexical`` weighs the tokens that an exchange shares with the last one
by how rare they are in the dialogue; it costs almost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from narrowboat.data.examples import Tokens

AttentionMass = Callable[[Tokens, Sequence[tuple[int, int]], tuple[int, int]], NDArray[np.float64]]
"""Maps ``(input_ids, spans, answer)`` to the attention that the tokens ``answer`` pay to each of ``spans``."""


def lexical_scores(input_ids: Tokens, spans: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
    """The information that each span shares with the last one, in nats.

    A token's weight is ``log(spans / spans that contain it)`` (inverse document frequency, Sparck Jones 1972), so rare
    tokens weigh more. A span's score is the summed weight of the different tokens that it shares with the last span.
    """
    kinds = [np.unique(input_ids[start:end]) for start, end in spans]
    values, counts = np.unique(np.concatenate(kinds), return_counts=True)
    weights = np.log(len(spans) / counts)
    last = np.isin(values, kinds[-1])
    return np.array([weights[np.isin(values, kind) & last].sum() for kind in kinds])


def keep_best(scores: ArrayLike, costs: ArrayLike, budget: int) -> list[int]:
    """Indices, in rising order, of the highest scores whose costs together fit ``budget``; of equal scores the
    newest.
    """
    values, sizes = np.asarray(scores, np.float64), np.asarray(costs, np.int64)
    kept: list[int] = []
    for index in sorted(range(len(values)), key=lambda i: (-values[i], -i)):
        if sizes[index] <= budget:
            kept.append(index)
            budget -= int(sizes[index])
    return sorted(kept)
