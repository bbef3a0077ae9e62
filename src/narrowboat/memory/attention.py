"""Attention for tiles and for whole rows, under one name in transformers' attention interface.

A tile's queries see the keys of earlier tiles, which lie in a buffer, and their own. Nothing is concatenated, grouped
heads are not expanded, and a dense mask exists only where a sliding window needs one. Backwards, the gradients of
earlier keys and values are added in place to a second buffer, which the earlier tiles pick up when their turn comes
(tiles go from last to first). Without a buffer the same code is the attention of a whole row. Exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface

from narrowboat.errors import AnatomyError
from narrowboat.memory.kernels import Kernel, Scores, kernel_for
from narrowboat.memory.layout import Layout, Piece
from narrowboat.memory.meter import KEYS_VALUES, cause

ATTENTION_NAME = "narrowboat"


class KeysValues:
    """One layer's keys and values over whole rows, and their gradients.

    ``keys`` and ``values`` are ``[batch, kv heads, tokens, head size]``, of which the first ``num_filled`` tokens are
    there. Gradients of half-precision keys are gathered in fp32: hundreds of tiles add to them, and rounding each sum
    would lose what a single kernel keeps.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_filled = 0
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self._grads: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Take a tile's keys and values, unless they are there already."""
        stop = start + keys.shape[2]
        if stop <= self.num_filled:
            return
        with torch.no_grad(), cause(KEYS_VALUES):
            if self.keys is None or self.values is None:
                self.keys = keys.new_empty(*keys.shape[:2], self.num_tokens, keys.shape[3])
                self.values = values.new_empty(*values.shape[:2], self.num_tokens, values.shape[3])
            self.keys[:, :, start:stop], self.values[:, :, start:stop] = keys, values
        self.num_filled = stop

    @property
    def grads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of keys and values gathered so far; zero at first."""
        if self._grads is None:
            assert self.keys is not None and self.values is not None
            with cause(KEYS_VALUES):
                self._grads = _zeros_wide(self.keys), _zeros_wide(self.values)
        return self._grads


class HandedOver(Exception):
    """Raised by a tile once a layer has handed over its keys and values and nothing more is wanted of it."""


class Tile:
    """Tokens ``start`` to ``stop`` of a micro-batch on their way through a layer.

    A layer gets it twice: as its cache, where it leaves its keys and values, and as its attention mask, by which
    ``attend`` learns what the queries may see.
    """

    is_compileable = False

    def __init__(
        self, layout: Layout, start: int, stop: int, keys_values: KeysValues | None, stop_at_keys: bool = False
    ) -> None:
        self.layout, self.start, self.stop = layout, start, stop
        self.keys_values = keys_values
        self._stop_at_keys = stop_at_keys
        self._handed_over: torch.Tensor | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Transformers' cache interface: take the tile's keys and values, give back what attention shall see."""
        if self.keys_values is not None:
            self.keys_values.write(keys, values, self.start)
        if self._stop_at_keys:
            raise HandedOver
        self._handed_over = keys
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Transformers' cache interface: how many tokens came before."""
        return self.start

    def check(self, keys: torch.Tensor) -> None:
        """Refuse a layer whose attention sees other keys than it left in the cache."""
        if self.keys_values is not None and self._handed_over is not keys:
            raise AnatomyError("A layer's attention uses other keys than it hands to its cache; it cannot be tiled.")


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [batch, heads, tile, size]
    key: torch.Tensor,  # [batch, kv heads, tile, size]
    value: torch.Tensor,
    attention_mask: Tile,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: ``[batch, tile, heads, size]``.

    Raises:
        AnatomyError: for dropout on attention weights, which no two ways of cutting the work would draw alike.
    """
    if not isinstance(attention_mask, Tile):
        raise AnatomyError(f"{type(module).__name__} was called outside of narrowboat.install; leave its `with` first.")
    if dropout:
        raise AnatomyError(
            f"{type(module).__name__} drops attention weights with probability {dropout}; set the model's "
            "attention_dropout to 0."
        )
    attention_mask.check(key)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(float(scale), softcap, sliding_window)
    out = _AttendTile.apply(query, key, value, s_aux, attention_mask, scores)
    return out.transpose(1, 2), None


def register() -> None:
    """Make ``attend`` known to transformers under ``ATTENTION_NAME``; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attend)


