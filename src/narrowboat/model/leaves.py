"""The plain tensors that a module's frozen weights are made of, whatever they are held in, and where each one hangs.

A weight of bitsandbytes is codes and scales beside it, one of torchao a tensor made of tensors. Whoever moves weights
or counts their bytes wants the plain tensors behind them, and wants to put others in their place. One tensor may hang
in several places (bitsandbytes holds the same 8-bit codes as a weight and as a product's state): unless it is replaced
in all of them, its memory stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from narrowboat.model.packed import PackedLinear


@dataclass(frozen=True, eq=False)
class Leaf:
    """One plain tensor; ``hangs`` are the owners and attributes through which it is reached."""

    hangs: tuple[tuple[Any, str], ...]

    @property
    def tensor(self) -> torch.Tensor:
        """What hangs there now; to keep it when another takes its place, detach it."""
        # to look at a parameter's .data would be an operator
        found = (owner if name == "data" else getattr(owner, name) for owner, name in self.hangs)
        tensor: torch.Tensor = next(tensor for tensor in found if tensor is not None)
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Let ``tensor`` hang there."""
        for owner, name in self.hangs:
            setattr(owner, name, tensor)


def frozen_leaves(module: nn.Module, seen: set[int]) -> Iterator[Leaf]:
    """The leaves of ``module``'s frozen parameters that are not in ``seen`` yet; their ids are added to it."""
    for part in module.modules():
        is_packed = isinstance(part, PackedLinear)
        for parameter in part.parameters(recurse=False):
            if not parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield from leaves_of(parameter, part)
                if is_packed:  # a forecast's, whose scales are buffers
                    yield from (Leaf(((part, name),)) for name, _ in part.named_buffers(recurse=False))


def leaves_of(parameter: torch.Tensor, layer: Any = None) -> Iterator[Leaf]:
    """The leaves of one parameter; ``layer`` is the module that it belongs to, which may hold some of them as well."""
    if is_traceable_wrapper_subclass(parameter):  # torchao's
        yield from _inner(parameter)
        return
    if hasattr(parameter, "SCB"):
        yield from _of_8_bits(parameter, getattr(layer, "state", None))
        return
    yield Leaf(((parameter, "data"),))
    state: Any = getattr(parameter, "quant_state", None)
    while state is not None:  # scales of 4-bit codes may be packed themselves
        for name, value in vars(state).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                yield Leaf(((state, name),))
        state = getattr(state, "state2", None)


def _of_8_bits(parameter: Any, state: Any) -> Iterator[Leaf]:
    """Codes of bitsandbytes and a scale for each row, which its first product hands on to the layer's ``state``."""
    holders = [holder for holder in (parameter, state) if holder is not None]
    if all(holder.CB is None for holder in holders):
        yield Leaf(((parameter, "data"),))
        return
    yield Leaf(((parameter, "data"), *((holder, "CB") for holder in holders)))
    yield Leaf(tuple((holder, "SCB") for holder in holders))


def _inner(tensor: Any) -> Iterator[Leaf]:
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if is_traceable_wrapper_subclass(part):
            yield from _inner(part)
        else:
            yield Leaf(((tensor, name),))
