"""Masks for layers with an attention of their own, which want each query's keys written out.

A tile's mask is ``[rows, 1, tile, keys]``, made for each tile and let go of: tile x keys bytes, or four times as many
where it is added to the scores. Exact.
"""

from __future__ import annotations

import torch

from narrowboat.memory.contract import Masks
from narrowboat.memory.tile import Tile


def mask_for(tile: Tile, form: Masks, like: torch.Tensor, window: int | None) -> torch.Tensor:
    """Who sees whom, ``[rows or 1, 1, tile, keys up to its end]``.

    Args:
        tile: the queries.
        form: bool, true where a query sees a key; or additive, 0 there and the lowest number elsewhere.
        like: a tensor of the scores' format, on their device.
        window: tokens that a query looks back at, itself included; None is all.
    """
    seen = _seen(tile, window).to(like.device)
    if form == "bool":
        return seen
    dtype = like.dtype
    return torch.zeros(seen.shape, dtype=dtype, device=like.device).masked_fill_(~seen, torch.finfo(dtype).min)


def _seen(tile: Tile, window: int | None) -> torch.Tensor:
    rows = tile.layout.rows
    rows = rows[:1] if all(row == rows[0] for row in rows) else rows
    documents = torch.full((len(rows), tile.layout.num_tokens), -1)
    for row, spans in enumerate(rows):
        for number, (start, stop) in enumerate(spans):
            documents[row, start:stop] = number
    queries, keys = torch.arange(tile.start, tile.stop)[:, None], torch.arange(tile.stop)[None]
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    together = documents[:, tile.start : tile.stop, None] == documents[:, None, : tile.stop]
    return (seen & together)[:, None]  # what is padded sees padding, itself at least
