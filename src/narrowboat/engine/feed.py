"""Where forwards come from: rows, put together to micro-batches, or trains of segments (``carrying.py``).

A step batch's loss is the sum of its forwards' losses, each of which goes backwards before the next is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from narrowboat.data.batches import MicroBatch, collate, group_rows
from narrowboat.data.examples import Row
from narrowboat.distributed.ranks import Ranks
from narrowboat.engine.objective import Forward
from narrowboat.memory.installed import Installed
from narrowboat.memory.linear_loss import shift

LossOf = Callable[[Forward], torch.Tensor]
"""The loss of a forward."""


class Feed(Protocol):
    """What makes forwards of rows; it does this rank's share of them.

    Attributes:
        allows_replanning: whether the plan may change between two backwards of one step.
    """

    allows_replanning: bool

    def num_backwards(self, rows: Sequence[Row]) -> int:
        """How many losses ``losses`` gives."""
        ...

    def losses(self, rows: Sequence[Row], seed: int, loss_of: LossOf) -> Iterator[torch.Tensor]:
        """Losses of the step batch ``rows``; run each one's backward before asking for the next."""
        ...

    def num_evaluations(self, rows: Sequence[Row]) -> int:
        """How many losses ``evaluate`` gives."""
        ...

    def evaluate(self, rows: Sequence[Row], loss_of: LossOf) -> Iterator[torch.Tensor]:
        """Losses without gradients."""
        ...

    def by_token(self, row: Row, losses_of: LossOf) -> tuple[torch.Tensor, NDArray[np.int32]]:
        """The loss of each token ``[tokens]``, and what each has to predict."""
        ...

    def alone(self, rows: Sequence[Row]) -> Iterator[Forward]:
        """The forwards that need nothing of others, for a search after what is not finite."""
        ...

    def mark(self) -> Any:
        """Where it is, for ``go_back``."""
        ...

    def go_back(self, mark: Any) -> None:
        """Be where ``mark`` was taken."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """What the next step needs of the last one; None for nothing."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


class WholeRows:
    """Rows that need nothing of each other, as many together as the plan says.

    Args:
        installed: the model under its plan.
        pad_id: the token that fills short rows.
        ranks: whose share of the micro-batches is done here.
    """

    allows_replanning = True

    def __init__(self, installed: Installed, pad_id: int, ranks: Ranks) -> None:
        self._installed, self._pad_id, self._ranks = installed, pad_id, ranks

    def num_backwards(self, rows: Sequence[Row]) -> int:
        """Micro-batches in which something is learnt."""
        return len(self._ranks.deal(self._learnt_groups(rows)))

    def losses(self, rows: Sequence[Row], seed: int, loss_of: LossOf) -> Iterator[torch.Tensor]:
        """One for each micro-batch."""
        for group, counts in self._ranks.deal(self._learnt_groups(rows)):
            forward = self._forward([rows[i] for i in group], [row_seed(seed, i) for i in group])
            yield loss_of(forward) if counts else 0 * loss_of(forward)

    def num_evaluations(self, rows: Sequence[Row]) -> int:
        """As ``num_backwards``."""
        return self.num_backwards(rows)

    def evaluate(self, rows: Sequence[Row], loss_of: LossOf) -> Iterator[torch.Tensor]:
        """One for each micro-batch."""
        return self.losses(rows, 0, loss_of)

    def by_token(self, row: Row, losses_of: LossOf) -> tuple[torch.Tensor, NDArray[np.int32]]:
        """In one forward."""
        batch = self._collated([row])
        targets = shift(batch.labels)
        inputs = {
            "input_ids": batch.input_ids, "shift_labels": targets, "position_ids": batch.position_ids,
            "lengths": batch.lengths,
        }  # fmt: skip
        return losses_of(Forward(inputs, [0])), targets[0].cpu().numpy()

    def alone(self, rows: Sequence[Row]) -> Iterator[Forward]:
        """All of them."""
        for group in self._learnt_groups(rows):
            yield self._forward([rows[i] for i in group], [0] * len(group))

    def mark(self) -> None:
        """It is nowhere."""

    def go_back(self, mark: None) -> None:
        """There is nowhere to go."""

    def state_dict(self) -> None:
        """Nothing goes from one step to the next."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to go on from."""

    def _learnt_groups(self, rows: Sequence[Row]) -> list[list[int]]:
        groups = group_rows([row.num_tokens for row in rows], self._installed.plan.micro_batch_tokens)
        return [group for group in groups if any(rows[i].num_supervised for i in group)]

    def _collated(self, rows: Sequence[Row]) -> MicroBatch:
        return collate(rows, self._pad_id).to(self._installed.owner.device)

    def _forward(self, rows: Sequence[Row], seeds: Sequence[int]) -> Forward:
        batch = self._collated(rows)
        inputs = {
            "input_ids": batch.input_ids, "labels": batch.labels, "position_ids": batch.position_ids,
            "attention_mask": batch.attention_mask, "lengths": batch.lengths, "learnt": batch.learnt,
        }  # fmt: skip
        return Forward(inputs, seeds)


def row_seed(seed: int, row: int) -> int:
    """A row's own seed, by its place in the step batch, not in a micro-batch."""
    return (seed << 20) + row
