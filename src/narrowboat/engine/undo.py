"""An update that fails half-way is taken back: weights and states as they were, copied to host memory before it.

An optimizer moves its tensors group by group; memory may run out between two of them. The copies cost 12 bytes a
trainable weight of host memory (with AdamW) and as long as copying takes: milliseconds beside a step's seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from narrowboat.memory.meter import OPTIMIZER_STATES, cause


class Undo:
    """Remembers what an optimizer is about to change.

    Args:
        weights: the trainable parameters.
        optimizer: whose states and settings are remembered too.
    """

    @torch.no_grad()
    def __init__(self, weights: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        with cause(OPTIMIZER_STATES, "host"):
            self._weights = [(weight, _copy(weight.detach())) for weight in weights]
            self._states = {p: {k: _copy(v) for k, v in state.items()} for p, state in optimizer.state.items()}
            self._groups = [
                {key: _copy(value) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]

    @torch.no_grad()
    def take_back(self) -> None:
        """Make it all as it was."""
        for weight, saved in self._weights:
            weight.copy_(saved)
        for parameter, state in self._optimizer.state.items():
            _put_back(state, self._states.get(parameter, {}))
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            _put_back(group, saved | {"params": group["params"]})


def _put_back(into: dict[str, Any], saved: dict[str, Any]) -> None:
    for key in [key for key in into if key not in saved]:
        del into[key]
    for key, value in saved.items():
        if isinstance(value, torch.Tensor) and isinstance(into.get(key), torch.Tensor):
            into[key].copy_(value)
        else:
            into[key] = value


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)
