"""One kind of layer, tried: with our attention or its own, in tiles behind earlier ones or only whole.

A layer runs as it would in plain autograd, and then as ``layer_call.py`` would call it, under one contract after the
other, the fastest first. The first one that gives the same output and the same gradients is kept; a layer that no tile
can run stays whole, and why is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch

from narrowboat.errors import first_line
from narrowboat.memory.arguments import MAPPINGS, replaced
from narrowboat.memory.attention import Switch
from narrowboat.memory.capture import Called
from narrowboat.memory.contract import LayerContract
from narrowboat.memory.dropout import PlacedFunctions, Whereabouts
from narrowboat.memory.layer_call import MASK, LayerCall
from narrowboat.memory.layer_stream import stream_layer
from narrowboat.memory.layout import Layout
from narrowboat.memory.reach import Reach
from narrowboat.memory.recompute import recompute_layer
from narrowboat.memory.surroundings import Surroundings
from narrowboat.model.anatomy import DecoderLayer
from narrowboat.owner.inputs import OnDevice

TOLERANCE = 2e-5
TILE_TOKENS = 5

Way = Callable[[LayerCall], list[torch.Tensor]]
"""Runs a layer: its outputs."""


class Failed(Exception):
    """Something that was tried is not right; the message says what."""


@dataclass(frozen=True)
class LayerTrial:
    """Tries one layer.

    Attributes:
        layer: of the kind that is tried.
        switch: says which attention it uses.
        plain: how plain autograd called it, with eager attention.
        ours: how the backbone calls it where masks are left to us.
        own: how it calls it with the masks that its own attention wants.
        own_mask: the format of these; None if there are none.
        layout: the batch's documents.
        eager: a context in which attention is eager.
    """

    layer: DecoderLayer
    switch: Switch
    plain: Called
    ours: Called
    own: Called
    own_mask: torch.dtype | None
    layout: Layout
    eager: Callable[[], AbstractContextManager[None]]

    def contract(self, first: LayerContract) -> LayerContract:
        """The contract under which the layer is right; ``first`` is what was seen of it.

        Raises:
            Failed: there is none, not even for whole rows.
        """
        truth = self._plain()
        attention = self._attention(first, truth)
        if attention.tiles == "none":  # tokens are folded
            return attention
        reasons = []
        for candidate in self._ways_to_tile(attention):
            try:
                counted = replace(candidate, num_writes=self._num_writes(candidate))
                self._compare(counted, lambda call: stream_layer(call, TILE_TOKENS, OnDevice(), False), truth)
            except Exception as error:  # of whatever the layer's own code makes of a tile
                reasons.append(first_line(error))
            else:
                return replace(counted, unread=self._unread(counted))
        whole = replace(attention, tiles="none", why=reasons[0])
        return replace(whole, unread=self._unread(whole))

    def _attention(self, first: LayerContract, truth: list[torch.Tensor]) -> LayerContract:
        """Ours, or its own with the mask in one form or another."""
        reasons = []
        for candidate in self._kinds_of_attention(first):
            try:
                self._compare(candidate, lambda call: recompute_layer(call, OnDevice()), truth)
            except Exception as error:  # of whatever the layer's own code makes of our attention
                reasons.append(first_line(error))
            else:
                return candidate
        raise Failed(reasons[-1])

    def _kinds_of_attention(self, first: LayerContract) -> Iterator[LayerContract]:
        yield replace(first, attention="ours")
        if self.own_mask is not None and self.ours.arguments.get(MASK) is None:
            yield replace(first, attention="own", masks="bool" if self.own_mask == torch.bool else "additive")
        yield replace(first, attention="own")

    def _ways_to_tile(self, attention: LayerContract) -> Iterator[LayerContract]:
        """Arguments that count keys may be those that layers leave for one another, or biases of scores."""
        one = {path for path, dims in attention.dims.items() if len(dims) == 1}
        left = frozenset(path for path in one if isinstance(self.ours.arguments.get(path[0]), MAPPINGS))
        biases = frozenset(path for path in one if attention.dims[path][0] == len(self.ours.given.get(path, ())) - 1)
        for tiles in ("buffer", "joined") if attention.attention == "ours" else ("joined",):
            for keyed in dict.fromkeys((frozenset(), left, biases, left | biases)):
                yield replace(attention, tiles=tiles, keyed=keyed)

    def _call(self, contract: LayerContract, x: torch.Tensor) -> LayerCall:
        given = self.own if contract.attention == "own" and not contract.masks else self.ours
        masks = {MASK: given.arguments[MASK]} if MASK in given.arguments else {}
        around = Surroundings(self.layout, window=self.layer.window, chunk=self.layer.chunk)
        arguments = _copied(self.plain.arguments) | masks
        return LayerCall(self.layer.module, self._forward(contract), x, arguments, contract, around)

    def _forward(self, contract: LayerContract) -> Callable[..., Any]:
        own_forward, is_ours = self.layer.module.forward, contract.attention == "ours"

        @wraps(own_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.switch(is_ours), PlacedFunctions(Whereabouts(is_off=True)):
                out = own_forward(*args, **kwargs)
            if is_ours and not kwargs[MASK].was_attended:
                raise Failed("its attention does not go through transformers' attention interface")
            return out

        return forward

    def _plain(self) -> list[torch.Tensor]:
        """Output and gradients of plain autograd."""
        with self.eager(), PlacedFunctions(Whereabouts(is_off=True)):
            return self._outcome(lambda x: _first_of(self.layer.module(x, **_copied(self.plain.arguments))))

    def _compare(self, contract: LayerContract, way: Way, truth: list[torch.Tensor]) -> None:
        mine = self._outcome(lambda x: way(self._call(contract, x))[0].movedim(1, contract.token_dim))
        worst = max(difference(a, b) for a, b in zip(mine, truth, strict=True))
        if not worst <= TOLERANCE:
            raise Failed(f"outputs or gradients are others than plain autograd's, by {worst:.1e}")

    def _outcome(self, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        x = self.plain.x.detach().clone().requires_grad_()
        out = run(x)
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        parameters = [p for p in self.layer.module.parameters() if p.requires_grad]
        found = torch.autograd.grad(out, [x, *parameters], seed, allow_unused=True)
        zeros = [torch.zeros_like(t) if g is None else g for t, g in zip([x, *parameters], found, strict=True)]
        return [out.detach(), zeros[0], torch.cat([g.flatten() for g in zeros[1:]] or [torch.zeros(1)])]

    def _num_writes(self, contract: LayerContract) -> int:
        """How often a tile hands something to the cache."""
        call = self._call(contract, self.plain.x)
        with torch.no_grad():
            call.tile(_first_tile(call), 0, call.past())
        return call.num_written

    def _unread(self, contract: LayerContract) -> dict[str, frozenset[str]]:
        """The projections that nobody reads."""
        recomputed, rebuilt = Reach(self.layer.module), Reach(self.layer.module)
        call = self._call(contract, self.plain.x.detach().clone().requires_grad_())
        past = call.past(for_backward=True)
        with recomputed.following():
            if contract.tiles == "none":
                call.whole(call.inputs)
            else:
                call.tile(_first_tile(call), 0, past)
        recomputed.look_at(past.tensors())
        if contract.tiles == "none" or not contract.num_writes:
            return {"recomputed": recomputed.unread}
        past = call.past(for_backward=True)
        with rebuilt.following():
            call.rebuild(_first_tile(call), 0, past)
        rebuilt.look_at(past.tensors())
        return {"recomputed": recomputed.unread, "rebuilt": rebuilt.unread}


def _first_tile(call: LayerCall) -> list[torch.Tensor]:
    return [call.inputs[0][:, :TILE_TOKENS], *call.cut(0, TILE_TOKENS)]


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same with mappings of its own, in which a layer may leave something."""
    copied: dict[str, Any] = replaced(arguments, lambda _, t: t)
    return copied


def _first_of(out: Any) -> torch.Tensor:
    first: torch.Tensor = out[0] if isinstance(out, (tuple, list)) else out
    return first


def difference(mine: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative to ``truth``; not a number where ``mine`` is none."""
    scale = float(truth.norm())
    return float((mine - truth).norm()) / scale if scale else float(mine.norm())
