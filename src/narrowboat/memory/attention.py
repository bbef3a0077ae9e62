"""Attention for tiles and for whole rows, under one name in transformers' attention interface.

A tile's queries see the keys of earlier tiles, which lie in a buffer, and their own. Nothing is concatenated, grouped
heads are not expanded, and a dense mask exists only where a sliding window needs one. Backwards, the gradients of
earlier keys and values are added in place to a second buffer, which the earlier tiles pick up when their turn comes
(tiles go from last to first). Without a buffer the same code is the attention of a whole row. Exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from narrowboat.errors import AnatomyError
from narrowboat.memory.autocast import common_format, without_autocast
from narrowboat.memory.kernels import Kernel, kernel_for
from narrowboat.memory.layout import Piece, Sight, Stretch
from narrowboat.memory.past import SomeHeads, zeros_wide
from narrowboat.memory.scores import Scores
from narrowboat.memory.tile import Tile
from narrowboat.model.inner_transformers import attention_name, names_attention, set_attention_name
from narrowboat.owner.values import has_values, some_of

ATTENTION_NAME = "narrowboat"

KEYS_AT_ONCE = 16_384
"""Keys that one backward call sees. A card's kernel makes the gradients of grouped keys and values for every head and
sums them over the group at its end: for Llama-3.1-8B 16 KiB a key, which would be the largest part of a long row.
"""

NOTHING = (None,) * 4
"""Gradients of what is no tensor."""


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
        AnatomyError: it is not called by a layer that runs under a plan.
    """
    if not isinstance(attention_mask, Tile):
        raise AnatomyError(f"{type(module).__name__} was called outside of narrowboat.install; leave its `with` first.")
    kept = attention_mask.buffer_of(key, value)
    query, key, value = common_format(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scheme = attention_mask.scheme
    windows = [sliding_window] if scheme is None or scheme.is_shifted else [sliding_window, scheme.window]
    scores = Scores(float(scale), softcap, min((w for w in windows if w), default=None), attention_mask.draw(dropout))
    with without_autocast(query.device):
        if scheme is None:
            out = _AttendTile.apply(query, key, value, s_aux, attention_mask, attention_mask.layout, kept, scores)
            return out.transpose(1, 2), None
        group = query.shape[1] // key.shape[1]
        parts, tile = [], attention_mask.without_outputs()
        for heads, layout in scheme.parts(attention_mask.layout, key.shape[1]):
            queries = slice(heads.start * group, heads.stop * group)
            sinks = None if s_aux is None else s_aux[queries]
            given = (query[:, queries], key[:, heads], value[:, heads], sinks)
            some = None if kept is None else SomeHeads(kept, heads)
            parts.append(_AttendTile.apply(*given, tile, layout, some, scores))
        return torch.cat(parts, 1).transpose(1, 2), None


def register() -> None:
    """Make ``attend`` known to transformers under ``ATTENTION_NAME``; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attend)


class Switch:
    """Says which attention a backbone's parts are to use.

    Args:
        backbone: whose parts ask their configurations.
    """

    def __init__(self, backbone: torch.nn.Module) -> None:
        configs = (getattr(part, "config", None) for part in backbone.modules())
        found = {id(config): config for config in configs if config is not None and names_attention(config)}
        self._own = [(config, attention_name(config)) for config in found.values()]

    def __call__(self, is_ours: bool) -> AbstractContextManager[None]:
        """A context in which it is ours, or the model's own."""
        return self.to(ATTENTION_NAME if is_ours else None)

    @contextmanager
    def to(self, name: str | None) -> Iterator[None]:
        """A context in which it is the one called ``name``, or the model's own."""
        before = [(config, attention_name(config)) for config, _ in self._own]
        for config, own in self._own:
            set_attention_name(config, name or own)
        try:
            yield
        finally:
            for config, was in before:
                set_attention_name(config, was)


class _AttendTile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, tile, layout, kept, scores):  # type: ignore[no-untyped-def]
        kernel = kernel_for(q, v, scores)
        pieces = list(layout.pieces(tile.start, tile.stop, scores.window))
        keys, values = (k, v) if kept is None else kept.both
        base = tile.stop - k.shape[2] if kept is None else 0
        if kept is not None and kept.link is not None:
            kept.link.asks(q, keys, values, scores)
        if tile.outputs is not None and tile.again:
            out, lse = tile.outputs.read(tile.start, tile.stop)
        else:
            out, lse = _attend_tile(kernel, q, keys, values, sinks, tile.start, base, pieces, scores)
            if tile.outputs is not None:
                tile.outputs.write(tile.start, out, lse)
        if kept is not None and kept.link is not None:
            kept.link.saw(q, lse, keys, (tile.start, tile.stop), scores)
        own = (k, v) if kept is None else (None, None)  # else they are read from the buffer
        ctx.save_for_backward(q, *own, sinks, out, lse)
        ctx.dtypes = k.dtype, v.dtype
        ctx.span, ctx.base, ctx.kept = (tile.start, tile.stop), base, kept
        ctx.scores, ctx.kernel, ctx.pieces = scores, kernel, pieces
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, sinks, out, lse = ctx.saved_tensors
        (start, stop), base, kept, scores, kernel, pieces = (
            ctx.span, ctx.base, ctx.kept, ctx.scores, ctx.kernel, ctx.pieces
        )  # fmt: skip
        dsinks = _sinks_gradient(grad, out, lse, sinks, start, pieces)
        if kept is None and len(pieces) == 1 and _is_everything(pieces[0], base, start, stop, q):
            scores = scores.at(pieces[0].rows, start, base)
            return *kernel.backward(grad, q, k, v, out, lse, pieces[0].keys[0].sight, scores), dsinks, *NOTHING
        keys, values = (k, v) if kept is None else kept.both
        into = (zeros_wide(keys), zeros_wide(values)) if kept is None else kept.grads
        dq = None
        for piece in pieces:
            rows, queries = piece.rows, slice(piece.start - start, piece.stop - start)
            here = [t[rows, :, queries] for t in (grad, q, out, lse)]
            piece_dq = _piece_backward(kernel, here, keys, values, base, piece, scores, into)
            if len(pieces) == 1 and piece_dq.shape == q.shape:
                dq = piece_dq
                break
            dq = torch.zeros_like(q) if dq is None else dq
            dq[rows, :, queries] = piece_dq
        first = 0 if kept is None else start  # a buffer's earlier keys are other tiles'
        dk, dv = (t[:, :, first : stop - base] for t in into)
        if kept is not None:
            kept.tile_done(start)
        dq = torch.zeros_like(q) if dq is None else dq
        return dq, dk.to(ctx.dtypes[0]), dv.to(ctx.dtypes[1]), dsinks, *NOTHING


