"""Trainable weights of 16 bits get a float32 master: what learns is the master, what computes is its 16-bit copy.

A step is smaller than what 16 bits can tell apart, and float16 gradients cannot be unscaled in place. This is for
weights that are trained whole (biases, norms, embedding, head); adapters are float32 from the start. Price: 4 bytes a
weight, and its 16-bit copy while its module is at work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

HALF = (torch.float16, torch.bfloat16)


def keep_masters(model: nn.Module) -> int:
    """Put float32 masters in the place of trainable 16-bit weights; how many those were. What is tied stays tied."""
    masters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        halves = {n: p for n, p in module._parameters.items() if p is not None and p.requires_grad and p.dtype in HALF}
        for name, half in halves.items():
            module._parameters[name] = masters.setdefault(id(half), nn.Parameter(half.detach().float()))
        if halves:
            _compute_in_half(module, {name: half.dtype for name, half in halves.items()})
    return sum(master.numel() for master in masters.values())


def _compute_in_half(module: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """While ``module`` runs, its masters' 16-bit copies stand in their place; gradients flow through to the masters."""
    resting: dict[str, Any] = {}

    def begin(module: nn.Module, args: Any) -> None:
        for name, dtype in dtypes.items():
            resting[name] = module._parameters[name]
            module._parameters[name] = resting[name].to(dtype)

    def end(module: nn.Module, args: Any, out: Any) -> None:
        module._parameters.update(resting)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)
