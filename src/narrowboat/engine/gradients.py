"""What becomes of a step batch's gradients: gathered, looked at and then used; or used while backward still runs.

``Gathered``: 4 bytes a trainable weight until the step; the norm of the whole is known before any weight moves, so that
a gradient that is no number changes nothing, and a long one is cut.

``UsedInBackward``: of the last micro-batch's backward no gradient is kept, of a step batch of one micro-batch none at
all. What needs all gradients at once cannot be had (``optimizers/buckets.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from narrowboat.distributed.ranks import Ranks
from narrowboat.engine.undo import Undo
from narrowboat.optimizers import driving
from narrowboat.optimizers.buckets import DuringBackward
from narrowboat.owner.causes import GRADIENTS, OPTIMIZER_STATES, cause
from narrowboat.owner.values import is_true


class Gathered:
    """In the parameters' ``grad``, from ``begin`` until they are used or forgotten.

    Args:
        optimizer: steps with them.
        weights: the trainable parameters.
        clip_norm: largest norm of the whole; 0 leaves it as it is.
        undo: remembers weights and states before they move.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Sequence[torch.nn.Parameter],
        clip_norm: float,
        undo: Undo,
    ) -> None:
        self._optimizer, self._weights, self._clip_norm, self._undo = optimizer, weights, clip_norm, undo

    def begin(self, num_parts: int) -> None:
        """Make room for a step batch that goes backwards in ``num_parts``."""
        with cause(GRADIENTS):
            for weight in self._weights:
                weight.grad = torch.zeros_like(weight)

    def add(self, part: torch.Tensor, so_far: torch.Tensor, scale: float, is_last: bool) -> None:
        """The backward of one part of the loss, times ``scale``; ``so_far`` is the loss up to and with it."""
        part.backward(torch.full_like(part, scale))

    def meet(self, ranks: Ranks) -> None:
        """Sum them over all ranks."""
        ranks.gather(self._present())

    def norm(self, scale: float) -> torch.Tensor:
        """Norm of the whole without ``scale``: one pass, which finds anything not finite in the adapters' gradients."""
        return torch.nn.utils.get_total_norm(self._present(), foreach=True) / scale

    def use(self, norm: torch.Tensor, scale: float, gather: Callable[[], object]) -> None:
        """Step the optimizer; ``gather`` makes the gradients once more at the weights' present values."""

        def again() -> None:
            gather()
            self._unscale(scale)

        self._unscale(scale, norm)
        self._undo.remember()
        with cause(OPTIMIZER_STATES):
            driving.step(self._optimizer, again)

    def forget(self) -> None:
        """Drop those of a step that failed."""
        for weight in self._weights:
            weight.grad = None

    def _unscale(self, scale: float, norm: torch.Tensor | None = None) -> None:
        """Take the scale out and, with their ``norm``, clip: in one pass."""
        factor: float | torch.Tensor = 1 / scale
        if norm is not None and self._clip_norm:
            factor = factor * torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0)
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            torch._foreach_mul_(self._present(), factor)

    def _present(self) -> list[torch.Tensor]:
        return [weight.grad for weight in self._weights if weight.grad is not None]


class UsedInBackward(Gathered):
    """By an optimizer that steps each parameter as soon as its gradient is whole."""

    _optimizer: DuringBackward

    def begin(self, num_parts: int) -> None:
        """See ``Gathered``."""
        self._undo.remember()
        if num_parts > 1:
            super().begin(num_parts)
        else:
            self.forget()

    def add(self, part: torch.Tensor, so_far: torch.Tensor, scale: float, is_last: bool) -> None:
        """See ``Gathered``; a loss that is no number goes no further."""
        if not is_last:
            super().add(part, so_far, scale, is_last)
        elif is_true(torch.isfinite(so_far)):
            with self._optimizer.armed():
                part.backward()

    def norm(self, scale: float) -> torch.Tensor:
        """See ``Gathered``; of those used."""
        return self._optimizer.norm()

    def use(self, norm: torch.Tensor, scale: float, gather: Callable[[], object]) -> None:
        """Step what is left."""
        with cause(OPTIMIZER_STATES):
            driving.step(self._optimizer, gather)

    def forget(self) -> None:
        """See ``Gathered``."""
        super().forget()
        self._optimizer.norm()


def gradients_of(
    optimizer: torch.optim.Optimizer, weights: Sequence[torch.nn.Parameter], clip_norm: float, undo: Undo
) -> Gathered:
    """What suits ``optimizer``."""
    if not isinstance(optimizer, DuringBackward):
        return Gathered(optimizer, weights, clip_norm, undo)
    optimizer.stepping = lambda: cause(OPTIMIZER_STATES)
    return UsedInBackward(optimizer, weights, clip_norm, undo)
