"""Autocast as it was when a layer was called: its second run computes in the formats of the first.

Backward runs after the ``with torch.autocast(...)`` around the forward has been left, and a layer that is run again
then would compute in other formats than it did. Nothing is held but three values; no time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class AsCalled:
    """Remembers autocast for one kind of device; called, gives a context in which it is as it was."""

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self.is_autocast = torch.is_autocast_enabled(self._kind)
        self.dtype = torch.get_autocast_dtype(self._kind) if self.is_autocast else None
        self._caches = torch.is_autocast_cache_enabled()

    def __call__(self) -> AbstractContextManager[object]:
        """A context."""
        if not self.is_autocast and not torch.is_autocast_enabled(self._kind):
            return nullcontext()
        return torch.autocast(self._kind, dtype=self.dtype, enabled=self.is_autocast, cache_enabled=self._caches)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which operators compute in the formats of what they are given."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


def common_format(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in autocast's format, as PyTorch's own attention takes them; without autocast as they are."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) for t in tensors)
