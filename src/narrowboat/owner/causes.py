"""What bytes are for, and where they lie: the words in which everybody who counts bytes speaks.

``cause`` says it for what is allocated inside, so the code that allocates names its reason once and knows no counter.
Free while nobody counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

BASE_WEIGHTS = "base weights"
ADAPTERS = "adapters"
GRADIENTS = "gradients"
OPTIMIZER_STATES = "optimizer states"
LAYER_INPUTS = "layer inputs"
KEYS_VALUES = "keys and values"
CARRY = "carried keys and values"
LOSS = "loss"
WORKING_SET = "working set"

Where = Literal["device", "pinned", "host", "disk", "file"]
"""Memory of the device; host memory, page-locked or not; a scratch file; pages of a model's own file."""

_current: ContextVar[tuple[str, Where]] = ContextVar("narrowboat_cause", default=(WORKING_SET, "device"))


@dataclass(frozen=True)
class Holding:
    """A tensor that somebody holds on to, what for, and where it lies."""

    tensor: torch.Tensor
    cause: str
    where: Where = "device"


class Counter(TorchDispatchMode):
    """Counts what is allocated while it is entered."""

    def watch(self, tensor: torch.Tensor, name: str, where: Where = "device") -> None:
        """Count ``tensor`` under ``name`` and as lying ``where`` from here on."""
        raise NotImplementedError


@contextmanager
def cause(name: str, where: Where = "device") -> Iterator[None]:
    """Count what is allocated inside under ``name``, as lying ``where``."""
    token = _current.set((name, where))
    try:
        yield
    finally:
        _current.reset(token)


def current_cause() -> tuple[str, Where]:
    """What is said of an allocation now."""
    return _current.get()


def account(tensor: torch.Tensor, name: str, where: Where = "device") -> None:
    """From here on count ``tensor``, already alive, under ``name`` and as lying ``where``."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Counter):
            mode.watch(tensor, name, where)
