"""Attention for tiles and for whole rows, under one name in transformers' attention interface.

A tile's queries see the keys of earlier tiles, which lie in a buffer, and their own. Nothing is concatenated, grouped
heads are not expanded, and a dense mask exists only where a sliding window needs one. Backwards, the gradients of
earlier keys and values are added in place to a second buffer, which the earlier tiles pick up when their turn comes
(tiles go from last to first). Without a buffer the same code is the attention of a whole row. Exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from narrowboat.errors import AnatomyError
from narrowboat.memory.kernels import Kernel, Scores, kernel_for
from narrowboat.memory.layout import Layout, Piece
from narrowboat.memory.meter import KEYS_VALUES, cause
from narrowboat.memory.offload import Room, Store
from narrowboat.memory.schemes import Scheme

ATTENTION_NAME = "narrowboat"


class Link(Protocol):
    """Ties a segment's keys and values to those of the segments before and after it."""

    num_carried: int

    def fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the carried tokens in front."""

    def saw(self, q: torch.Tensor, lse: torch.Tensor, keys: torch.Tensor, tile: Tile, scores: Scores) -> None:
        """Hears what attention of ``tile`` was made of."""

    def begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add what later segments want changed to the gradients, which are zero."""

    def end(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the gradients of the carried tokens, now that they are whole."""


class KeysValues:
    """One layer's keys and values over whole rows, and their gradients.

    ``keys`` and ``values`` are ``[batch, kv heads, tokens, head size]``, of which the first ``num_filled`` tokens are
    there. Gradients of half-precision keys are gathered in fp32: hundreds of tiles add to them, and rounding each sum
    would lose what a single kernel keeps.
    """

    def __init__(self, num_tokens: int, link: Link | None = None) -> None:
        self.num_tokens, self.link = num_tokens, link
        self.num_filled = 0 if link is None else link.num_carried
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self._grads: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
        """Those of whole rows, as they were kept."""
        made = cls(keys.shape[2])
        made.num_filled, made.keys, made.values = keys.shape[2], keys, values
        return made

    def write(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Take a tile's keys and values, unless they are there already."""
        stop = start + keys.shape[2]
        if stop <= self.num_filled:
            return
        with torch.no_grad(), cause(KEYS_VALUES):
            if self.keys is None or self.values is None:
                self.keys = keys.new_empty(*keys.shape[:2], self.num_tokens, keys.shape[3])
                self.values = values.new_empty(*values.shape[:2], self.num_tokens, values.shape[3])
                if self.link is not None:
                    self.link.fill(self.keys, self.values)
            self.keys[:, :, start:stop], self.values[:, :, start:stop] = keys, values
        self.num_filled = stop

    @property
    def grads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of keys and values gathered so far; zero at first."""
        if self._grads is None:
            assert self.keys is not None and self.values is not None
            with cause(KEYS_VALUES):
                self._grads = _zeros_wide(self.keys), _zeros_wide(self.values)
                if self.link is not None:
                    self.link.begin(*self._grads)
        return self._grads

    def tile_done(self, start: int) -> None:
        """The tile that starts there is through its backward; after the first one all gradients are whole."""
        if self.link is not None and self._grads is not None and start == self.link.num_carried:
            self.link.end(*self._grads)
            self._grads = None


class SomeHeads:
    """Some heads of a layer's keys and values."""

    link = None

    def __init__(self, whole: KeysValues, heads: slice) -> None:
        self._whole, self._heads = whole, heads

    @property
    def keys(self) -> torch.Tensor | None:
        """See ``KeysValues``."""
        return None if self._whole.keys is None else self._whole.keys[:, self._heads]

    @property
    def values(self) -> torch.Tensor | None:
        """See ``KeysValues``."""
        return None if self._whole.values is None else self._whole.values[:, self._heads]

    @property
    def grads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``KeysValues``."""
        keys, values = self._whole.grads
        return keys[:, self._heads], values[:, self._heads]

    def tile_done(self, start: int) -> None:
        """Nothing is carried where attention is sparse."""


class Outputs:
    """A layer's attention outputs and their log-sum-exps, left by the forward pass: backward need not attend again."""

    def __init__(self, store: Store, num_tokens: int) -> None:
        self._store, self._num_tokens = store, num_tokens
        self._rooms: list[Room] = []

    def write(self, start: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take a tile's ``[batch, heads, tile, size]`` and ``[batch, heads, tile]``."""
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
        if not self._rooms:
            self._rooms = [self._store.room(t, self._num_tokens) for t in (out, lse)]
        for room, part in zip(self._rooms, (out, lse), strict=True):
            room.write(start, part)

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give them back, as copies that may become part of a graph."""
        out, lse = (room.tile(start, stop).clone(memory_format=torch.contiguous_format) for room in self._rooms)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def release(self) -> None:
        """They are not needed any more."""
        for room in self._rooms:
            room.release()


class HandedOver(Exception):
    """Raised by a tile once a layer has handed over its keys and values and nothing more is wanted of it."""


class Tile:
    """Tokens ``start`` to ``stop`` of a micro-batch on their way through a layer.

    A layer gets it twice: as its cache, where it leaves its keys and values, and as its attention mask, by which
    ``attend`` learns what the queries may see.

    Args:
        layout: the micro-batch's documents.
        start, stop: the tile's tokens.
        keys_values: where the layer's keys and values gather; None for whole rows.
        stop_at_keys: raise ``HandedOver`` once they are there.
        outputs: where attention leaves its outputs, or with ``again`` takes them from.
        again: whether the tile is recomputed for backward.
    """

    is_compileable = False
    scheme: Scheme | None = None

    def __init__(
        self,
        layout: Layout,
        start: int,
        stop: int,
        keys_values: KeysValues | None,
        stop_at_keys: bool = False,
        outputs: Outputs | None = None,
        again: bool = False,
    ) -> None:
        self.layout, self.start, self.stop = layout, start, stop
        self.keys_values: KeysValues | SomeHeads | None = keys_values
        self.outputs, self.again = outputs, again
        self._stop_at_keys = stop_at_keys
        self._handed_over: torch.Tensor | None = None

    def of_heads(self, heads: slice, layout: Layout) -> Tile:
        """The same tokens for some key/value heads, with what these see."""
        tile = Tile(layout, self.start, self.stop, None)
        if isinstance(self.keys_values, KeysValues):
            tile.keys_values = SomeHeads(self.keys_values, heads)
        return tile

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Transformers' cache interface: take the tile's keys and values, give back what attention shall see."""
        if isinstance(self.keys_values, KeysValues):
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
