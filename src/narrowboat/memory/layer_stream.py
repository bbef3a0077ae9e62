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

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from narrowboat.errors import AnatomyError
from narrowboat.memory.attention import HandedOver, KeysValues, Tile
from narrowboat.memory.layout import Layout
from narrowboat.memory.meter import GRADIENTS, LAYER_INPUTS, cause
from narrowboat.memory.offload import Held, InputStore

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")
SLICED = ("position_embeddings", "position_ids", "cache_position")


class LayerCall:
    """One decoder layer with what one micro-batch hands to it: runs any tile of it.

    Args:
        layer: the decoder layer.
        forward: its own forward, as it was before anything was installed.
        arguments: what the backbone passed beside the hidden states. A layer whose tokens meet in attention gets a
            ``Tile`` for its mask; any other one keeps the mask that it was passed.
        layout: the micro-batch's documents.
        before: told ``(start, stop)`` before each tile runs (dropout has to know).
        visit: a context in which the layer's weights are on the device.
        collect: gives the layer's further outputs of the last run, such as router logits; each
            ``[batch * tile, ...]``.
        attends: whether the layer has attention.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        forward: Callable[..., Any],
        arguments: dict[str, Any],
        layout: Layout,
        before: Callable[[int, int], None],
        collect: Callable[[], tuple[torch.Tensor, ...]],
        visit: Callable[[], AbstractContextManager[None]] = nullcontext,
        attends: bool = True,
    ) -> None:
        self.layer, self.layout = layer, layout
        self._forward, self._before, self.collect, self.visit = forward, before, collect, visit
        self._attends = attends
        dropped = (*CACHE_NAMES, "use_cache", *(("attention_mask",) if attends else ()))
        self._arguments = {name: value for name, value in arguments.items() if name not in dropped}

    @cached_property
    def _cache_name(self) -> str:
        return cache_name(self.layer, self._forward)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Run the whole row: ``[batch, tokens, hidden]`` to the same."""
        return self._run(x, Tile(self.layout, 0, self.layout.num_tokens, None))

    def tile(self, x: torch.Tensor, start: int, keys_values: KeysValues) -> torch.Tensor:
        """Run ``[batch, tile, hidden]`` against the keys and values of earlier tiles."""
        return self._run(x, Tile(self.layout, start, start + x.shape[1], keys_values))

    def rebuild(self, x: torch.Tensor, start: int, keys_values: KeysValues) -> None:
        """Run a tile just far enough to leave its keys and values."""
        try:
            self._run(x, Tile(self.layout, start, start + x.shape[1], keys_values, stop_at_keys=True))
        except HandedOver:
            return
        raise AnatomyError(f"{type(self.layer).__name__} never hands over keys and values; use the plan recompute.")

    def _run(self, x: torch.Tensor, tile: Tile) -> torch.Tensor:
        self._before(tile.start, tile.stop)
        arguments = {name: self._cut(name, value, tile) for name, value in self._arguments.items()}
        if tile.keys_values is not None:
            arguments[self._cache_name] = tile
            arguments["use_cache"] = True
        if self._attends:
            arguments["attention_mask"] = tile
        out = self._forward(x, **arguments)
        return out[0] if isinstance(out, tuple) else out

    def _cut(self, name: str, value: Any, tile: Tile) -> Any:
        if (tile.start, tile.stop) == (0, self.layout.num_tokens):
            return value
        if name not in SLICED:
            if isinstance(value, torch.Tensor) and self.layout.num_tokens in value.shape[1:2]:
                raise AnatomyError(
                    f"{type(self.layer).__name__} takes a tensor {name!r} of {self.layout.num_tokens} tokens, and it "
                    "is not known how to cut it; use the plan recompute."
                )
            return value
        if isinstance(value, tuple):
            return tuple(self._cut(name, part, tile) for part in value)
        if isinstance(value, torch.Tensor):
            return value[tile.start : tile.stop] if value.dim() == 1 else value[:, tile.start : tile.stop]
        return value


def cache_name(layer: torch.nn.Module, forward: Callable[..., Any]) -> str:
    """What the layer calls its cache.

    Raises:
        AnatomyError: when it takes none; such a layer cannot be tiled.
    """
    parameters = inspect.signature(inspect.unwrap(forward)).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise AnatomyError(
        f"{type(layer).__name__} takes no key/value cache, so it cannot be tiled; use the plan recompute."
    )


def stream_layer(
    x: torch.Tensor, call: LayerCall, tile_tokens: int, inputs: InputStore, keep_keys_values: bool
) -> tuple[torch.Tensor, ...]:
    """Run a layer in tiles: ``[batch, tokens, hidden]`` to the same, and whatever ``call.collect`` gives."""
    if not torch.is_grad_enabled():
        out, further, _ = run_tiles(x, call, tile_tokens)
        return (out, *further)
    parameters = [p for p in call.layer.parameters() if p.requires_grad]
    return _StreamLayer.apply(x, call, tile_tokens, inputs, keep_keys_values, *parameters)


