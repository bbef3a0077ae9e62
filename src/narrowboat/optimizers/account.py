"""What an optimizer's states really take: bytes a trainable weight, by kind of state."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from narrowboat.machine.precision import parts_of
from narrowboat.units import format_bytes


@dataclass(frozen=True)
class Share:
    """The weights whose states are of one kind."""

    kind: str
    num_weights: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.kind} {self.num_bytes / self.num_weights:.2f} bytes a weight for {self.num_weights:,}"


def account(optimizer: torch.optim.Optimizer) -> list[Share]:
    """A line for each kind of state, the one with the most weights first; every storage is counted once."""
    weights: dict[str, int] = defaultdict(int)
    num_bytes: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    for parameter, state in optimizer.state.items():
        parts = [part for value in state.values() if isinstance(value, torch.Tensor) for part in parts_of(value)]
        kind = _kind(parameter, state, parts)
        weights[kind] += parameter.numel()
        for part in parts:
            storage = part.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                num_bytes[kind] += storage.nbytes()
    return [Share(kind, weights[kind], num_bytes[kind]) for kind in sorted(weights, key=lambda kind: -weights[kind])]


def describe(shares: list[Share]) -> str:
    """One line for people."""
    total = sum(share.num_bytes for share in shares)
    return f"optimizer states take {format_bytes(total)}: " + "; ".join(map(str, shares))


def _kind(parameter: torch.Tensor, state: dict[str, Any], parts: list[torch.Tensor]) -> str:
    wrapped = {type(value).__name__ for value in state.values() if is_traceable_wrapper_subclass(value)}
    for name in wrapped:  # OptimState8bit, OptimState4bit, OptimStateFp8
        return {"8bit": "8-bit", "4bit": "4-bit", "Fp8": "float8"}.get(name.removeprefix("OptimState"), name)
    if any(part.dtype == torch.uint8 and part.numel() == parameter.numel() for part in parts):
        return "8-bit"
    if "basis" in state:
        return "rebuilt"
    num_full = sum(part.numel() == parameter.numel() and part.dtype == torch.float32 for part in parts)
    return "float32" if num_full else "factored"
