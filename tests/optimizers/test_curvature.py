"""Hutchinson's estimate from differences of gradients."""

import torch

from narrowboat.optimizers import curvature


def test_it_is_the_diagonal_of_a_known_hessian():
    curvatures = torch.tensor([1.0, 10.0, 0.1, 0.0])
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 4.0]))

    def gradients() -> None:
        weight.grad = None
        (0.5 * curvatures * weight**2).sum().backward()

    gradients()
    before, gradient = weight.detach().clone(), weight.grad
    (diagonal,) = curvature.estimate([weight], gradients, seed=0)
    assert torch.allclose(diagonal, curvatures, atol=5e-3)  # exact for a diagonal Hessian, but for rounding
    assert torch.equal(weight, before) and weight.grad is gradient


def test_the_mean_of_many_estimates_is_the_diagonal():
    torch.manual_seed(0)
    root = torch.randn(8, 8)
    hessian = root @ root.T
    weight = torch.nn.Parameter(torch.zeros(8))

    def gradients() -> None:
        weight.grad = None
        (0.5 * weight @ hessian @ weight).backward()

    gradients()
    mean = torch.stack([curvature.estimate([weight], gradients, seed)[0] for seed in range(400)]).mean(0)
    assert torch.allclose(mean, hessian.diag(), rtol=0.25)
