"""Layer streaming: a decoder layer run tile by tile, forwards and backwards. The heart of Narrowboat.

Recomputing a layer still holds all that the layer's MLP and attention need for the whole sequence at once. A tile
needs only its own share, and the keys, values and states of the tiles before it:

- forward, without a graph: each tile runs through the layer behind the earlier ones; the layer's input is kept, nothing
  else;
- backward: a pass that stops when the layer has handed over its keys and values rebuilds those (about a tenth of a
  layer). Then the tiles go from last to first: a tile is recomputed with what earlier ones left as constants, its
  backward gets the tile's output gradient and what later tiles left for its own keys and values, and leaves what flows
  into earlier ones. The output gradient's storage becomes the input gradient's.

Price: the arithmetic of recomputing (three forwards' worth a layer) and the rebuilding; a tile's activations instead
of a sequence's, and 3 x hidden + 4 x kv_heads x head_dim elements a token while the layer is at work. Exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from narrowboat.memory.layer_call import LayerCall, Tensors
from narrowboat.memory.layout import Span
from narrowboat.memory.past import KeysValues, Outputs, Past, zeros_wide
from narrowboat.owner.causes import GRADIENTS, LAYER_INPUTS, cause
from narrowboat.owner.inputs import Held, Store
from narrowboat.owner.values import some_of


def stream_layer(
    call: LayerCall, tile_tokens: int, store: Store, keep_attention: bool, overwrite: bool = False
) -> list[torch.Tensor]:
    """Run a layer in tiles: its outputs.

    Args:
        call: the layer.
        tile_tokens: tokens of a tile.
        store: takes what backward needs.
        keep_attention: store keys, values and outputs of attention as well, instead of making them again.
        overwrite: nobody reads the hidden states afterwards; if the store can do without them too, their storage
            becomes the output's.
    """
    if not torch.is_grad_enabled():
        return run_tiles(call, call.inputs[0], tile_tokens)[0]
    parameters = [p for p in call.layer.parameters() if p.requires_grad]
    work = (call, tile_tokens, store, keep_attention, overwrite, len(call.inputs))
    return list(_StreamLayer.apply(*work, *call.inputs, *parameters))


def run_tiles(
    call: LayerCall, x: torch.Tensor, tile_tokens: int, outputs: Outputs | None = None, overwrite: bool = False
) -> tuple[list[torch.Tensor], Past]:
    """Run a layer tile by tile without a graph: its outputs, and what its tiles left."""
    past, further = call.past(), _Joined()
    with cause(LAYER_INPUTS):  # of the next layer
        out = x.data if overwrite else torch.empty_like(x)
    with torch.no_grad(), call.visit():
        for start, stop in each_tile(x, tile_tokens):
            found = call.tile([x[:, start:stop], *call.cut(start, stop)], start, past, outputs)
            out[:, start:stop] = found[0]
            further.add(found[1:])
    return [out, *further.tensors(x.shape[1])], past


def each_tile(x: torch.Tensor, tile_tokens: int, backwards: bool = False, with_last: bool = True) -> Iterator[Span]:
    """Where the tiles of ``[batch, tokens, ...]`` begin and end, in turn.

    The tiles between a row's ends take the same memory and evenly growing work, so a forecast takes two of them.
    """
    spans = tiles_of(x.shape[1], tile_tokens)
    spans = spans if with_last else spans[:-1]
    return some_of(spans[::-1] if backwards else spans, x, first=2, last=2 if with_last else 1)


def tiles_of(num_tokens: int, tile_tokens: int) -> list[Span]:
    """A row's tiles. The last one gets a token of its neighbour where it would have a single one.

    State-space layers take a single token behind others for the next one of a generation, and run other code for it,
    through which no gradient goes.
    """
    edges = [*range(0, num_tokens, tile_tokens), num_tokens]
    if len(edges) > 2 and tile_tokens > 2 and edges[-1] - edges[-2] == 1:
        edges[-2] -= 1
    return list(pairwise(edges))


class _Left:
    """What the forward pass of a layer leaves for backward."""

    def __init__(self, x: torch.Tensor, call: LayerCall, tile_tokens: int, store: Store, keep_attention: bool) -> None:
        self._call, self._tile_tokens, self._store = call, tile_tokens, store
        self.input = store.put(x, lambda x: run_tiles(call, x, tile_tokens)[0][0])
        keeps = keep_attention and not call.carries and call.contract.holds_keys_alone
        self.outputs = Outputs(store, x.shape[1]) if keeps else None
        self._kept: dict[Any, list[Held]] = {}

    def keep(self, made: Past) -> None:
        """Keep keys and values, if attention is kept."""
        if self.outputs is not None:
            for name, kept in made.keys_values.items():
                self._kept[name] = [self._store.hold(t.transpose(1, 2)) for t in kept.both]

    def past(self, like: torch.Tensor) -> Past:
        """As it was kept; else rebuilt, but for the last tile, which hands over its own when it is recomputed."""
        num_tokens, made = like.shape[1], self._call.past(for_backward=True)
        for name, held in self._kept.items():
            made.keys_values[name] = KeysValues.of(*(each.tile(0, num_tokens).transpose(1, 2) for each in held))
        if not self._kept and self._call.contract.num_writes:
            for start, stop in each_tile(like, self._tile_tokens, with_last=False):
                self._call.rebuild(self.tile(start, stop), start, made)
        return made

    def tile(self, start: int, stop: int) -> list[torch.Tensor]:
        """All inputs of a tile."""
        return [self.input.tile(start, stop), *self._call.cut(start, stop)]

    def release(self) -> None:
        """Nothing of it is needed any more."""
        for held in (self.input, *(each for both in self._kept.values() for each in both)):
            held.release()
        if self.outputs is not None:
            self.outputs.release()


class _StreamLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, tile_tokens, store, keep_attention, overwrite, num_inputs, *given):  # type: ignore[no-untyped-def]
        x = given[0]
        if not any(ctx.needs_input_grad):
            return tuple(run_tiles(call, x, tile_tokens)[0])
        left = _Left(x, call, tile_tokens, store, keep_attention)
        outputs, past = run_tiles(call, x, tile_tokens, left.outputs, overwrite and left.input.let_go())
        left.keep(past)
        ctx.call, ctx.tile_tokens, ctx.left, ctx.num_inputs = call, tile_tokens, left, num_inputs
        ctx.shape = outputs[0].shape
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, out_grad, *further_grads):  # type: ignore[no-untyped-def]
        call, left, num_inputs = ctx.call, ctx.left, ctx.num_inputs
        ctx.left = ctx.call = None
        if out_grad is None:  # only what the layer gave back beside its output is learnt from
            out_grad = left.input.tile(0, 1).new_zeros(ctx.shape)
        if not out_grad.is_contiguous():
            out_grad = out_grad.contiguous()
        needs = ctx.needs_input_grad[6 : 6 + num_inputs]
        with call.visit():
            grads = _Gathered(call, [needs[0]], num_inputs)
            _tiles_backward(call, left, ctx.tile_tokens, [out_grad, *further_grads], grads)
        left.release()
        return *(None,) * 6, out_grad if needs[0] else None, *grads.learning, *grads.parameters


class _Gathered:
    """Gradients that all tiles add to: of arguments that learn, and of the layer's trainable parameters."""

    def __init__(self, call: LayerCall, needs: Sequence[bool], num_inputs: int) -> None:
        self.needs_input, self._call = needs[0], call
        with cause(GRADIENTS):
            self.learning = [zeros_wide(t) for t in call.inputs[1:num_inputs]]
            self.parameters = [torch.zeros_like(p) for p in call.layer.parameters() if p.requires_grad]

    def add(self, found: Sequence[torch.Tensor | None], start: int, stop: int) -> None:
        """What one tile gave."""
        into = [*self._call.cut_like(self.learning, start, stop), *self.parameters]
        for total, part in zip(into, found, strict=True):
            if part is not None:
                total += part