def _attend_tile(
    kernel: Kernel,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
    start: int,
    base: int,
    pieces: Sequence[Piece],
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of the queries from ``start`` on; zeros where there is padding. Keys begin at ``base``."""
    out = lse = None
    for piece in pieces:
        rows, queries = piece.rows, slice(piece.start - start, piece.stop - start)
        merged, merged_lse = _attend_piece(kernel, q[rows, :, queries], keys, values, base, piece, scores)
        if sinks is not None:
            merged, merged_lse = _add_sinks(merged, merged_lse, sinks)
        if len(pieces) == 1 and merged.shape[0] == q.shape[0] and merged.shape[2] == q.shape[2]:
            return merged, merged_lse
        if out is None or lse is None:
            out, lse = _zeros_for(q, values), merged_lse.new_zeros(q.shape[:3])
        out[rows, :, queries], lse[rows, :, queries] = merged, merged_lse
    if out is None or lse is None:  # nothing but padding
        return _zeros_for(q, values), q.new_zeros(q.shape[:3], dtype=torch.float32)
    return out, lse


def _zeros_for(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, tile, size]``, in memory as the layer wants it next: tokens before heads."""
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


def _is_everything(piece: Piece, base: int, start: int, stop: int, q: torch.Tensor) -> bool:
    """Whether one kernel call does the whole tile: no gradients have to be gathered then."""
    num_rows = len(range(*piece.rows.indices(q.shape[0])))
    span = (piece.start, piece.stop, piece.keys[0].start)
    return span == (start, stop, base) and (num_rows, len(piece.keys)) == (q.shape[0], 1)


def _attend_piece(
    kernel: Kernel, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, base: int, piece: Piece, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece's output and log-sum-exp over all the stretches it sees."""
    merged = lse = None
    for stretch in piece.keys:
        where = slice(stretch.start - base, stretch.stop - base)
        here = scores.at(piece.rows, piece.start, stretch.start)
        out, out_lse = kernel.forward(q, keys[piece.rows, :, where], values[piece.rows, :, where], stretch.sight, here)
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
        scored = scores.at(piece.rows, piece.start, stretch.start)
        part, dk, dv = kernel.backward(grad, q, k, v, out, lse, stretch.sight, scored)
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
    start: int,
    pieces: Sequence[Piece],
) -> torch.Tensor | None:
    """``[heads]``: minus each query's weight on the sink times its output's share of the gradient."""
    if sinks is None:
        return None
    total = torch.zeros_like(sinks, dtype=lse.dtype)
    for piece in pieces:
        rows, queries = piece.rows, slice(piece.start - start, piece.stop - start)
        weight = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse[rows, :, queries])
        share = (grad[rows, :, queries].to(lse.dtype) * out[rows, :, queries].to(lse.dtype)).sum(-1)
        total -= (weight * share).sum((0, 2))
    return total.to(sinks.dtype)
