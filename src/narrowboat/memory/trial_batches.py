"""What goes through a miniature in a trial: two rows of random tokens, for the model and for plain autograd.

A row may hold two documents, which plain autograd takes one by one: what a model makes of them in one row has to be the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowboat.model.miniature import FIRST_TEXT_ID, VOCABULARY

NUM_TOKENS = (21, 33)
"""Of the rows that are looked at, and of longer ones, whose last tile would hold one token alone."""


@dataclass(frozen=True)
class Batch:
    """Two rows, as a model takes them, and the same for plain autograd."""

    mine: dict[str, Any]
    plain: tuple[dict[str, Any], ...]

    @classmethod
    def apart(cls) -> Batch:
        """One document a row; the second row is padded."""
        ids, mask = some_ids(), torch.ones(2, NUM_TOKENS[1], dtype=torch.long)
        mask[1, NUM_TOKENS[0] :] = 0
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        return cls(batch, (batch,))

    @classmethod
    def together(cls) -> Batch:
        """Two documents in the second row; for plain autograd one by one."""
        ids, lengths = some_ids(), ((NUM_TOKENS[1],), (20, 13))
        positions = torch.cat([torch.arange(n) for row in lengths for n in row]).view(2, -1)
        labels = ids.clone()
        labels[1, 20] = -100
        documents = (ids[:1], ids[1:, :20], ids[1:, 20:])
        mine = {"input_ids": ids, "position_ids": positions, "labels": labels, "lengths": lengths}
        return cls(mine, tuple({"input_ids": d, "labels": d} for d in documents))

    @property
    def num_learnt(self) -> int:
        """Targets in all."""
        return sum(map(num_learnt, self.plain))


def num_learnt(batch: Mapping[str, Any]) -> int:
    """Targets of ``batch``."""
    return int((batch["labels"][:, 1:] >= 0).sum())


def some_ids() -> torch.Tensor:
    """Two rows of the longer ones' length; the same ones each time."""
    return torch.randint(FIRST_TEXT_ID, VOCABULARY, (2, NUM_TOKENS[1]), generator=torch.Generator().manual_seed(0))
