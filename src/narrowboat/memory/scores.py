"""How attention's scores are made, which are seen, and which of its weights are dropped: what all kernels share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from narrowboat.memory.dropout import Draw
from narrowboat.memory.layout import Sight

# q [batch, heads, queries, size]; k, v [batch, kv heads, keys, size]; out like q; lse [batch, heads, queries] fp32
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Scores:
    """How scores are made of queries and keys, and which of attention's weights are dropped.

    Attributes:
        scale: by which products are multiplied.
        softcap: scores are ``softcap * tanh(scores / softcap)``, or None.
        window: keys that a query looks back at, its own included; None is all.
        drops: what is dropped, of the rows that the scores are of.
        place: of the first query and of the first key in the row.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    drops: Draw | None = None
    place: tuple[int, int] = (0, 0)

    def at(self, rows: slice, query: int, key: int) -> Scores:
        """For some rows, the first query and the first key of which stand at these places."""
        if self.drops is None:
            return self
        return replace(self, drops=self.drops.of_rows(rows), place=(query, key))

    def kept(self, num_heads: int, num_queries: int, start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
        """By what the weights of keys ``start`` to ``stop`` are multiplied: ``[rows, heads, queries, keys]``."""
        assert self.drops is not None
        query, key = self.place
        drawn = self.drops.weights(num_heads, (query, query + num_queries), (key + start, key + stop), like.device)
        return self.drops.scaled(drawn, like.dtype)


def visible(num_queries: int, num_keys: int, sight: Sight, window: int | None, device: torch.device) -> torch.Tensor:
    """``[queries, keys]`` bool: who sees whom when the last query sits on the last key."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None]
    seen = key <= query
    return seen & (key > query - window) if sight is Sight.WINDOW and window is not None else seen
