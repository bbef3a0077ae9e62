"""Outputs that nobody reads: projections that a second run of a layer may leave out.

When backward recomputes a layer, the value of its last projection goes into the layer's output and nowhere else; that
output is known to the next layer, and no gradient needs it. And when keys and values are rebuilt, nobody asks for the
queries. A twelfth of a Llama layer's products and two thirds of a rebuilding. Which projections these are is not
guessed from names: a few tokens run through the layer with a projection's output replaced by NaN, and if all gradients
(or keys and values) stay what they were, nobody reads it. Exact; no bytes; one probe of some milliseconds for each kind
of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.nn import functional as F

from narrowboat.model.forwards import forward_of

Outcome = Sequence[torch.Tensor | None]


class Unread:
    """The projections of one layer, and which of them are left out right now.

    Args:
        layer: the decoder layer.
        known: what was found out about layers of each kind; shared by the layers of a model.
    """

    def __init__(self, layer: torch.nn.Module, known: dict[Hashable, frozenset[str]]) -> None:
        linears = ((name, m) for name, m in layer.named_modules() if type(m) is torch.nn.Linear)
        self._linears = {name: m for name, m in linears if type(m.weight) is torch.nn.Parameter}  # not a quantised one
        trained = tuple((name, m.weight.requires_grad) for name, m in self._linears.items())
        self._kind, self._known = (type(layer), trained), known
        self._left_out: frozenset[str] = frozenset()
        self._poisoned: str | None = None

    def put_on(self, undo: ExitStack) -> None:
        """Replace the projections' forwards until ``undo`` closes."""
        for name, linear in self._linears.items():
            undo.enter_context(forward_of(linear, Projection(linear, partial(self._value_instead, name))))

    @contextmanager
    def left_out(self, recomputing: bool, probe: Callable[[], Outcome]) -> Iterator[None]:
        """Leave out what nobody reads while the layer is recomputed, or else while keys and values are rebuilt.

        ``probe`` does the same with a few tokens, always the same, and gives what is wanted: gradients, or keys and
        values.
        """
        key = (self._kind, recomputing)
        if key not in self._known:
            truth = probe()
            candidates = (n for n, linear in self._linears.items() if not (recomputing and linear.weight.requires_grad))
            self._known[key] = frozenset(name for name in candidates if self._is_unread(name, truth, probe))
        self._left_out = self._known[key]
        try:
            yield
        finally:
            self._left_out = frozenset()

    def _is_unread(self, name: str, truth: Outcome, probe: Callable[[], Outcome]) -> bool:
        self._poisoned = name
        try:
            return all(map(_same, probe(), truth))
        finally:
            self._poisoned = None

    def _value_instead(self, name: str) -> float | None:
        if name in self._left_out:
            return 0.0
        return torch.nan if name == self._poisoned else None


class Projection:
    """Stands for a linear layer's forward.

    Args:
        linear: the layer.
        value_instead: what fills the output right now; None where the product is to be made.
    """

    def __init__(self, linear: torch.nn.Linear, value_instead: Callable[[], float | None]) -> None:
        self._linear, self._own_forward, self._value_instead = linear, linear.forward, value_instead

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        value = self._value_instead()
        return self._own_forward(x) if value is None else _LeftOut.apply(x, self._linear.weight, value)

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The same with another weight, without a graph."""
        value = self._value_instead()
        return F.linear(x, weight, bias) if value is None else _filled(x, weight, value)


class _LeftOut(torch.autograd.Function):
    """A linear map whose value is not computed; its gradient is."""

    @staticmethod
    def forward(ctx, x, weight, value):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight)
        return _filled(x, weight, value)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (weight,) = ctx.saved_tensors
        return F.linear(grad, weight.t()), None, None


def _filled(x: torch.Tensor, weight: torch.Tensor, value: float) -> torch.Tensor:
    return x.new_full((*x.shape[:-1], weight.shape[0]), value)


def _same(mine: torch.Tensor | None, truth: torch.Tensor | None) -> bool:
    if mine is None or truth is None:
        return mine is truth
    return torch.allclose(mine, truth, rtol=1e-3, atol=1e-3 * float(truth.abs().max()))
