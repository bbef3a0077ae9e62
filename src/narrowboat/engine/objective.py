"""What is learnt: from one forward of the model to a loss.

Cross-entropy with labels is what there is. A preference loss, say, would be another ``Objective``: it would count pairs
of rows instead of supervised tokens, and ask each forward for log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from narrowboat.data.examples import Row


@dataclass(frozen=True)
class Forward:
    """One forward of the model.

    Attributes:
        inputs: the model's arguments: ``input_ids``, positions and labels or targets ``[rows, tokens]``, and what else
            belongs to them.
        seeds: one for each row, from which its dropout follows.
    """

    inputs: Mapping[str, Any]
    seeds: Sequence[int]


class Objective(Protocol):
    """A loss that is a sum over items, divided by the step batch's number of items."""

    def num_items(self, rows: Sequence[Row]) -> int:
        """How many items ``rows`` hold; at least 1."""
        ...

    def loss(self, forward: Forward, num_items: int, scale: float | None = None) -> torch.Tensor:
        """A scalar: the forward's summed loss over ``num_items``.

        Args:
            forward: what goes through the model.
            num_items: those of the whole step batch.
            scale: float16's loss scale, by which the loss's backward will be multiplied.
        """
        ...

    def by_token(self, forward: Forward) -> torch.Tensor:
        """The loss of each position of a single row, ``[tokens]``; 0 where nothing is learnt."""
        ...


class CrossEntropy:
    """Mean cross-entropy of the supervised tokens, in nats."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def num_items(self, rows: Sequence[Row]) -> int:
        """Supervised tokens."""
        return max(1, sum(row.num_supervised for row in rows))

    def loss(self, forward: Forward, num_items: int, scale: float | None = None) -> torch.Tensor:
        """Scaling begins at the logits: what follows them is held in 16 bits."""
        weights = None
        if scale is not None and torch.is_grad_enabled():
            ids = forward.inputs["input_ids"]
            weights = torch.full(ids.shape, scale / num_items, device=ids.device)
        divisor = num_items if weights is None else scale
        loss: torch.Tensor = self._model(
            **forward.inputs, dropout_seeds=forward.seeds, loss_weights=weights, num_items_in_batch=divisor
        ).loss
        return loss

    def by_token(self, forward: Forward) -> torch.Tensor:
        """``[tokens]``."""
        losses: torch.Tensor = self._model(**forward.inputs, dropout_seeds=forward.seeds, by_token=True).loss
        return losses[0]
