"""Outputs that nobody reads: projections that a second run of a layer may leave out.

When backward recomputes a layer, the value of its last projection goes into the layer's output and nowhere else; that
output is known to the next layer, and no gradient needs it. And when keys and values are rebuilt, nobody asks for the
queries. A twelfth of a Llama layer's products and two thirds of a rebuilding. Which projections these are follows from
the graph (``reach.py``) and stands in the layer's contract. Exact; no bytes, no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.nn import functional as F

from narrowboat.model.forwards import forward_of

Again = Literal["recomputed", "rebuilt"]
INSIDE_ADAPTER = (".base_layer", ".lora_")


class Unread:
    """The projections of one layer, and which of them are left out right now.

    Args:
        layer: the decoder layer.
        names: of those that nobody reads when it is recomputed, and when its keys are rebuilt.
    """

    def __init__(self, layer: torch.nn.Module, names: Mapping[str, frozenset[str]]) -> None:
        linears = ((name, m) for name, m in layer.named_modules() if type(m) is torch.nn.Linear)
        plain = {name: m for name, m in linears if type(m.weight) is torch.nn.Parameter}  # not a quantised one
        self._linears = {name: m for name, m in plain.items() if any(_root(name) in some for some in names.values())}
        self._left_out: frozenset[str] = frozenset()
        rebuilt = {name for name in self._linears if _root(name) in names.get("rebuilt", ())}
        recomputed = {
            name
            for name, linear in self._linears.items()
            if _root(name) in names.get("recomputed", ())
            and not any(p.requires_grad for p in linear.parameters())
            and not getattr(layer.get_submodule(_root(name)), "lora_variant", None)  # DoRA's reads its base's
        }
        self._names: dict[str, frozenset[str]] = {"rebuilt": frozenset(rebuilt), "recomputed": frozenset(recomputed)}

    def put_on(self, undo: ExitStack) -> None:
        """Replace the projections' forwards until ``undo`` closes."""
        for name, linear in self._linears.items():
            undo.enter_context(forward_of(linear, Projection(linear, partial(self._is_left_out, name))))

    @contextmanager
    def left_out(self, how: Again) -> Iterator[None]:
        """Leave out what nobody reads while the layer is recomputed, or else while its keys are rebuilt."""
        self._left_out = self._names[how]
        try:
            yield
        finally:
            self._left_out = frozenset()

    def _is_left_out(self, name: str) -> bool:
        return name in self._left_out


class Projection:
    """Stands for a linear layer's forward.

    Args:
        linear: the layer.
        is_left_out: whether the product need not be made right now.
    """

    def __init__(self, linear: torch.nn.Linear, is_left_out: Any) -> None:
        self._linear, self._own_forward, self._is_left_out = linear, linear.forward, is_left_out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return _LeftOut.apply(x, self._linear.weight) if self._is_left_out() else self._own_forward(x)

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The same with another weight, without a graph."""
        return _zeros(x, weight) if self._is_left_out() else F.linear(x, weight, bias)


class _LeftOut(torch.autograd.Function):
    """A linear map whose value is not computed; its gradient is."""

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight)
        return _zeros(x, weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (weight,) = ctx.saved_tensors
        return F.linear(grad, weight.t()), None


def _zeros(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_zeros((*x.shape[:-1], weight.shape[0]))


def _root(name: str) -> str:
    """The name of the projection that ``name`` is, or is a part of the adapter of."""
    return next((name.partition(part)[0] for part in INSIDE_ADAPTER if part in name), name)
