"""One decoder layer as one micro-batch calls it: whole, or a tile of it, forwards or backwards, or only to its keys.

A layer is called as its model calls it, with the arguments of its own forward cut to the tile as its contract says.
Nothing here knows a model family. What a layer reads beside the hidden states and what it gives back beside them, be it
router states, a choice of keys for the next layer, or keys in a dictionary that later layers read, are inputs and
outputs like the hidden states, and gradients flow through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from narrowboat.errors import AnatomyError
from narrowboat.memory.arguments import Path, Slot, mappings, replaced, takes, tensors
from narrowboat.memory.autocast import AsCalled
from narrowboat.memory.contract import Dims, LayerContract
from narrowboat.memory.masks import mask_for
from narrowboat.memory.past import Outputs, Past
from narrowboat.memory.surroundings import Surroundings
from narrowboat.memory.tile import HandedOver, Tile
from narrowboat.memory.unread import Again

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "cache_params", "layer_past")
MASK = "attention_mask"
HIDDEN = ((0,), (0, 0))
"""Where the hidden states are in ``(output, what was left in mappings)``."""

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
        around: what it is called in.

    Attributes:
        inputs: the hidden states, and further tensors to which gradients flow.
        num_written: how often it handed something to its cache in its last run.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        forward: Callable[..., Any],
        x: torch.Tensor,
        arguments: dict[str, Any],
        contract: LayerContract,
        around: Surroundings,
    ) -> None:
        self.layer, self.contract, self.layout = layer, contract, around.layout
        self.visit = around.visit
        self._sight = self.layout if around.chunk is None else self.layout.in_groups(around.chunk)
        self._around, self._forward, self._given = around, forward, arguments
        self._first = 0 if around.link is None else around.link.num_carried
        dropped = {*CACHE_NAMES, "use_cache", *((MASK,) if contract.attention == "ours" or contract.masks else ())}
        kept = {name: value for name, value in arguments.items() if name not in dropped}
        self._arguments = replaced(kept, lambda _, t: t)  # as they are now: later layers may leave something in them
        self._learning = [(path, t) for path, t in tensors(self._arguments) if t.requires_grad]
        self._as_called = AsCalled(x.device)
        self.num_written = 0
        self._form: Any = None
        self._paths: list[Path] = []
        self.inputs: list[torch.Tensor] = [x.movedim(contract.token_dim, 1), *(t for _, t in self._learning)]

    @property
    def num_tokens(self) -> int:
        """Of a row, without what is carried."""
        return self.layout.num_tokens - self._first

    @property
    def carries(self) -> bool:
        """Whether keys and values come from earlier segments and go on to later ones."""
        return self._around.link is not None

    def past(self, for_backward: bool = False) -> Past:
        """For the row that this call is about; nothing is there yet but what is carried."""
        return Past(self.layout.num_tokens, self._around.link, for_backward)

    def whole(self, inputs: Tensors) -> list[torch.Tensor]:
        """Run whole rows: the new hidden states, and whatever else the layer gives back."""
        return self._run(inputs, self._row())

    def tile(self, inputs: Tensors, start: int, past: Past, outputs: Outputs | None = None) -> list[torch.Tensor]:
        """Run the tile ``[batch, tile, ...]`` behind earlier ones."""
        return self._run(inputs, self._tile(inputs, start, past, outputs))

    def rebuild(self, inputs: Tensors, start: int, past: Past) -> None:
        """Run a tile just far enough to leave its keys, values and states."""
        tile = self._tile(inputs, start, past, num_writes=self.contract.num_writes)
        with torch.no_grad(), self._as_called(), self._leaving_out("rebuilt"):
            try:
                self._run(inputs, tile)
            except HandedOver:
                return
        raise AnatomyError(f"{type(self.layer).__name__} handed less to its cache than before; use the plan recompute.")

    def whole_backward(self, inputs: Tensors, seeds: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Recompute whole rows: gradients of ``inputs`` and of the layer's trainable parameters."""
        return self._backward(inputs, self._row(), seeds)

    def tile_backward(
        self, inputs: Tensors, start: int, past: Past, outputs: Outputs | None, seeds: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Recompute a tile: gradients of ``inputs`` and of the layer's trainable parameters.

        ``seeds`` are the outputs' gradients, None where there is none; those of what earlier tiles left are gathered in
        ``past``.
        """
        return self._backward(inputs, self._tile(inputs, start, past, outputs, again=True), seeds)

    def cut(self, start: int, stop: int) -> list[torch.Tensor]:
        """The further inputs of the tokens ``start`` to ``stop``, as views."""
        tile = Tile(self.layout, start + self._first, stop + self._first)
        return [self._cut(path, t, tile) for path, t in self._learning]

    def cut_like(self, tensors: Tensors, start: int, stop: int) -> list[torch.Tensor]:
        """The same of tensors shaped like the further inputs."""
        tile = Tile(self.layout, start + self._first, stop + self._first)
        return [self._cut(path, t, tile) for (path, _), t in zip(self._learning, tensors, strict=True)]

    def returned(self, outputs: Tensors) -> tuple[Any, list[torch.Tensor]]:
        """What the backbone expects of the layer, and its router logits ``[batch * tokens, ...]``."""
        own = [self._moved(path, t, back=True) for path, t in zip(self._paths, outputs, strict=False)]
        out, left = replaced(self._form, lambda _, slot: own[slot.number])
        for name, entries in left.items():
            for key, value in entries.items():
                self._given[name][key] = value
        return out, [t.flatten(0, 1) for t in outputs[len(own) :]]

    def _row(self) -> Tile:
        """All tokens."""
        around, past = self._around, self.past() if self.carries else None
        return Tile(self._sight, self._first, self.layout.num_tokens, past, scheme=around.scheme, draws=around.draws)

    def _tile(
        self,
        inputs: Tensors,
        start: int,
        past: Past,
        outputs: Outputs | None = None,
        again: bool = False,
        num_writes: int = 0,
    ) -> Tile:
        start, around, joins = start + self._first, self._around, self.contract.tiles == "joined"
        stop = start + inputs[0].shape[1]
        return Tile(
            self._sight, start, stop, past, outputs, again, joins, num_writes, around.scheme, around.draws
        )  # fmt: skip

    def _backward(self, inputs: Tensors, tile: Tile, seeds: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        with torch.enable_grad(), self._as_called(), self._leaving_out("recomputed"):
            outputs = self._run(inputs, tile)
        pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if s is not None and o.requires_grad]
        pairs += [(t, seed) for t, gathered in tile.ends.handed if (seed := gathered()) is not None]
        learning = [t for t in inputs if t.requires_grad]
        parameters = [p for p in self.layer.parameters() if p.requires_grad]
        earlier = [leaf for leaf, _ in tile.ends.earlier]
        wanted = [*learning, *parameters, *earlier]
        if not pairs or not wanted:
            return [None] * (len(inputs) + len(parameters))
        found = torch.autograd.grad([o for o, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True)
        of_earlier = found[len(found) - len(earlier) :]
        for (_, take), gradient in zip(tile.ends.earlier, of_earlier, strict=True):
            take(gradient)
        of_inputs = iter(found)
        return [
            *(next(of_inputs) if t.requires_grad else None for t in inputs),
            *found[len(learning) : len(learning) + len(parameters)],
        ]

    def _leaving_out(self, how: Again) -> AbstractContextManager[None]:
        return nullcontext() if self._as_called.is_autocast else self._around.leaving_out(how)

    def _run(self, inputs: Tensors, tile: Tile) -> list[torch.Tensor]:
        self._around.before(tile.start - self._first, tile.stop - self._first)
        hidden = inputs[0].movedim(1, self.contract.token_dim)
        arguments = self._arguments_for(tile, inputs[1:])
        known = {name: {key: id(value) for key, value in arguments[name].items()} for name in mappings(arguments)}
        arguments |= self._cache_for(tile) | self._mask_for(tile, hidden)
        out = self._forward(hidden, **arguments)
        self.num_written = tile.num_written
        left = {
            name: {key: value for key, value in arguments[name].items() if known[name].get(key) != id(value)}
            for name in known
        }
        return self._taken_apart((out, left), num_rows=inputs[0].shape[0], is_part=not self._is_row(tile))

    def _arguments_for(self, tile: Tile, learning: Tensors) -> dict[str, Any]:
        given = {path: t for (path, _), t in zip(self._learning, learning, strict=True)}

        def change(path: Path, t: torch.Tensor) -> torch.Tensor:
            return given[path] if path in given else self._cut(path, t, tile)

        arguments: dict[str, Any] = replaced(self._arguments, change)
        return arguments

    def _cache_for(self, tile: Tile) -> dict[str, Any]:
        if tile.past is None:
            return {}
        given = [name for name in CACHE_NAMES if name in self._given]
        name = given[0] if given else cache_name(self.layer, self._forward)
        return {name: tile} | ({"use_cache": True} if takes(self._forward, "use_cache") else {})

    def _mask_for(self, tile: Tile, hidden: torch.Tensor) -> dict[str, Any]:
        if self.contract.attention == "ours":
            return {MASK: tile}
        if not self.contract.masks:
            return {}
        return {MASK: mask_for(tile, self.contract.masks, hidden, self._around.window)}

    def _taken_apart(self, value: Any, num_rows: int, is_part: bool) -> list[torch.Tensor]:
        """The tensors of what a run gave, hidden states first; in what form it gave them is remembered."""
        found: list[torch.Tensor] = []
        self._paths = []

        def take(path: Path, t: torch.Tensor) -> Slot | None:
            if is_part and found and len(self._dims(path)) != 1:
                return None  # such as attention's weights, which the backbone has no use for
            self._paths.append(path)
            found.append(self._moved(path, t))
            return Slot(len(found) - 1)

        self._form = replaced(value, take)
        return [*found, *(t.unflatten(0, (num_rows, -1)) for t in self._around.collect())]

    def _is_row(self, tile: Tile) -> bool:
        return (tile.start, tile.stop) == (self._first, self.layout.num_tokens)

    def _moved(self, path: Path, t: torch.Tensor, back: bool = False) -> torch.Tensor:
        """An output with its tokens in dimension 1, or back where the layer has them."""
        dims = self._dims(path)
        if len(dims) != 1 or dims[0] == 1:
            return t
        return t.movedim(1, dims[0]) if back else t.movedim(dims[0], 1)

    def _dims(self, path: Path) -> Dims:
        return (self.contract.token_dim,) if path in HIDDEN else self.contract.further.get(path, ())

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
