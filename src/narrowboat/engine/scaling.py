"""Dynamic loss scaling: float16 gradients kept clear of both ends of what float16 can hold.

float16 loses what is below 6e-8 and rounds coarsely below 6e-5; gradients of a mean over thousands of tokens live
there. So the loss's gradient starts at ``value`` instead of 1 and the adapters' float32 gradients are divided by it:
exact, but for what no longer is lost. Where something overflows, the step is not taken and the scale halved; after
``growth_steps`` good steps it is doubled. No memory, no time (Micikevicius et al., arXiv:1710.03740).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowboat.errors import OptionError
from narrowboat.options.schema import OptimizerOptions


@dataclass
class LossScale:
    """The scale and how long it has been good.

    Attributes:
        value: what gradients are multiplied by.
        growth_steps: good steps in a row after which it is doubled.
        num_good: good steps in a row so far.
    """

    value: float
    growth_steps: int
    num_good: int = 0

    def update(self, is_finite: bool) -> None:
        """Learn how a step went."""
        self.num_good = self.num_good + 1 if is_finite else 0
        if not is_finite:
            self.value = max(1.0, self.value / 2)
        elif self.num_good >= self.growth_steps:
            self.value, self.num_good = self.value * 2, 0


def loss_scale(options: OptimizerOptions, dtype: torch.dtype) -> LossScale | None:
    """The scale to begin with where products are made in ``dtype``; None where none is needed or wanted.

    Raises:
        OptionError: for adalomo in float16, which has taken half of a step before the other half overflows.
    """
    if dtype != torch.float16:
        return None
    if options.name == "adalomo":
        raise OptionError(
            "optimizer.name: adalomo does not go with float16: a step that overflows could not be taken back. "
            "Set model.dtype: bfloat16 or float32, or optimizer.name: adafactor."
        )
    return LossScale(options.loss_scale, options.loss_scale_steps) if options.loss_scale else None
