"""Who stays: the interface of all policies, and those that go by place alone.

A policy looks at one layer at a time: at the tokens carried so far and those of the segment that has just been. It
says which of them, at most as many as the budget allows, the next segment shall see. Those that go by attention
(``scored.py``) are shown what the segment's queries gave to each token, for which scores are computed once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

ALL_QUERIES = -1


@dataclass(frozen=True, eq=False)
class Candidates:
    """The tokens that one layer could hand on: the carried ones first, then the segment's own.

    Attributes:
        positions: ``[kv heads, tokens]``, their places in the document.
        segments: ``[kv heads, tokens]``, numbers of the segments that they came with, counted from 0.
        marks: ``[kv heads, tokens]`` fp32, what the policy noted of them before; 0 for new ones.
        mass: ``[kv heads, tokens]`` fp32, attention that they got from the segment's observed queries, summed over
            these and averaged over the heads of a group; empty where the policy observes none.
        num_queries: how many queries were observed.
        num_new: how many tokens are the segment's own.
    """

    positions: torch.Tensor
    segments: torch.Tensor
    marks: torch.Tensor
    mass: torch.Tensor
    num_queries: int
    num_new: int

    @property
    def num_tokens(self) -> int:
        """How many there are."""
        return self.positions.shape[1]


@dataclass(frozen=True, eq=False)
class Choice:
    """Tokens that stay, by their place among the candidates, rising, and the marks of all candidates.

    ``index`` is ``[tokens]`` where all heads keep the same, or ``[kv heads, tokens]``.
    """

    index: torch.Tensor
    marks: torch.Tensor


class Policy(Protocol):
    """Chooses at most ``num_tokens``."""

    @property
    def num_observed(self) -> int:
        """Of how many of a segment's last queries it wants to know."""

    def choose(self, candidates: Candidates, num_tokens: int) -> Choice:
        """Called also where all candidates fit, so that it can note what it saw."""


class Window:
    """The most recent tokens."""

    num_observed = 0

    def choose(self, candidates: Candidates, num_tokens: int) -> Choice:
        """See ``Policy``."""
        return Choice(_last(candidates, num_tokens), candidates.marks)


@dataclass(frozen=True)
class Sinks:
    """The first tokens, on which models rest idle attention, and the most recent (StreamingLLM, arXiv:2309.17453).

    ``head_share`` of the budget goes to the first tokens.
    """

    head_share: float = 0.1
    num_observed: int = 0

    def choose(self, candidates: Candidates, num_tokens: int) -> Choice:
        """See ``Policy``."""
        if candidates.num_tokens <= num_tokens:
            return Choice(_last(candidates, num_tokens), candidates.marks)
        num_first = min(num_tokens, max(1, round(self.head_share * num_tokens)))
        first = torch.arange(num_first, device=candidates.positions.device)
        return Choice(torch.cat((first, _last(candidates, num_tokens - num_first))), candidates.marks)


def _last(candidates: Candidates, num_tokens: int) -> torch.Tensor:
    total = candidates.num_tokens
    return torch.arange(max(0, total - num_tokens), total, device=candidates.positions.device)
