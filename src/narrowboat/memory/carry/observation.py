"""How much attention each key gets: scores computed once more, some queries at a time, from attention's log-sum-exps.

Flash kernels keep no scores, so a policy that goes by attention has to have them made again: ``BLOCK_BYTES`` at most,
and the time of attention's first product for the queries that are observed.
"""

from __future__ import annotations

import torch

from narrowboat.memory.kernels import BLOCK_BYTES
from narrowboat.memory.layout import Span
from narrowboat.memory.scores import Scores


class Observation:
    """Sums the attention of a segment's last queries, tile by tile.

    Args:
        num_keys: tokens that may be seen, carried and own.
        first_query: the first token whose query counts, among these.
    """

    def __init__(self, num_keys: int, first_query: int) -> None:
        self.num_keys, self.first_query = num_keys, first_query
        self.mass: torch.Tensor | None = None  # [kv heads, num_keys] fp32, averaged over the heads of a group

    @torch.no_grad()
    def add(self, q: torch.Tensor, lse: torch.Tensor, keys: torch.Tensor, tile: Span, scores: Scores) -> None:
        """What the queries of one ``tile`` give: ``q [1, heads, tile, size]``, ``lse [1, heads, tile]``."""
        first, last = tile
        if self.mass is None:
            self.mass = torch.zeros(keys.shape[1], self.num_keys, device=keys.device)
        begin = max(first, self.first_query)
        step = max(16, BLOCK_BYTES // (4 * q.shape[1] * last))
        place = torch.arange(last, device=q.device)
        for start in range(begin, last, step):
            stop = min(start + step, last)
            some = slice(start - first, stop - first)
            grouped = q[0, :, some].unflatten(0, (keys.shape[1], -1)).float()  # [kv heads, group, queries, size]
            s = grouped @ keys[0, :, None, :last].float().transpose(-1, -2) * scores.scale
            if scores.softcap is not None:
                s = torch.tanh(s / scores.softcap) * scores.softcap
            seen = place[None] <= place[start:stop, None]
            if scores.window is not None:
                seen &= place[None] > place[start:stop, None] - scores.window
            p = torch.exp(s - lse[0, :, some].float().unflatten(0, (keys.shape[1], -1))[..., None])
            self.mass[:, :last] += p.masked_fill_(~seen, 0).sum(2).mean(1)