def _tiles_backward(
    call: LayerCall, left: _Left, tile_tokens: int, seeds: Sequence[torch.Tensor | None], grads: _Gathered
) -> None:
    """The input's gradient takes the place of the output's, tile by tile, from last to first."""
    out_grad = seeds[0]
    assert out_grad is not None
    past = left.past(out_grad)
    for start, stop in each_tile(out_grad, tile_tokens, backwards=True):
        x, *learning = left.tile(start, stop)
        leaves = [x.detach().requires_grad_(grads.needs_input), *(t.detach().requires_grad_() for t in learning)]
        cut = [None if seed is None else seed[:, start:stop] for seed in seeds]
        leaf_grad, *found = call.tile_backward(leaves, start, past, left.outputs, cut)
        if leaf_grad is not None:
            out_grad[:, start:stop] = leaf_grad
        elif grads.needs_input:
            out_grad[:, start:stop] = 0
        grads.add(found, start, stop)
        del x, learning, leaves, leaf_grad, found  # the next tile wants the room


class _Joined:
    """A layer's further outputs, tile after tile, each ``[batch, tile, ...]``, joined to ``[batch, tokens, ...]``."""

    def __init__(self) -> None:
        self.parts: list[list[torch.Tensor]] = []

    def add(self, outputs: Tensors) -> None:
        """Those of the next tile."""
        if not self.parts:
            self.parts = [[] for _ in outputs]
        for part, output in zip(self.parts, outputs, strict=True):
            part.append(output.detach())

    def tensors(self, num_tokens: int) -> list[torch.Tensor]:
        """All tiles' together."""
        joined = [torch.cat(part, 1) for part in self.parts]
        if any(t.shape[1] < num_tokens for t in joined):  # a forecast left tiles out
            joined = [t.new_empty(t.shape[0], num_tokens, *t.shape[2:]) for t in joined]
        return joined
