"""Attention for tiles and for whole rows, under one name in transformers' attention interface.

A tile's queries see the keys of earlier tiles, which lie in a buffer, and their own. Nothing is concatenated, grouped
heads are not expanded, and a dense mask exists only where a sliding window needs one. Backwards, the gradients of
earlier keys and values are added in place to a second buffer, which the earlier tiles pick up when their turn comes
(tiles go from last to first). Without a buffer the same code is the attention of a whole row. Exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import AttentionInterface

from narrowboat.errors import AnatomyError
from narrowboat.memory.kernels import Kernel, Scores, kernel_for
from narrowboat.memory.layout import Piece, Sight, Stretch
from narrowboat.memory.tile import Tile, zeros_wide
from narrowboat.owner.values import has_values, some_of

ATTENTION_NAME = "narrowboat"

KEYS_AT_ONCE = 16_384
"""Keys that one backward call sees. A card's kernel makes the gradients of grouped keys and values for every head and
sums them over the group at its end: for Llama-3.1-8B 16 KiB a key, which would be the largest part of a long row.
"""


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
    scheme = attention_mask.scheme
    if scheme is None:
        scores = Scores(float(scale), softcap, sliding_window)
        out = _AttendTile.apply(query, key, value, s_aux, attention_mask, scores)
        return out.transpose(1, 2), None
    windows = [window for window in (sliding_window, None if scheme.is_shifted else scheme.window) if window]
    scores = Scores(float(scale), softcap, min(windows, default=None))
    group = query.shape[1] // key.shape[1]
    parts = []
    for heads, layout in scheme.parts(attention_mask.layout, key.shape[1]):
        queries = slice(heads.start * group, heads.stop * group)
        sinks = None if s_aux is None else s_aux[queries]
        tile = attention_mask.of_heads(heads, layout)
        parts.append(_AttendTile.apply(query[:, queries], key[:, heads], value[:, heads], sinks, tile, scores))
    return torch.cat(parts, 1).transpose(1, 2), None


def register() -> None:
    """Make ``attend`` known to transformers under ``ATTENTION_NAME``; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attend)


class _AttendTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, tile, scores):  # type: ignore[no-untyped-def]
        kernel = kernel_for(q, v, scores)
        pieces = list(tile.layout.pieces(tile.start, tile.stop, scores.window))
        if tile.outputs is not None and tile.again:
            out, lse = tile.outputs.read(tile.start, tile.stop)
        else:
            out, lse = _attend_tile(kernel, q, k, v, sinks, tile, pieces, scores)
            if tile.outputs is not None:
                tile.outputs.write(tile.start, out, lse)
        if tile.keys_values is not None and tile.keys_values.link is not None:
            _, keys, _ = _sources(tile, k, v)
            tile.keys_values.link.saw(q, lse, keys, tile, scores)
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
        if tile.keys_values is not None:
            tile.keys_values.tile_done(tile.start)
        return torch.zeros_like(q) if dq is None else dq, dk.to(ctx.dtypes[0]), dv.to(ctx.dtypes[1]), dsinks, None, None


def _attend_tile(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    tile: Tile,
    pieces: Sequence[Piece],
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of a tile's queries; zeros where there is padding."""
    base, keys, values = _sources(tile, k, v)
    out = lse = None
    for piece in pieces:
        rows, queries = piece.rows, slice(piece.start - tile.start, piece.stop - tile.start)
        merged, merged_lse = _attend_piece(kernel, q[rows, :, queries], keys, values, base, piece, scores)
        if sinks is not None:
            merged, merged_lse = _add_sinks(merged, merged_lse, sinks)
        if len(pieces) == 1 and merged.shape[0] == q.shape[0] and merged.shape[2] == q.shape[2]:
            return merged, merged_lse
        if out is None or lse is None:
            out, lse = _zeros_for(q, v), merged_lse.new_zeros(q.shape[:3])
        out[rows, :, queries], lse[rows, :, queries] = merged, merged_lse
    if out is None or lse is None:  # nothing but padding
        return _zeros_for(q, v), q.new_zeros(q.shape[:3], dtype=torch.float32)
    return out, lse


def _zeros_for(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, tile, size]``, in memory as the layer wants it next: tokens before heads."""
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


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
    return (zeros_wide(keys), zeros_wide(values)) if tile.keys_values is None else tile.keys_values.grads


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
    for stretch in _in_parts(piece.keys, q):
        where = slice(stretch.start - base, stretch.stop - base)
        k, v = keys[piece.rows, :, where], values[piece.rows, :, where]
        part, dk, dv = kernel.backward(grad, q, k, v, out, lse, stretch.sight, scores)
        into[0][piece.rows, :, where] += dk
        into[1][piece.rows, :, where] += dv
        dq = part if dq is None else dq.float() + part
    assert dq is not None
    return dq.to(q.dtype)


def _in_parts(stretches: Sequence[Stretch], q: torch.Tensor) -> Iterator[Stretch]:
    """Long stretches that are seen whole, in parts; ``q`` tells whether this is a forecast."""
    for stretch in stretches:
        start, stop = stretch.start, stretch.stop
        if stretch.sight is not Sight.ALL or stop - start <= KEYS_AT_ONCE:
            yield stretch
            continue
        for first in some_of(range(start, stop, KEYS_AT_ONCE), q, first=1, last=1):
            if not has_values(q):  # carried on to any length, the last part has to be as large as any
                first = min(first, stop - KEYS_AT_ONCE)
            yield Stretch(first, min(first + KEYS_AT_ONCE, stop), Sight.ALL)


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
