"""Layer streaming: a decoder layer run tile by tile, forwards and backwards. The heart of Narrowboat.

Recomputing a layer still holds all that the layer's MLP and attention need for the whole sequence at once. A tile
needs only its own share, and the keys and values of the tiles before it:

- forward, without a graph: each tile runs through the layer against the keys and values of the earlier tiles; the
  layer's input is kept, nothing else;
- backward: a pass that stops when attention hands over its keys and values rebuilds those (about a tenth of a layer).
  Then the tiles go from last to first: a tile is recomputed with the earlier keys and values as constants, its
  backward gets the tile's output gradient and what later tiles left for its own keys and values, and leaves what flows
  into earlier ones. The output gradient's storage becomes the input gradient's.

Price: the arithmetic of recomputing (three forwards' worth a layer) and the rebuilding; a tile's activations instead
of a sequence's, and 3 x hidden + 4 x kv_heads x head_dim elements a token while the layer is at work. Exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from narrowboat.errors import AnatomyError
from narrowboat.memory.layer_call import LayerCall
from narrowboat.memory.tile import KeysValues, Outputs
from narrowboat.owner.causes import GRADIENTS, LAYER_INPUTS, cause
from narrowboat.owner.inputs import Held, Store
from narrowboat.owner.values import some_of


def stream_layer(
    x: torch.Tensor, call: LayerCall, tile_tokens: int, store: Store, keep_attention: bool, overwrite: bool = False
) -> tuple[torch.Tensor, ...]:
    """Run a layer in tiles.

    Args:
        x: ``[batch, tokens, hidden]``.
        call: the layer.
        tile_tokens: tokens of a tile.
        store: takes what backward needs.
        keep_attention: store keys, values and outputs of attention as well, instead of making them again.
        overwrite: nobody reads ``x`` afterwards; if the store can do without it too, its storage becomes the output's.

    Returns:
        The same shape as ``x``, and whatever ``call.collect`` gives.

    Raises:
        AnatomyError: gradients flow to more than the layer's input and its weights.
    """
    if not torch.is_grad_enabled():
        out, further, _ = run_tiles(x, call, tile_tokens)
        return (out, *further)
    if call.learning:
        raise AnatomyError(
            f"{type(call.layer).__name__} takes {len(call.learning)} tensors beside its input to which gradients flow, "
            "and they would be lost tile by tile; use the plan recompute."
        )
    parameters = [p for p in call.layer.parameters() if p.requires_grad]
    return _StreamLayer.apply(x, call, tile_tokens, store, keep_attention, overwrite, *parameters)


def run_tiles(
    x: torch.Tensor,
    call: LayerCall,
    tile_tokens: int,
    outputs: Outputs | None = None,
    overwrite: bool = False,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], KeysValues]:
    """Run a layer tile by tile without a graph: its output, its further outputs, its keys and values."""
    keys_values, extras = call.keys_values(), _Joined()
    with cause(LAYER_INPUTS):  # of the next layer
        out = x.data if overwrite else torch.empty_like(x)
    with torch.no_grad(), call.visit():
        for start in each_tile(x, tile_tokens):
            stop = min(start + tile_tokens, x.shape[1])
            out[:, start:stop] = call.tile(x[:, start:stop], start, keys_values, outputs)
            extras.add(call.collect(), x.shape[0])
    return out, extras.tensors(x.shape[1]), keys_values


def each_tile(x: torch.Tensor, tile_tokens: int, backwards: bool = False, with_last: bool = True) -> Iterator[int]:
    """Where the tiles of ``[batch, tokens, hidden]`` begin, in turn.

    The tiles between a row's ends take the same memory and evenly growing work, so a forecast takes two of them.
    """
    starts: Sequence[int] = range(0, x.shape[1], tile_tokens)
    starts = starts if with_last else starts[:-1]
    return some_of(starts[::-1] if backwards else starts, x, first=2, last=2 if with_last else 1)


class _Left:
    """What the forward pass of a layer leaves for backward."""

    def __init__(self, x: torch.Tensor, call: LayerCall, tile_tokens: int, store: Store, keep_attention: bool) -> None:
        self._call, self._tile_tokens, self._store = call, tile_tokens, store
        self.input = store.put(x, lambda x: run_tiles(x, call, tile_tokens)[0])
        self.outputs = Outputs(store, x.shape[1]) if keep_attention and not call.carries else None
        self._keys_values: list[Held] = []

    def keep(self, made: KeysValues) -> None:
        """Keep keys and values, if attention is kept."""
        if self.outputs is not None and made.keys is not None and made.values is not None:
            self._keys_values = [self._store.hold(t.transpose(1, 2)) for t in (made.keys, made.values)]

    def keys_values(self, like: torch.Tensor) -> KeysValues:
        """As they were kept; else rebuilt, but for the last tile, which hands over its own when it is recomputed."""
        num_tokens = like.shape[1]
        if self._keys_values:
            return KeysValues.of(*(held.tile(0, num_tokens).transpose(1, 2) for held in self._keys_values))
        made = self._call.keys_values()
        for start in each_tile(like, self._tile_tokens, with_last=False):
            self._call.rebuild(self.input.tile(start, start + self._tile_tokens), start, made)
        return made

    def release(self) -> None:
        """Nothing of it is needed any more."""
        for held in (self.input, *self._keys_values):
            held.release()
        if self.outputs is not None:
            self.outputs.release()


class _StreamLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call, tile_tokens, store, keep_attention, overwrite, *parameters):  # type: ignore[no-untyped-def]
        if not any(ctx.needs_input_grad):
            out, extras, _ = run_tiles(x, call, tile_tokens)
            return (out, *extras)
        left = _Left(x, call, tile_tokens, store, keep_attention)
        out, extras, keys_values = run_tiles(x, call, tile_tokens, left.outputs, overwrite and left.input.let_go())
        left.keep(keys_values)
        ctx.call, ctx.tile_tokens, ctx.parameters, ctx.left = call, tile_tokens, parameters, left
        return (out, *extras)

    @staticmethod
    def backward(ctx, out_grad, *extra_grads):  # type: ignore[no-untyped-def]
        call, left = ctx.call, ctx.left
        ctx.left = ctx.call = None
        if not out_grad.is_contiguous():
            out_grad = out_grad.contiguous()
        with call.visit():
            grads = _tiles_backward(
                call, left, ctx.tile_tokens, out_grad, extra_grads, ctx.parameters, ctx.needs_input_grad[0]
            )
        left.release()
        return (out_grad if ctx.needs_input_grad[0] else None), None, None, None, None, None, *grads


def _tiles_backward(
    call: LayerCall,
    left: _Left,
    tile_tokens: int,
    out_grad: torch.Tensor,
    extra_grads: Sequence[torch.Tensor | None],
    parameters: Sequence[torch.nn.Parameter],
    needs_input_grad: bool,
) -> list[torch.Tensor]:
    """The parameters' gradients; the input's takes the place of ``out_grad``, tile by tile, from last to first."""
    num_rows, num_tokens = out_grad.shape[:2]
    keys_values = left.keys_values(out_grad)
    with cause(GRADIENTS):
        grads = [torch.zeros_like(p) for p in parameters]
    for start in each_tile(out_grad, tile_tokens, backwards=True):
        stop = min(start + tile_tokens, num_tokens)
        leaf = left.input.tile(start, stop).detach().requires_grad_(needs_input_grad)
        seeds = [out_grad[:, start:stop], *_cut_extras(extra_grads, num_rows, start, stop)]
        leaf_grad, *found = call.backward(leaf, start, keys_values, left.outputs, seeds)
        if leaf_grad is not None:
            out_grad[:, start:stop] = leaf_grad
        for grad, part in zip(grads, found, strict=True):
            if part is not None:
                grad += part
        del leaf, leaf_grad, found  # the next tile wants the room
    return grads


class _Joined:
    """A layer's further outputs, tile after tile, each ``[batch * tile, ...]``, joined to ``[batch * tokens, ...]``."""

    def __init__(self) -> None:
        self.parts: list[list[torch.Tensor]] = []

    def add(self, outputs: Sequence[torch.Tensor], num_rows: int) -> None:
        if not self.parts:
            self.parts = [[] for _ in outputs]
        for part, output in zip(self.parts, outputs, strict=True):
            part.append(output.detach().unflatten(0, (num_rows, -1)))

    def tensors(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        joined = [torch.cat(part, 1) for part in self.parts]
        if any(t.shape[1] < num_tokens for t in joined):  # a forecast left tiles out
            joined = [t.new_empty(t.shape[0], num_tokens, *t.shape[2:]) for t in joined]
        return tuple(t.flatten(0, 1) for t in joined)


def _cut_extras(
    grads: Sequence[torch.Tensor | None], num_rows: int, start: int, stop: int
) -> list[torch.Tensor | None]:
    return [None if g is None else g.unflatten(0, (num_rows, -1))[:, start:stop].flatten(0, 1) for g in grads]
