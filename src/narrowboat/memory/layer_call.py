"""One decoder layer as one micro-batch calls it: whole, or a tile of it, forwards or backwards, or only to its keys.

A layer is called as its model calls it, with the arguments of its own forward cut to the tile as its contract says.
Nothing here knows a model family. What a layer reads beside the hidden states and what it gives back beside them, be it
router states, a choice of keys for the next layer, or keys in a dictionary that later layers read, are inputs and
outputs like the hidden states, and gradients flow through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from narrowboat.errors import AnatomyError
from narrowboat.memory.arguments import Path, Slot, mappings, replaced, takes, tensors
from narrowboat.memory.autocast import AsCalled
from narrowboat.memory.contract import Contract, Dims
from narrowboat.memory.layout import Layout
from narrowboat.memory.schemes import Scheme
from narrowboat.memory.tile import HandedOver, KeysValues, Link, Outputs, Tile
from narrowboat.memory.unread import Unread

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")
MASK = "attention_mask"

Tensors = Sequence[torch.Tensor]


class LayerCall:
    """One decoder layer with what one micro-batch hands to it: runs any tile of it.

    Inputs and outputs that follow the tokens are ``[batch, tokens, ...]`` here, wherever the layer has its tokens.

    Args:
        layer: the decoder layer.
        forward: its own forward, as it was before anything was installed.
        x: the hidden states.
        arguments: what the backbone passed beside them.
        contract: how the layer is to be called.
        layout: the micro-batch's documents.
        before: told ``(start, stop)`` before each tile runs (dropout has to know).
        collect: gives the layer's router logits of the last run, each ``[batch * tile, ...]``.
        visit: a context in which the layer's weights are on the device.
        link: to the segments before and after, where keys and values are carried; ``layout`` counts the carried
            tokens, and everything else begins behind them.
        scheme: of attention that is not full.
        unread: knows the projections that a second run may leave out; None leaves out nothing.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        forward: Callable[..., Any],
        x: torch.Tensor,
        arguments: dict[str, Any],
        contract: Contract,
        layout: Layout,
        before: Callable[[int, int], None],
        collect: Callable[[], tuple[torch.Tensor, ...]] = tuple,
        visit: Callable[[], AbstractContextManager[None]] = nullcontext,
        link: Link | None = None,
        scheme: Scheme | None = None,
        unread: Unread | None = None,
    ) -> None:
        self.layer, self.layout, self.contract, self._link = layer, layout, contract, link
        self._first, self._scheme = 0 if link is None else link.num_carried, scheme
        self._forward, self._before, self._collect, self.visit = forward, before, collect, visit
        self._unread, self._given = unread, arguments
        dropped = (*CACHE_NAMES, "use_cache", *((MASK,) if contract.attention == "ours" else ()))
        self._arguments = {name: value for name, value in arguments.items() if name not in dropped}
        self.x = x.movedim(contract.token_dim, 1)
        self.as_called = AsCalled(x.device)
        self._form: Any = None
        self._paths: list[Path] = []

    @cached_property
    def _learning(self) -> list[tuple[Path, torch.Tensor]]:
        return [(path, t) for path, t in tensors(self._arguments) if t.requires_grad]

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The hidden states and all else to which gradients flow, such as a projection of the embeddings."""
        return [self.x, *(t for _, t in self._learning)]

    @property
    def num_tokens(self) -> int:
        """Of a row, without what is carried."""
        return self.layout.num_tokens - self._first

    @property
    def carries(self) -> bool:
        """Whether keys and values come from earlier segments and go on to later ones."""
        return self._link is not None

    def whole(self, inputs: Tensors) -> list[torch.Tensor]:
        """Run whole rows: the new hidden states, and whatever else the layer gives back."""
        keys_values = None if self._link is None else self.keys_values()
        return self._run(inputs, Tile(self.layout, self._first, self.layout.num_tokens, keys_values))

    def keys_values(self) -> KeysValues:
        """For the row that this call is about; nothing is there yet but what is carried."""
        return KeysValues(self.layout.num_tokens, self._link)

    def tile(
        self, inputs: Tensors, start: int, keys_values: KeysValues, outputs: Outputs | None = None, again: bool = False
    ) -> list[torch.Tensor]:
        """Run ``[batch, tile, ...]`` against the keys and values of earlier tiles."""
        start += self._first
        tile = Tile(self.layout, start, start + inputs[0].shape[1], keys_values, outputs=outputs, again=again)
        return self._run(inputs, tile)

    def cut(self, start: int, stop: int) -> list[torch.Tensor]:
        """The further inputs of the tokens ``start`` to ``stop``, as the layer has them."""
        tile = Tile(self.layout, start + self._first, stop + self._first, None)
        return [self._cut(path, t, tile) for path, t in self._learning]

    def gradients(self, inputs: Tensors, run: Callable[[Tensors], Tensors], seeds: Sequence[Any]) -> list[Any]:
        """Run once more with a graph: gradients of ``inputs`` and of the layer's trainable parameters.

        Args:
            inputs: those that want a gradient require it.
            run: gives the outputs.
            seeds: the outputs' gradients; None where there is none.
        """
        with torch.enable_grad(), self.as_called(), self._leaving_out("recomputed"):
            out = run(inputs)
        pairs = [(o, s) for o, s in zip(out, seeds, strict=True) if s is not None and o.requires_grad]
        parameters = [p for p in self.layer.parameters() if p.requires_grad]
        wanted = [t for t in inputs if t.requires_grad] + parameters
        if not pairs:
            return [None] * (len(inputs) + len(parameters))
        grads = torch.autograd.grad([o for o, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True)
        found = iter(grads)
        return [*(next(found) if t.requires_grad else None for t in inputs), *found]

    def rebuild(self, inputs: Tensors, start: int, keys_values: KeysValues) -> None:
        """Run a tile just far enough to leave its keys and values."""
        start += self._first
        tile = Tile(self.layout, start, start + inputs[0].shape[1], keys_values, stop_at_keys=True)
        with torch.no_grad(), self.as_called(), self._leaving_out("rebuilt"):
            try:
                self._run(inputs, tile)
            except HandedOver:
                return
        raise AnatomyError(f"{type(self.layer).__name__} never hands over keys and values; use the plan recompute.")

    def returned(self, outputs: Tensors) -> tuple[Any, list[torch.Tensor]]:
        """What the backbone expects of the layer, and its router logits ``[batch * tokens, ...]``."""
        own = [self._moved(path, t, back=True) for path, t in zip(self._paths, outputs, strict=False)]
        out, left = replaced(self._form, lambda _, slot: own[slot.number])
        for name, entries in left.items():
            for key, value in entries.items():
                self._given[name][key] = value
        return out, [t.flatten(0, 1) for t in outputs[len(own) :]]

    def _leaving_out(self, how: str) -> AbstractContextManager[None]:
        """Without the projections that nobody reads."""
        if self._unread is None or self.as_called.is_autocast:
            return nullcontext()
        return self._unread.left_out(how)

    def _run(self, inputs: Tensors, tile: Tile) -> list[torch.Tensor]:
        self._before(tile.start - self._first, tile.stop - self._first)
        tile.scheme, tile.joins = self._scheme, self.contract.tiles == "joined"
        given = {path: t for (path, _), t in zip(self._learning, inputs[1:], strict=True)}
        arguments = replaced(self._arguments, lambda path, t: given.get(path, None) if path in given else self._cut(path, t, tile))
        known = {name: {key: id(value) for key, value in arguments[name].items()} for name in mappings(arguments)}
        if tile.keys_values is not None:
            arguments[cache_name(self.layer, self._forward)] = tile
            if takes(self._forward, "use_cache"):
                arguments["use_cache"] = True
        if self.contract.attention == "ours":
            arguments[MASK] = tile
        out = self._forward(inputs[0].movedim(1, self.contract.token_dim), **arguments)
        left = {
            name: {key: value for key, value in arguments[name].items() if known[name].get(key) != id(value)}
            for name in known
        }
        return self._taken_apart((out, left), num_rows=inputs[0].shape[0], is_tile=self._is_part(tile))

    def _taken_apart(self, value: Any, num_rows: int, is_tile: bool) -> list[torch.Tensor]:
        """The tensors of what a run gave, hidden states first; in what form it gave them is remembered."""
        found: list[torch.Tensor] = []
        self._paths = []

        def take(path: Path, t: torch.Tensor) -> Slot | None:
            if is_tile and found and len(self._dims(path, t)) != 1:
                return None  # such as attention's weights, which the backbone has no use for
            self._paths.append(path)
            found.append(self._moved(path, t))
            return Slot(len(found) - 1)

        self._form = replaced(value, take)
        return [*found, *(t.unflatten(0, (num_rows, -1)) for t in self._collect())]

    def _is_part(self, tile: Tile) -> bool:
        return (tile.start, tile.stop) != (self._first, self.layout.num_tokens)

    def _moved(self, path: Path, t: torch.Tensor, back: bool = False) -> torch.Tensor:
        """An output with its tokens in dimension 1, or back where the layer has them."""
        dims = self._dims(path, t)
        if len(dims) != 1 or dims[0] == 1:
            return t
        return t.movedim(1, dims[0]) if back else t.movedim(dims[0], 1)

    def _dims(self, path: Path, t: torch.Tensor) -> Dims:
        if path in ((0,), (0, 0)):
            return (self.contract.token_dim,)
        return self.contract.further.get(path, ())

    def _cut(self, path: Path, value: torch.Tensor, tile: Tile) -> torch.Tensor:
        """What an argument's tensor is for a tile: its queries, and all keys up to its end."""
        start, stop, num_tokens = (at - self._first for at in (tile.start, tile.stop, self.layout.num_tokens))
        if (start, stop) == (0, num_tokens):
            return value
        dims = self.contract.dims.get(path)
        if dims is None:
            dims = tuple(d for d, size in enumerate(value.shape) if size == num_tokens)
        if len(dims) > 1:
            return value.narrow(dims[0], start, stop - start).narrow(dims[1], 0, stop)
        if dims and path in self.contract.keyed:
            return value.narrow(dims[0], 0, stop)
        return value.narrow(dims[0], start, stop - start) if dims else value


def cache_name(layer: torch.nn.Module, forward: Callable[..., Any]) -> str:
    """What the layer calls its cache.

    Raises:
        AnatomyError: when it takes none; such a layer cannot be tiled.
    """
    for name in CACHE_NAMES:
        if takes(forward, name):
            return name
    raise AnatomyError(
        f"{type(layer).__name__} takes no key/value cache, so it cannot be tiled; use the plan recompute."
    )
