"""Dropout that does not care how the work is cut: the same token loses the same features under every plan.

A recomputed tile has to draw the numbers that it drew before, a row cut into tiles those of the whole row, and a
halved micro-batch those of the whole one. So numbers are not taken from a running stream but follow from where they
are used: (the row's seed, the module, the block of 256 tokens). No random state is saved, and a plan may change in
the middle of a run. Exact; one small draw for each 256 tokens of a module, the same number of random numbers as usual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from narrowboat.errors import AnatomyError

BLOCK_TOKENS = 256
_MASK_64 = (1 << 64) - 1


class Whereabouts:
    """Which tokens are on their way through the model right now; set before each layer, tile or chunk runs.

    Attributes:
        seeds: one number for each row of the micro-batch.
        rows: the rows that are on their way.
        start, stop: their tokens.
    """

    def __init__(self) -> None:
        self.seeds: Sequence[int] = ()
        self.rows = slice(None)
        self.start = self.stop = 0

    def move(self, start: int, stop: int, rows: slice = slice(None)) -> None:
        """Say what comes next."""
        self.start, self.stop, self.rows = start, stop, rows

    def leave(self) -> None:
        """Nothing of ours is on its way: dropout is PyTorch's own again."""
        self.seeds = ()


class PlacedDropout:
    """Stands in for the forward of the ``index``-th dropout module of a model."""

    def __init__(self, module: torch.nn.Dropout, index: int, whereabouts: Whereabouts) -> None:
        self._module, self._index, self._whereabouts = module, index, whereabouts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, tokens, ...]``, or the same with rows and tokens flattened.

        Raises:
            AnatomyError: when the input is neither, so that it is not known which token is which.
        """
        p = self._module.p
        if not self._module.training or p == 0.0:
            return x
        here = self._whereabouts
        if not here.seeds:
            return torch.nn.functional.dropout(x, p)
        seeds, num_tokens = here.seeds[here.rows], here.stop - here.start
        width = x.shape[-1]
        if x.numel() != len(seeds) * num_tokens * width:
            raise AnatomyError(
                f"Dropout of {p} is applied to a tensor of shape {tuple(x.shape)}, not to {len(seeds)} rows of "
                f"{num_tokens} tokens, so its numbers would depend on the plan; set the dropout to 0."
            )
        kept = torch.stack([self._kept(seed, here.start, here.stop, width, x.device) for seed in seeds])
        return x * (kept.view(x.shape).to(x.dtype) / (1 - p))

    def _kept(self, seed: int, start: int, stop: int, width: int, device: torch.device) -> torch.Tensor:
        """``[stop - start, width]`` bool."""
        generator = torch.Generator(device)
        blocks = []
        for block in range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)):
            generator.manual_seed(_mix(seed, self._index, block))
            drawn = torch.rand(BLOCK_TOKENS, width, generator=generator, device=device) >= self._module.p
            first = block * BLOCK_TOKENS
            blocks.append(drawn[max(start - first, 0) : stop - first])
        return torch.cat(blocks)


def _mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers: splitmix64 (Steele, Lea, Flood 2014) over each in turn."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state >> 1
