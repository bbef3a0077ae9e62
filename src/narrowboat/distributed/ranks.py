"""The processes of one run, seen from one of them: who does which part of a step batch, and what they tell each other.

One process, which does it all, is the simplest case. Every rank knows the whole step batch, so its supervised tokens
are counted without a message, and each rank's loss is divided by the count of all: gradients are summed, never
averaged. 4.0 on one rank's only token and 1.0 on each of the other's three give 1.75.

Whatever could make ranks differ (memory that runs out, a signal, a reading) is said when they meet, and decided by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

Group = TypeVar("Group")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Said:
    """What ranks say when they meet; all of them hear the highest of each.

    Attributes:
        peak_bytes: the most that is held.
        stop: the number of a signal that asks to stop.
        saves: whether a checkpoint was asked for.
        is_full: whether there is no room to try the same once more.
    """

    peak_bytes: int = 0
    stop: int = 0
    saves: bool = False
    is_full: bool = False


NOTHING = Said()


class Ranks(Protocol):
    """The processes of one run.

    Attributes:
        num: how many there are.
        rank: which of them this is, from 0; 0 writes to the run's folder.
    """

    num: int
    rank: int

    def deal(self, groups: Sequence[Group]) -> list[tuple[Group, bool]]:
        """This rank's share of ``groups``, and whether each counts; every rank has the same number."""
        ...

    def gather(self, gradients: Sequence[torch.Tensor]) -> None:
        """Put the sum over all ranks into each of ``gradients``."""
        ...

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a scalar over all ranks."""
        ...

    def meet(self, said: Said = NOTHING) -> Said:
        """Wait for the others, and hear what they say.

        Raises:
            RankError: one of them failed or is gone.
        """
        ...

    def fail(self, kind: str, words: str) -> None:
        """Say that this rank failed, to the others who wait in ``meet``.

        Args:
            kind: the memory that ran out, ``given up``, or empty.
            words: what happened.
        """
        ...

    def same(self, value: Value) -> Value:
        """Rank 0's ``value``."""
        ...


class OneProcess:
    """A run of one process."""

    num, rank = 1, 0

    def deal(self, groups: Sequence[Group]) -> list[tuple[Group, bool]]:
        """All of them."""
        return dealt(groups, 1, 0)

    def gather(self, gradients: Sequence[torch.Tensor]) -> None:
        """They are whole."""

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """It is the sum."""
        return value

    def meet(self, said: Said = NOTHING) -> Said:
        """Nobody says anything else."""
        return said

    def fail(self, kind: str, words: str) -> None:
        """Nobody waits."""

    def same(self, value: Value) -> Value:
        """It is."""
        return value


def dealt(groups: Sequence[Group], num_ranks: int, rank: int) -> list[tuple[Group, bool]]:
    """Deal ``groups`` out in turn. Where they do not go round, up to ``num_ranks - 1`` ranks get the last one again,
    which does not count: ranks that wait for one another need the same number of forwards.
    """
    all_of_them = [(group, True) for group in groups]
    all_of_them += [(group, False) for group in groups[-1:]] * (-len(groups) % num_ranks)
    return all_of_them[rank::num_ranks]
