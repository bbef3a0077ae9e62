"""An update that fails half-way is taken back: weights and states as they were, copied to host memory before it.

An optimizer moves its tensors group by group; memory may run out between two of them. The copies cost 12 bytes a
trainable weight of host memory (with AdamW), which is held on to, and as long as copying takes: 1.5 % of a step of
2,048 tokens on a CPU (``benchmarks/governor.py``), less of a longer one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from narrowboat.machine.precision import parts_of, with_parts
from narrowboat.owner.causes import OPTIMIZER_STATES, Holding, cause

HOST = torch.device("cpu")


class Undo:
    """Remembers what an optimizer is about to change.

    Args:
        weights: the trainable parameters.
        optimizer: whose states and settings are remembered too; without one there is nothing to take back.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer | None) -> None:
        self._weights, self._optimizer = weights, optimizer
        self._saved: dict[torch.Tensor, torch.Tensor] = {}
        self._states: dict[torch.Tensor, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        self._is_armed = False

    @torch.no_grad()
    def remember(self) -> None:
        """From here to ``forget`` everything can be taken back."""
        assert self._optimizer is not None
        with cause(OPTIMIZER_STATES, "host"):
            copier = _Copier()
            self._saved = {p: copier.copy(p.detach(), self._saved.get(p)) for p in self._weights}
            self._states = {p: copier.all(s, self._states.get(p, {})) for p, s in self._optimizer.state.items()}
            settings = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
            before = self._groups or [{} for _ in settings]
            self._groups = [copier.all(*both) for both in zip(settings, before, strict=True)]
            copier.finish()
        self._is_armed = True

    @torch.no_grad()
    def take_back(self) -> None:
        """Make it all as it was, if an update is under way."""
        if not self._is_armed or self._optimizer is None:
            return
        for weight, saved in self._saved.items():
            weight.copy_(saved)
        for parameter, state in self._optimizer.state.items():
            _put_back(state, self._states.get(parameter, {}), parameter.device)
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            _put_back(group, settings | {"params": group["params"]}, HOST)

    def forget(self) -> None:
        """The update is done, or taken back; the copies' memory waits for the next one."""
        self._is_armed = False

    def holdings(self) -> Iterator[Holding]:
        """The copies."""
        for value in (*self._saved.values(), *(v for state in self._states.values() for v in state.values())):
            if isinstance(value, torch.Tensor):
                yield Holding(value, OPTIMIZER_STATES, "host")

    def copies_of(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """What is held for ``parameter``."""
        values = [self._saved.get(parameter), *self._states.get(parameter, {}).values()]
        return [value for value in values if isinstance(value, torch.Tensor)]


def _put_back(into: dict[str, Any], saved: dict[str, Any], device: torch.device) -> None:
    for key in [key for key in into if key not in saved]:
        del into[key]
    for key, value in saved.items():
        if not isinstance(value, torch.Tensor):
            into[key] = value
        elif isinstance(into.get(key), torch.Tensor):
            for part, before in zip(parts_of(into[key]), parts_of(value), strict=True):
                part.copy_(before)
        else:  # ours takes the next copies
            at = device if value.dim() else HOST  # a counter stays where it was
            into[key] = with_parts(value, partial(torch.Tensor.to, device=at, copy=True))


class _Copier:
    """Copies into host memory, into that of an earlier copy where it has the same shape: those all in one go."""

    def __init__(self) -> None:
        self._into: list[torch.Tensor] = []
        self._from: list[torch.Tensor] = []

    def all(self, values: dict[str, Any], into: dict[str, Any]) -> dict[str, Any]:
        return {key: self.copy(value, into.get(key)) for key, value in values.items()}

    def copy(self, value: Any, into: Any = None) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        value = value.detach()
        if type(value) is not type(into) or (value.shape, value.dtype) != (into.shape, into.dtype):
            return with_parts(value, partial(torch.Tensor.to, device=HOST, copy=True))
        self._into += parts_of(into)
        self._from += parts_of(value)
        return into

    def finish(self) -> None:
        if self._into:
            torch._foreach_copy_(self._into, self._from)
