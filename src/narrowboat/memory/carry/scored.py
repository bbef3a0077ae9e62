"""Policies that go by attention: what the segment's queries look at stays.

Price: the scores of the observed queries once more, at most a third of attention's forward, and one number a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from narrowboat.memory.carry.policy import ALL_QUERIES, Candidates, Choice


@dataclass(frozen=True)
class Lru:
    """Blocks of tokens, of which the least recently used go first; all heads alike.

    A block of tokens of the document is used when it receives more than ``threshold`` of the attention of a
    segment's queries, averaged over these and over heads. New tokens count as used. Blocks stay or go whole. Mark:
    the number of the segment that used the token's block last.
    """

    block_tokens: int = 64
    threshold: float = 0.01
    num_observed: int = ALL_QUERIES

    def choose(self, candidates: Candidates, num_tokens: int) -> Choice:
        """See ``Policy``."""
        positions, segments = candidates.positions[0], candidates.segments[0]
        now = segments[-1]
        block, of = (positions // self.block_tokens).unique(return_inverse=True)
        share = torch.zeros(len(block), device=of.device).index_add_(0, of, candidates.mass.mean(0))
        used = share / candidates.num_queries > self.threshold
        is_new = torch.zeros(len(block), dtype=torch.bool, device=of.device).index_fill_(
            0, of[candidates.num_tokens - candidates.num_new :], True
        )
        last = torch.zeros(len(block), device=of.device).scatter_reduce_(0, of, candidates.marks[0], "amax")
        last = torch.where(used | is_new, now.float(), last)
        sizes = torch.bincount(of, minlength=len(block))
        order = torch.arange(len(block), device=of.device).flip(0)  # of equally used ones the newest first
        order = order[last[order].sort(descending=True, stable=True).indices]
        stays = torch.zeros(len(block), dtype=torch.bool, device=of.device)
        stays[order] = sizes[order].cumsum(0) <= num_tokens
        marks = last[of].expand_as(candidates.marks)
        if candidates.num_tokens > num_tokens and not stays.any():  # one block holds more than the budget
            return Choice(torch.arange(candidates.num_tokens, device=of.device)[-num_tokens:], marks)
        return Choice(stays[of].nonzero()[:, 0], marks)


@dataclass(frozen=True)
class Heavy:
    """Half of the budget for the most recent tokens, half for those that got most attention so far, for each group of
    heads on its own (H2O, arXiv:2306.14048). Mark: the attention gathered.
    """

    recent_share: float = 0.5
    num_observed: int = ALL_QUERIES

    def choose(self, candidates: Candidates, num_tokens: int) -> Choice:
        """See ``Policy``."""
        marks = candidates.marks + candidates.mass
        return Choice(_best_and_recent(candidates, marks, num_tokens, round(self.recent_share * num_tokens)), marks)


@dataclass(frozen=True)
class Snap:
    """The tokens that the segment's last queries look at, with their neighbours, and these last tokens themselves, for
    each group of heads on its own (SnapKV, arXiv:2404.14469).
    """

    num_observed: int = 32
    pool_tokens: int = 7

    def choose(self, candidates: Candidates, num_tokens: int) -> Choice:
        """See ``Policy``."""
        order = candidates.positions.argsort(1)
        scores = F.max_pool1d(candidates.mass.gather(1, order)[None], self.pool_tokens, 1, self.pool_tokens // 2)[0]
        scores = torch.empty_like(scores).scatter_(1, order, scores)
        num_recent = min(self.num_observed, num_tokens, candidates.num_new)
        return Choice(_best_and_recent(candidates, scores, num_tokens, num_recent), candidates.marks)


@dataclass(frozen=True)
class Turns:
    """Whole segments, which of a dialogue are its exchanges: the last two, the first, and the best scored that fit.

    A segment's score is the attention that its tokens get, on average, from the queries of the newest; all heads alike.
    """

    num_observed: int = ALL_QUERIES

    def choose(self, candidates: Candidates, num_tokens: int) -> Choice:
        """See ``Policy``."""
        segments, of = candidates.segments[0].unique(return_inverse=True)
        sizes = torch.bincount(of, minlength=len(segments))
        scores = torch.zeros(len(segments), device=of.device).index_add_(0, of, candidates.mass.mean(0)) / sizes
        best = scores.sort(descending=True, stable=True).indices.tolist()
        newest = len(segments) - 1
        order = list(dict.fromkeys([newest, *([newest - 1] if newest else []), 0, *best]))
        stays, left = torch.zeros(len(segments), dtype=torch.bool, device=of.device), num_tokens
        for number, size in zip(order, sizes[order].tolist(), strict=True):
            if size <= left:
                stays[number], left = True, left - size
        if not stays[newest]:  # the newest alone is more than the budget
            return Choice(torch.arange(candidates.num_tokens, device=of.device)[-num_tokens:], candidates.marks)
        return Choice(stays[of].nonzero()[:, 0], candidates.marks)


def _best_and_recent(candidates: Candidates, scores: torch.Tensor, num_tokens: int, num_recent: int) -> torch.Tensor:
    """``[kv heads, num_tokens]``: of each head the ``num_recent`` newest tokens and the best of the others."""
    if candidates.num_tokens <= num_tokens:
        return torch.arange(candidates.num_tokens, device=scores.device)
    newest = candidates.positions.argsort(1, descending=True)[:, :num_recent]
    scores = scores.scatter(1, newest, torch.inf)
    return scores.topk(num_tokens, 1).indices.sort(1).values
