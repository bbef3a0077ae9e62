"""Moments rebuilt from a sketch: right where it can hold them, near AdamW elsewhere, at a sixth of the bytes."""

import pytest
import torch

from narrowboat.optimizers.account import account
from narrowboat.optimizers.rebuilt import RebuiltAdamW

from .problems import Problem


def test_it_is_adamw_where_gradients_have_the_rank_of_the_sketch():
    """Gradients u v' with one u and v, up to a factor: both moments stay of rank 1."""
    torch.manual_seed(0)
    mine, theirs = (torch.nn.Parameter(torch.ones(16, 64)) for _ in range(2))
    gradient = torch.outer(torch.rand(16) + 0.5, torch.rand(64) + 0.5)
    ours = RebuiltAdamW([mine], lr=1e-2)
    adamw = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.0)
    for step in range(30):
        mine.grad = gradient * (1 + step % 3)
        theirs.grad = mine.grad.clone()
        ours.step()
        adamw.step()
    assert torch.allclose(1 - mine, 1 - theirs, rtol=0.05)  # the first step has no directions to start from


def test_what_is_lost_is_what_lies_outside_the_main_directions():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(16, 64))
    optimizer = RebuiltAdamW([weight], lr=0.0)
    directions = torch.linalg.qr(torch.randn(16, 16)).Q * torch.logspace(0, -3, 16)  # singular values fall by 1.6 each
    weight.grad = directions @ torch.linalg.qr(torch.randn(64, 16)).Q.T
    for _ in range(40):
        optimizer.step()
    state = optimizer.state[weight]
    first = state["basis"] @ state["coefficients"]
    values = torch.linalg.svdvals(weight.grad)
    best = values[4:].square().sum().sqrt() / values.square().sum().sqrt()
    error = (first / (1 - 0.9**40) - weight.grad).norm() / weight.grad.norm()
    assert best * 0.9 < error < 1.3 * best


def test_its_loss_is_near_adamws_and_its_bytes_a_sixth():
    losses, sizes = {}, {}
    for states in ("device", "rebuilt"):
        problem = Problem()
        optimizer = problem.build(states=states)
        losses[states] = problem.steps(optimizer, 100)
        sizes[states] = sum(share.num_bytes for share in account(optimizer))
    assert losses["rebuilt"] == pytest.approx(losses["device"], rel=0.05)
    assert sizes["rebuilt"] < 0.18 * sizes["device"]


def test_a_matrix_without_gradient_stays_finite():
    weight = torch.nn.Parameter(torch.ones(16, 64))
    optimizer = RebuiltAdamW([weight], lr=1e-2)
    for _ in range(3):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert torch.equal(weight, torch.ones(16, 64))
