"""Who does which part of a step batch, and how gradients meet. One process, which does it all, is the simplest case.

Every rank knows the whole step batch, so its supervised tokens are counted without a message, and each rank's loss is
divided by the count of all: gradients are summed, never averaged. 4.0 on one rank's only token and 1.0 on each of the
other's three give 1.75.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch

Group = TypeVar("Group")


class Ranks(Protocol):
    """The processes of one run, seen from one of them."""

    def deal(self, groups: Sequence[Group]) -> list[tuple[Group, bool]]:
        """This rank's share of ``groups``, and whether each counts; every rank has the same number."""
        ...

    def gather(self, gradients: Sequence[torch.Tensor]) -> None:
        """Put the sum over all ranks into each of ``gradients``."""
        ...

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a scalar over all ranks."""
        ...


class OneProcess:
    """A run of one process."""

    def deal(self, groups: Sequence[Group]) -> list[tuple[Group, bool]]:
        """All of them."""
        return dealt(groups, 1, 0)

    def gather(self, gradients: Sequence[torch.Tensor]) -> None:
        """They are whole."""

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """It is the sum."""
        return value


def dealt(groups: Sequence[Group], num_ranks: int, rank: int) -> list[tuple[Group, bool]]:
    """Deal ``groups`` out in turn. Where they do not go round, up to ``num_ranks - 1`` ranks get the last one again,
    which does not count: ranks that wait for one another need the same number of forwards.
    """
    all_of_them = [(group, True) for group in groups]
    all_of_them += [(group, False) for group in groups[-1:]] * (-len(groups) % num_ranks)
    return all_of_them[rank::num_ranks]
