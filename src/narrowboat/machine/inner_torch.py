"""What is used of PyTorch's insides: names without a promise, all of them here, each looked at by a canary test.

After an upgrade of PyTorch ``tests/machine/test_inner_torch.py`` says which of them broke.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes


def without_modes() -> AbstractContextManager[object]:
    """A context without fake tensors, meters and the like: real tensors are computed with inside."""
    context: AbstractContextManager[object] = _disable_current_modes()
    return context


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made ``module``, or ``module.compile()`` was called."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def shards_of(parameter: torch.Tensor) -> str:
    """What cut ``parameter`` into shards over processes, of which this process holds one; empty if it is whole."""
    if any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
        return "DTensor"
    if getattr(parameter, "_is_flat_param", False):
        return "FullyShardedDataParallel"
    return "DeepSpeed ZeRO-3" if hasattr(parameter, "ds_id") else ""
