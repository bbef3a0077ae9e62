"""Dropout that does not care how the work is cut: the same token loses the same features under every plan.

A recomputed tile has to draw the numbers that it drew before, a row cut into tiles those of the whole row, and a
halved micro-batch those of the whole one. So numbers are not taken from a running stream but follow from where they
are used: (the row's seed, the spot in the model, the block of 256 tokens); for attention's weights the block of
queries and that of keys. No random state is saved, and a plan may change in the middle of a run. Exact; one small draw
for each block, about as many random numbers as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from narrowboat.errors import AnatomyError

BLOCK_TOKENS = 256
_MASK_64 = (1 << 64) - 1

Spot = tuple[int, ...]
"""Where in a model numbers are drawn: a dropout module's number, or a layer's and which of its draws it is."""


class Whereabouts:
    """Which tokens are on their way through the model right now; set before each layer, tile or chunk runs.

    Attributes:
        seeds: one number for each row of the micro-batch.
        rows: the rows that are on their way.
        start, stop: their tokens.
        is_off: nothing is dropped at all.
    """

    def __init__(self, is_off: bool = False) -> None:
        self.is_off = is_off
        self.seeds: Sequence[int] = ()
        self.rows = slice(None)
        self.start = self.stop = 0
        self._layer = self._num_draws = 0

    def move(self, start: int, stop: int, rows: slice = slice(None), layer: int = -1) -> None:
        """Say what comes next; ``layer`` is the decoder layer that it goes through, -1 for none."""
        self.start, self.stop, self.rows = start, stop, rows
        self._layer, self._num_draws = layer, 0

    def leave(self) -> None:
        """Nothing of ours is on its way: dropout is PyTorch's own again."""
        self.seeds = ()

    def draw(self, p: float, spot: Spot | None = None) -> Draw:
        """What is drawn next: at ``spot``, or in the present layer."""
        if spot is None:
            spot, self._num_draws = (-1, self._layer, self._num_draws), self._num_draws + 1
        return Draw(p, tuple(self.seeds[self.rows]), spot)


