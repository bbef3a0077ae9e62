"""NEFTune: noise on token embeddings while training, so that answers are learnt less word for word.

Uniform in [-a, a] with a = alpha / sqrt(tokens of the document x hidden size) (Jain et al. 2023, arXiv:2310.05914).
Like dropout it follows from where a token stands, so every plan, micro-batch and rank adds the same. Added in place, a
block of 256 tokens at a time: no bytes to speak of, one small draw a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from narrowboat.memory.dropout import BLOCK_TOKENS, Draw
from narrowboat.memory.layout import Layout
from narrowboat.owner.values import has_values

SPOT = (-2,)


@torch.no_grad()
def add_noise(x: torch.Tensor, alpha: float, layout: Layout, seeds: Sequence[int], offset: int = 0) -> None:
    """Add it to the embeddings ``x``, ``[rows, tokens, hidden]``.

    Args:
        x: changed in place; a gradient goes through as it is.
        alpha: strength of the noise.
        layout: the rows' documents.
        seeds: a number for each row, from which its noise follows.
        offset: place of the first token in its document.
    """
    if not has_values(x):
        return
    draw, width = Draw(0.0, tuple(seeds), SPOT), x.shape[-1]
    for row, documents in enumerate(layout.rows):
        for start, stop in documents:
            most = alpha / math.sqrt((stop - start) * width)
            for first in range(start, stop, BLOCK_TOKENS):
                last = min(first + BLOCK_TOKENS, stop)
                drawn = draw.uniform(row, offset + first, offset + last, width, x.device)
                x[row, first:last] += (drawn.mul_(2).sub_(1).mul_(most)).to(x.dtype)
