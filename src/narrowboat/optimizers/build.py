"""Optimizers by name: the one door to whatever library holds them.

AdamW in fp32 keeps two moments of 4 bytes for each trainable parameter: 8 bytes beside the weight's 4 and its
gradient's 4. Biases and other vectors are not decayed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from narrowboat.options.schema import OptimizerOptions


def build_optimizer(options: OptimizerOptions, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that ``options`` names, over the trainable ones of ``parameters``."""
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=True,
    )