@dataclass(frozen=True)
class Draw:
    """Which numbers one use of dropout loses with probability ``p``; ``seeds`` are its rows'."""

    p: float
    seeds: tuple[int, ...]
    spot: Spot

    def features(self, start: int, stop: int, width: int, device: torch.device) -> torch.Tensor:
        """True where a feature is kept: ``[rows, stop - start, width]``."""
        blocks = range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS))
        rows = []
        for seed in self.seeds:
            drawn = [self._block((seed, *self.spot, block), (BLOCK_TOKENS, width), device) for block in blocks]
            rows.append(torch.cat(drawn)[start - blocks.start * BLOCK_TOKENS :][: stop - start])
        return torch.stack(rows)

    def uniform(self, row: int, start: int, stop: int, width: int, device: torch.device) -> torch.Tensor:
        """Numbers in [0, 1) for one row's tokens: ``[stop - start, width]``."""
        blocks = range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS))
        keys = [(self.seeds[row], *self.spot, block) for block in blocks]
        drawn = torch.cat([_uniform(key, (BLOCK_TOKENS, width), device) for key in keys])
        return drawn[start - blocks.start * BLOCK_TOKENS :][: stop - start]

    def weights(
        self, num_heads: int, queries: tuple[int, int], keys: tuple[int, int], device: torch.device
    ) -> torch.Tensor:
        """True where attention's weight is kept: ``[rows, heads, queries, keys]``."""
        shape = (num_heads, BLOCK_TOKENS, BLOCK_TOKENS)
        (top, bottom), (left, right) = ((n // BLOCK_TOKENS, -(-m // BLOCK_TOKENS)) for n, m in (queries, keys))
        rows = []
        for seed in self.seeds:
            drawn = [
                torch.cat([self._block((seed, *self.spot, q, k), shape, device) for k in range(left, right)], 2)
                for q in range(top, bottom)
            ]
            rows.append(
                torch.cat(drawn, 1)[:, queries[0] - top * BLOCK_TOKENS :, keys[0] - left * BLOCK_TOKENS :][
                    :, : queries[1] - queries[0], : keys[1] - keys[0]
                ]
            )
        return torch.stack(rows)

    def of_rows(self, rows: slice) -> Draw:
        """The same for some rows."""
        return Draw(self.p, self.seeds[rows], self.spot)

    def scaled(self, kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What a tensor is multiplied by."""
        return kept.to(dtype) / (1 - self.p)

    def _block(self, key: Sequence[int], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        return _uniform(key, shape, device) >= self.p


class PlacedDropout:
    """Stands in for the forward of the ``index``-th dropout module of a model."""

    def __init__(self, module: torch.nn.Dropout, index: int, whereabouts: Whereabouts) -> None:
        self._module, self._index, self._whereabouts = module, index, whereabouts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, some of it zero; see ``dropped``."""
        p = self._module.p
        here = self._whereabouts
        if not self._module.training or p == 0.0 or here.is_off:
            return x
        return dropped(x, here, here.draw(p, (self._index,))) if here.seeds else F.dropout(x, p)


def dropped(x: torch.Tensor, here: Whereabouts, draw: Draw) -> torch.Tensor:
    """``x`` with what ``draw`` loses set to zero, and the rest scaled up.

    Args:
        x: ``[rows, tokens, ...]``, the same with rows and tokens flattened, or attention's weights
            ``[rows, heads, tokens, keys]``, rows and heads flattened or not.
        here: which tokens these are.
        draw: what is drawn.

    Raises:
        AnatomyError: it is none of these, so that it is not known which token is which.
    """
    num_rows, num_tokens, shape = len(draw.seeds), here.stop - here.start, x.shape
    is_square = x.dim() >= 3 and shape[-2:] == (num_tokens, here.stop)
    if is_square and x.dim() == 4 and shape[0] == num_rows:
        kept = draw.weights(shape[1], (here.start, here.stop), (0, here.stop), x.device)
    elif shape[:2] == (num_rows, num_tokens):
        kept = draw.features(here.start, here.stop, x.numel() // (num_rows * num_tokens), x.device)
    elif is_square and x.dim() == 3 and shape[0] % num_rows == 0:  # even where there are as many heads as tokens
        kept = draw.weights(shape[0] // num_rows, (here.start, here.stop), (0, here.stop), x.device)
    elif shape[0] == num_rows * num_tokens:
        kept = draw.features(here.start, here.stop, x.numel() // (num_rows * num_tokens), x.device)
    else:
        raise AnatomyError(
            f"Dropout of {draw.p} is applied to a tensor of shape {tuple(shape)}, not to {num_rows} rows of "
            f"{num_tokens} tokens, so its numbers would depend on the plan; set the dropout to 0."
        )
    return x * draw.scaled(kept.view(shape), x.dtype)


class PlacedFunctions(TorchFunctionMode):
    """While it is entered, dropout by functions is placed like that of modules.

    PyTorch leaves it for as long as a backward runs, so that a layer which is run again has to enter it again.

    Args:
        whereabouts: which tokens are on their way; without seeds functions are PyTorch's own.

    Attributes:
        num_draws: how often something was to be dropped.
    """

    def __init__(self, whereabouts: Whereabouts) -> None:
        super().__init__()
        self._whereabouts = whereabouts
        self.num_draws = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        here, self.num_draws = self._whereabouts, self.num_draws + 1
        if here.is_off:
            return input
        return dropped(input, here, here.draw(p)) if here.seeds else F.dropout(input, p, True, inplace)

    def _attention(
        self,
        own: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **further: Any,
    ) -> torch.Tensor:
        here = self._whereabouts
        self.num_draws += dropout_p > 0
        if dropout_p == 0.0 or here.is_off or not here.seeds:
            p = 0.0 if here.is_off else dropout_p
            return own(query, key, value, attn_mask, p, is_causal, **further)
        weights = _weights(query, key, attn_mask, is_causal, further.get("scale"))
        out: torch.Tensor = dropped(weights, here, here.draw(dropout_p)) @ _for_each_head(value, query)
        return out


def _weights(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Attention's weights ``[rows, heads, queries, keys]``, written out."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ _for_each_head(key, query).transpose(-1, -2) * scale
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def _for_each_head(t: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(query.shape[1] // t.shape[1], 1)


def _uniform(key: Sequence[int], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(_mix(*key))
    return torch.rand(shape, generator=generator, device=device)


def _mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers: splitmix64 (Steele, Lea, Flood 2014) over each in turn."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state >> 1
