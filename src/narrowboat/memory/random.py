"""Random numbers that somebody draws: each operator that takes some says so, however seldom they make a difference.

For a trial: each operator takes some microseconds longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Random(TorchDispatchMode):
    """Watches while it is entered.

    Attributes:
        operators: names of those that drew; attention, which draws only for its dropout, is not among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func):  # type: ignore[attr-defined]
            self.operators.add(str(func))
        return func(*args, **(kwargs or {}))