def run_tiles(
    x: torch.Tensor, call: LayerCall, tile_tokens: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], KeysValues]:
    """Run a layer tile by tile without a graph: its output, its further outputs, its keys and values."""
    keys_values, extras = KeysValues(x.shape[1]), _Joined()
    with cause(LAYER_INPUTS):  # of the next layer
        out = torch.empty_like(x)
    with torch.no_grad(), call.visit():
        for start in range(0, x.shape[1], tile_tokens):
            stop = min(start + tile_tokens, x.shape[1])
            out[:, start:stop] = call.tile(x[:, start:stop], start, keys_values)
            extras.add(call.collect(), x.shape[0])
    return out, extras.tensors(), keys_values


class _StreamLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call, tile_tokens, inputs, keep_keys_values, *parameters):  # type: ignore[no-untyped-def]
        out, extras, keys_values = run_tiles(x, call, tile_tokens)
        if any(ctx.needs_input_grad):
            ctx.call, ctx.tile_tokens, ctx.parameters = call, tile_tokens, parameters
            ctx.held = inputs.put(x, lambda x: run_tiles(x, call, tile_tokens)[0])
            ctx.keys_values = keys_values if keep_keys_values else None
        return (out, *extras)

    @staticmethod
    def backward(ctx, out_grad, *extra_grads):  # type: ignore[no-untyped-def]
        call, held, keys_values = ctx.call, ctx.held, ctx.keys_values
        ctx.held = ctx.keys_values = ctx.call = None
        if not out_grad.is_contiguous():
            out_grad = out_grad.contiguous()
        with call.visit():
            starts = range(0, out_grad.shape[1], ctx.tile_tokens)
            keys_values = keys_values or _rebuild(call, held, starts, out_grad.shape[1])
            grads = _tiles_backward(
                call, held, starts, keys_values, out_grad, extra_grads, ctx.parameters, ctx.needs_input_grad[0]
            )
        held.release()
        return (out_grad if ctx.needs_input_grad[0] else None), None, None, None, None, *grads


def _tiles_backward(
    call: LayerCall,
    held: Held,
    starts: range,
    keys_values: KeysValues,
    out_grad: torch.Tensor,
    extra_grads: Sequence[torch.Tensor | None],
    parameters: Sequence[torch.nn.Parameter],
    needs_input_grad: bool,
) -> list[torch.Tensor]:
    """The parameters' gradients; the input's takes the place of ``out_grad``, tile by tile, from last to first."""
    num_rows, num_tokens = out_grad.shape[:2]
    with cause(GRADIENTS):
        grads = [torch.zeros_like(p) for p in parameters]
    for start in reversed(starts):
        stop = min(start + starts.step, num_tokens)
        leaf = held.tile(start, stop).detach().requires_grad_(needs_input_grad)
        seeds = [out_grad[:, start:stop], *_cut_extras(extra_grads, num_rows, start, stop)]
        leaf_grad, found = _tile_backward(call, leaf, start, keys_values, seeds, parameters)
        if leaf_grad is not None:
            out_grad[:, start:stop] = leaf_grad
        for grad, part in zip(grads, found, strict=True):
            if part is not None:
                grad += part
    return grads


def _rebuild(call: LayerCall, held: Held, starts: range, num_tokens: int) -> KeysValues:
    """The keys and values of all tiles but the last, which hands over its own when it is recomputed."""
    keys_values = KeysValues(num_tokens)
    with torch.no_grad():
        for start in starts[:-1]:
            call.rebuild(held.tile(start, start + starts.step), start, keys_values)
    return keys_values


def _tile_backward(
    call: LayerCall,
    leaf: torch.Tensor,
    start: int,
    keys_values: KeysValues,
    seeds: Sequence[torch.Tensor | None],
    parameters: Sequence[torch.nn.Parameter],
) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
    """Recompute one tile and give the gradients of its input and of the layer's parameters."""
    with torch.enable_grad():
        outputs = [call.tile(leaf, start, keys_values), *call.collect()]
    pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if s is not None]
    wanted = [leaf, *parameters] if leaf.requires_grad else list(parameters)
    found = torch.autograd.grad([o for o, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True)
    return (found[0], found[1:]) if leaf.requires_grad else (None, found)


class _Joined:
    """A layer's further outputs, tile after tile, each ``[batch * tile, ...]``, joined to ``[batch * tokens, ...]``."""

    def __init__(self) -> None:
        self.parts: list[list[torch.Tensor]] = []

    def add(self, outputs: Sequence[torch.Tensor], num_rows: int) -> None:
        if not self.parts:
            self.parts = [[] for _ in outputs]
        for part, output in zip(self.parts, outputs, strict=True):
            part.append(output.detach().unflatten(0, (num_rows, -1)))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(torch.cat(part, 1).flatten(0, 1) for part in self.parts)


def _cut_extras(
    grads: Sequence[torch.Tensor | None], num_rows: int, start: int, stop: int
) -> list[torch.Tensor | None]:
    return [None if g is None else g.unflatten(0, (num_rows, -1))[:, start:stop].flatten(0, 1) for g in grads]
