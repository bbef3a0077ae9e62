"""AdamW whose moments are not stored but rebuilt each step from a sketch: an eighth of the bytes, with some error.

For a matrix of m x n weights, n the longer side, AdamW keeps 2 m n numbers; kept here are (k + 1)(m + n), k = m / 4:
at rank 16 and n = 4,096 that is 5 x 4,112 numbers for 65,536 weights, 1.3 bytes a weight instead of 8.

- First moment: its k main directions, P [m, k] C [k, n] (momentum compressed as in MLorc, arXiv:2506.01897). Each step
  rebuilds M = b1 P C + (1 - b1) G and compresses it by one round of subspace iteration that starts from the last
  directions: P = qr(M C'), C = P' M. What is lost of M is near to the least that k directions can lose. In its place
  stands what the step's own gradient has outside of them: the step is P C + (G - P P' G), with momentum along the main
  directions and without it along the others, where it is Adafactor's.
- Second moment: means of rows and columns, V = r c' / mean(r) (Adafactor, arXiv:1804.04235): exact where the squared
  gradient has rank 1, otherwise its best approximation in the sense of the I-divergence.

Vectors and matrices too small to gain keep both moments whole. One tensor is at full size at a time.
"""

from __future__ import annotations

from typing import Any

import torch

KEPT_SHARE = 4
"""One direction in four is kept."""


class RebuiltAdamW(torch.optim.Optimizer):
    """AdamW (decoupled decay, bias correction) on sketched moments."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step over all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, weight: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = 0
            state |= _empty_sketch(weight)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        moments = _sketched if "basis" in state else _whole
        first, second = moments(state, grad, beta1, beta2)  # without bias
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(first, second.sqrt_().add_(group["eps"]), value=-group["lr"])


def _empty_sketch(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rank = min(weight.shape) // KEPT_SHARE if weight.dim() == 2 else 0
    if rank == 0:
        return {"first": torch.zeros_like(weight), "second": torch.zeros_like(weight)}
    rows, columns = weight.shape
    return {
        "basis": weight.new_zeros(rows, rank),
        "coefficients": weight.new_zeros(rank, columns),
        "row_means": weight.new_zeros(rows),
        "column_means": weight.new_zeros(columns),
    }


def _whole(state: dict[str, Any], grad: torch.Tensor, beta1: float, beta2: float) -> tuple[torch.Tensor, torch.Tensor]:
    state["first"].lerp_(grad, 1 - beta1)
    state["second"].lerp_(grad.square(), 1 - beta2)
    return state["first"] / (1 - beta1 ** state["step"]), state["second"] / (1 - beta2 ** state["step"])


def _sketched(
    state: dict[str, Any], grad: torch.Tensor, beta1: float, beta2: float
) -> tuple[torch.Tensor, torch.Tensor]:
    basis, coefficients, rows, columns = (
        state[name] for name in ("basis", "coefficients", "row_means", "column_means")
    )
    moment = (basis @ coefficients).lerp_(grad, 1 - beta1)  # [rows, columns]
    basis.copy_(torch.linalg.qr(moment @ coefficients.T).Q)
    coefficients.copy_(basis.T @ moment)
    along = coefficients / (1 - beta1 ** state["step"]) - basis.T @ grad
    square = grad.square()
    rows.lerp_(square.mean(1), 1 - beta2)
    columns.lerp_(square.mean(0), 1 - beta2)
    mean = rows.mean().clamp(min=torch.finfo(grad.dtype).tiny) * (1 - beta2 ** state["step"])
    return torch.addmm(grad, basis, along), torch.outer(rows / mean, columns)
