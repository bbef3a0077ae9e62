"""What is used of PyTorch's insides: names without a promise, all of them here, each looked at by a canary test.

After an upgrade of PyTorch ``tests/machine/test_inner_torch.py`` says which of them broke.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.utils._python_dispatch import _disable_current_modes


def without_modes() -> AbstractContextManager[object]:
    """A context without fake tensors, meters and the like: real tensors are computed with inside."""
    context: AbstractContextManager[object] = _disable_current_modes()
    return context
