"""One decoder layer as one micro-batch calls it: whole, or a tile of it, forwards or backwards, or only to its keys.

A layer is called as its model calls it, with the arguments of its own forward cut to the tile. Nothing here knows a
model family: what the layer calls its cache is read from its signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map

from narrowboat.errors import AnatomyError
from narrowboat.memory.layout import Layout
from narrowboat.memory.schemes import Scheme
from narrowboat.memory.tile import HandedOver, KeysValues, Link, Outputs, Tile
from narrowboat.memory.unread import Unread
from narrowboat.owner.values import has_values

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")
PROBE_TOKENS = 4
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
        link: to the segments before and after, where keys and values are carried; ``layout`` counts the carried
            tokens, and everything else begins behind them.
        scheme: of attention that is not full.
        unread: knows the projections that a second run may leave out; None leaves out nothing.
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
        link: Link | None = None,
        scheme: Scheme | None = None,
        unread: Unread | None = None,
    ) -> None:
        self.layer, self.layout, self._link = layer, layout, link
        self._first, self._scheme = 0 if link is None else link.num_carried, scheme
        self._forward, self._before, self.collect, self.visit = forward, before, collect, visit
        self._attends, self._unread = attends, unread
        dropped = (*CACHE_NAMES, "use_cache", *(("attention_mask",) if attends else ()))
        self._arguments = {name: value for name, value in arguments.items() if name not in dropped}

    @cached_property
    def _cache_name(self) -> str:
        return cache_name(self.layer, self._forward)

    @property
    def num_tokens(self) -> int:
        """Of a row, without what is carried."""
        return self.layout.num_tokens - self._first

    @cached_property
    def learning(self) -> list[torch.Tensor]:
        """Tensors beside the hidden states to which gradients flow, such as a projection of the embeddings."""
        return [t for t in tree_iter(self._arguments) if isinstance(t, torch.Tensor) and t.requires_grad]

    def whole(self, x: torch.Tensor, learning: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Run the whole row: ``[batch, tokens, hidden]`` to the same; with others in the place of what is learning."""
        keys_values = None if self._link is None else self.keys_values()
        instead = {id(old): new for old, new in zip(self.learning, learning, strict=False)}
        arguments = tree_map(lambda value: instead.get(id(value), value), self._arguments)
        return self._run(x, Tile(self.layout, self._first, self.layout.num_tokens, keys_values), arguments)

    @property
    def carries(self) -> bool:
        """Whether keys and values come from earlier segments and go on to later ones."""
        return self._link is not None

    def keys_values(self) -> KeysValues:
        """For the row that this call is about; nothing is there yet but what is carried."""
        return KeysValues(self.layout.num_tokens, self._link)

    def tile(
        self,
        x: torch.Tensor,
        start: int,
        keys_values: KeysValues,
        outputs: Outputs | None = None,
        again: bool = False,
    ) -> torch.Tensor:
        """Run ``[batch, tile, hidden]`` against the keys and values of earlier tiles."""
        start += self._first
        tile = Tile(self.layout, start, start + x.shape[1], keys_values, outputs=outputs, again=again)
        return self._run(x, tile)

    def backward(
        self,
        leaf: torch.Tensor,
        start: int,
        keys_values: KeysValues,
        outputs: Outputs | None,
        seeds: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Recompute a tile and give the gradients of ``leaf``, its input, and of the layer's trainable parameters.

        ``seeds`` are the gradients of the output and the further outputs; those of keys and values that the tile sees
        are gathered in ``keys_values``.
        """
        with torch.enable_grad(), self.leaving_out(leaf):
            out = [self.tile(leaf, start, keys_values, outputs, again=True), *self.collect()]
        pairs = [(o, s) for o, s in zip(out, seeds, strict=False) if s is not None]
        wanted = [t for t in (leaf, *self.layer.parameters()) if t.requires_grad]
        found = torch.autograd.grad([o for o, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True)
        return [*found] if leaf.requires_grad else [None, *found]

    def rebuild(self, x: torch.Tensor, start: int, keys_values: KeysValues) -> None:
        """Run a tile just far enough to leave its keys and values."""
        with torch.no_grad(), self._leaving_out(x, recomputing=False):
            self._hand_over(x, start, keys_values)

    def _hand_over(self, x: torch.Tensor, start: int, keys_values: KeysValues) -> None:
        start += self._first
        try:
            self._run(x, Tile(self.layout, start, start + x.shape[1], keys_values, stop_at_keys=True))
        except HandedOver:
            return
        raise AnatomyError(f"{type(self.layer).__name__} never hands over keys and values; use the plan recompute.")

    def leaving_out(self, x: torch.Tensor) -> AbstractContextManager[None]:
        """Without the projections whose values a second run of the layer has no use for."""
        return self._leaving_out(x, recomputing=True) if self._attends else nullcontext()

    def _leaving_out(self, x: torch.Tensor, recomputing: bool) -> AbstractContextManager[None]:
        """Without the projections that nobody reads."""
        if self._unread is None or not has_values(x):
            return nullcontext()
        return self._unread.left_out(recomputing, partial(self._probe, x))

    def _probe(self, like: torch.Tensor) -> list[torch.Tensor | None]:
        """What a few random tokens leave behind: keys, values, and with gradients enabled those of input and layer."""
        all_tokens = self.layout.num_tokens - self._first
        num_tokens = min(PROBE_TOKENS, all_tokens)
        layout = Layout(all_tokens, (((0, num_tokens),),) * like.shape[0])
        call = LayerCall(
            self.layer, self._forward, self._arguments, layout, self._before, self.collect, scheme=self._scheme
        )
        generator = torch.Generator(like.device).manual_seed(0)
        x, seed = (torch.empty_like(like[:, :num_tokens]).normal_(generator=generator) for _ in range(2))
        keys_values = KeysValues(num_tokens)
        if torch.is_grad_enabled():
            return call.backward(x.requires_grad_(), 0, keys_values, None, [seed])
        call.rebuild(x, 0, keys_values)
        return [keys_values.keys, keys_values.values]

    def _run(self, x: torch.Tensor, tile: Tile, given: dict[str, Any] | None = None) -> torch.Tensor:
        self._before(tile.start - self._first, tile.stop - self._first)
        tile.scheme = self._scheme
        given = self._arguments if given is None else given
        arguments = {name: self._cut(name, value, tile) for name, value in given.items()}
        if tile.keys_values is not None:
            arguments[self._cache_name] = tile
            arguments["use_cache"] = True
        if self._attends:
            arguments["attention_mask"] = tile
        out = self._forward(x, **arguments)
        return out[0] if isinstance(out, tuple) else out

    def _cut(self, name: str, value: Any, tile: Tile) -> Any:
        start, stop, num_tokens = (at - self._first for at in (tile.start, tile.stop, self.layout.num_tokens))
        if (start, stop) == (0, num_tokens):
            return value
        if name not in SLICED:
            if isinstance(value, torch.Tensor) and num_tokens in value.shape[1:2]:
                raise AnatomyError(
                    f"{type(self.layer).__name__} takes a tensor {name!r} of {num_tokens} tokens, and it "
                    "is not known how to cut it; use the plan recompute."
                )
            return value
        if isinstance(value, tuple):
            return tuple(self._cut(name, part, tile) for part in value)
        if isinstance(value, torch.Tensor):
            return value[start:stop] if value.dim() == 1 else value[:, start:stop]
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
