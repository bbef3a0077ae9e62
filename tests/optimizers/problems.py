"""A small problem with adapters of real shapes: matrices large enough to be quantised, small ones, and a vector."""

from collections.abc import Callable

import torch

from narrowboat.optimizers import driving
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import OptimizerOptions


class Problem:
    """A target to fit by B A x scaled by a magnitude."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(64, 576, generator=random)
        self.targets = torch.randn(64, 192, generator=random)
        self.weights = {
            "layer.lora_A.default.weight": torch.nn.Parameter(torch.randn(16, 576, generator=random) * 0.05),
            "layer.lora_B.default.weight": torch.nn.Parameter(torch.zeros(192, 16)),
            "layer.lora_magnitude_vector.default.weight": torch.nn.Parameter(torch.ones(192)),
        }

    def build(self, tell: Callable = lambda event: None, **options) -> torch.optim.Optimizer:
        return build_optimizer(OptimizerOptions(**options), self.weights.items(), tell)

    def loss(self) -> torch.Tensor:
        a, b, magnitude = self.weights.values()
        return ((self.inputs @ a.T @ b.T * magnitude - self.targets) ** 2).mean()

    def gradients(self) -> None:
        for weight in self.weights.values():
            weight.grad = None
        self.loss().backward()

    def steps(self, optimizer: torch.optim.Optimizer, num_steps: int, rate: float = 1e-3) -> float:
        """Take steps; the loss afterwards."""
        for _ in range(num_steps):
            driving.set_rate(optimizer, rate)
            self.gradients()
            driving.step(optimizer, self.gradients)
        return self.loss().item()

    def copy(self) -> "Problem":
        """Another one with the same weights."""
        other = Problem()
        for name, weight in self.weights.items():
            other.weights[name].data.copy_(weight.data)
        return other

    def bits(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self.weights.values()]