class _AttendTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, tile, scores):  # type: ignore[no-untyped-def]
        kernel = kernel_for(q, v, scores)
        base, keys, values = _sources(tile, k, v)
        pieces = list(tile.layout.pieces(tile.start, tile.stop, scores.window))
        out = lse = None
        for piece in pieces:
            rows, queries = piece.rows, slice(piece.start - tile.start, piece.stop - tile.start)
            merged, merged_lse = _attend_piece(kernel, q[rows, :, queries], keys, values, base, piece, scores)
            if sinks is not None:
                merged, merged_lse = _add_sinks(merged, merged_lse, sinks)
            if len(pieces) == 1 and merged.shape[0] == q.shape[0] and merged.shape[2] == q.shape[2]:
                out, lse = merged, merged_lse
                break
            if out is None or lse is None:
                out = merged.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
                lse = merged_lse.new_zeros(q.shape[:3])
            out[rows, :, queries], lse[rows, :, queries] = merged, merged_lse
        if out is None:  # nothing but padding
            out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
            lse = q.new_zeros(q.shape[:3], dtype=torch.float32)
        own = (k, v) if tile.keys_values is None else (None, None)  # else they are read from the buffer
        ctx.save_for_backward(q, *own, sinks, out, lse)
        ctx.dtypes = k.dtype, v.dtype
        ctx.tile, ctx.scores, ctx.kernel, ctx.pieces = tile, scores, kernel, pieces
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, sinks, out, lse = ctx.saved_tensors
        tile, scores, kernel, pieces = ctx.tile, ctx.scores, ctx.kernel, ctx.pieces
        base, keys, values = _sources(tile, k, v)
        if tile.keys_values is None and len(pieces) == 1 and _is_everything(pieces[0], tile, q):
            grads = kernel.backward(grad, q, k, v, out, lse, pieces[0].keys[0].sight, scores)
            return *grads, _sinks_gradient(grad, out, lse, sinks, tile, pieces), None, None
        into = _gradients(tile, keys, values)
        dq = None
        for piece in pieces:
            rows, queries = piece.rows, slice(piece.start - tile.start, piece.stop - tile.start)
            here = [t[rows, :, queries] for t in (grad, q, out, lse)]
            piece_dq = _piece_backward(kernel, here, keys, values, base, piece, scores, into)
            if len(pieces) == 1 and piece_dq.shape == q.shape:
                dq = piece_dq
                break
            dq = torch.zeros_like(q) if dq is None else dq
            dq[rows, :, queries] = piece_dq
        dk, dv = (t[:, :, tile.start - base : tile.stop - base] for t in into)
        dsinks = _sinks_gradient(grad, out, lse, sinks, tile, pieces)
        return torch.zeros_like(q) if dq is None else dq, dk.to(ctx.dtypes[0]), dv.to(ctx.dtypes[1]), dsinks, None, None


def _is_everything(piece: Piece, tile: Tile, q: torch.Tensor) -> bool:
    """Whether one kernel call does the whole tile: no gradients have to be gathered then."""
    num_rows = len(range(*piece.rows.indices(q.shape[0])))
    return (piece.start, piece.stop, num_rows, len(piece.keys)) == (tile.start, tile.stop, q.shape[0], 1)


def _sources(tile: Tile, k: torch.Tensor, v: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Where keys lie: the position of the first one, keys, values."""
    if tile.keys_values is None:
        return tile.start, k, v
    assert tile.keys_values.keys is not None and tile.keys_values.values is not None
    return 0, tile.keys_values.keys, tile.keys_values.values


def _gradients(tile: Tile, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the gradients of keys and values are gathered."""
    return (_zeros_wide(keys), _zeros_wide(values)) if tile.keys_values is None else tile.keys_values.grads


def _zeros_wide(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))


def _attend_piece(
    kernel: Kernel, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, base: int, piece: Piece, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece's output and log-sum-exp over all the stretches it sees."""
    merged = lse = None
    for stretch in piece.keys:
        where = slice(stretch.start - base, stretch.stop - base)
        out, out_lse = kernel.forward(
            q, keys[piece.rows, :, where], values[piece.rows, :, where], stretch.sight, scores
        )
        if merged is None or lse is None:
            merged, lse = out, out_lse
            continue
        total = torch.logaddexp(lse, out_lse)
        first, second = torch.exp(lse - total)[..., None], torch.exp(out_lse - total)[..., None]
        merged, lse = (merged * first + out * second).to(out.dtype), total
    assert merged is not None and lse is not None
    return merged, lse


def _piece_backward(
    kernel: Kernel,
    here: Sequence[torch.Tensor],  # the piece's output gradient, queries, output and log-sum-exp
    keys: torch.Tensor,
    values: torch.Tensor,
    base: int,
    piece: Piece,
    scores: Scores,
    into: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The piece's query gradient; gradients of the keys and values it sees are added to ``into``."""
    dq, (grad, q, out, lse) = None, here
    for stretch in piece.keys:
        where = slice(stretch.start - base, stretch.stop - base)
        k, v = keys[piece.rows, :, where], values[piece.rows, :, where]
        part, dk, dv = kernel.backward(grad, q, k, v, out, lse, stretch.sight, scores)
        into[0][piece.rows, :, where] += dk
        into[1][piece.rows, :, where] += dv
        dq = part if dq is None else dq + part
    assert dq is not None
    return dq


def _add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sink is a key of its head with score ``sinks[head]`` and no value: it only takes weight away."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return (out * torch.exp(lse - total)[..., None]).to(out.dtype), total


def _sinks_gradient(
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    tile: Tile,
    pieces: list[Piece],
) -> torch.Tensor | None:
    """``[heads]``: minus each query's weight on the sink times its output's share of the gradient."""
    if sinks is None:
        return None
    total = torch.zeros_like(sinks, dtype=lse.dtype)
    for piece in pieces:
        rows, queries = piece.rows, slice(piece.start - tile.start, piece.stop - tile.start)
        weight = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse[rows, :, queries])
        share = (grad[rows, :, queries].to(lse.dtype) * out[rows, :, queries].to(lse.dtype)).sum(-1)
        total -= (weight * share).sum((0, 2))
    return total.to(sinks.dtype)
