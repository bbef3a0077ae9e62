"""What a projection's value reaches: whether backward, or a later tile, ever looks at it.

One run of a layer with every tensor marked by the projections that its value follows from; what backward saves, what
the layer hands to its cache, and what Python asks for is read. Marks follow from which operators were run on what, not
from values, so that a projection which these tokens did not meet counts as read. For a trial: each operator takes some
microseconds longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Reach(TorchDispatchMode):
    """Follows the values of a layer's linear projections while it is entered.

    Args:
        layer: the decoder layer.

    Attributes:
        met: names of the projections that were run.
        read: those whose values somebody looked at.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self._linears = {name: m for name, m in layer.named_modules() if type(m) is torch.nn.Linear}
        self._marks: dict[int, frozenset[str]] = {}
        self._storages: list[Any] = []  # so that no number is given twice
        self.met: set[str] = set()
        self.read: set[str] = set()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what is run inside."""
        hooks = [m.register_forward_hook(partial(self._begin, name)) for name, m in self._linears.items()]
        try:
            with saved_tensors_hooks(self._save, lambda t: t), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def look_at(self, tensors: Iterable[torch.Tensor]) -> None:
        """Somebody reads ``tensors``."""
        for t in tensors:
            self.read |= self._mark(t)

    @property
    def unread(self) -> frozenset[str]:
        """Projections that were run and whose values nobody read."""
        return frozenset(self.met - self.read)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
        marks = frozenset().union(*map(self._mark, given))
        if marks:
            made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            if not made or torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:  # type: ignore[attr-defined]
                self.read |= marks
            for t in made:
                self._add(t, marks)
        return out

    def _begin(self, name: str, _: Any, __: Any, out: torch.Tensor) -> None:
        self.met.add(name)
        self._add(out, frozenset({name}))

    def _save(self, t: torch.Tensor) -> torch.Tensor:
        self.look_at([t])
        return t

    def _mark(self, t: torch.Tensor) -> frozenset[str]:
        return self._marks.get(t.untyped_storage()._cdata, frozenset())

    def _add(self, t: torch.Tensor, marks: frozenset[str]) -> None:
        storage = t.untyped_storage()
        self._storages.append(storage)
        self._marks[storage._cdata] = self._marks.get(storage._cdata, frozenset()) | marks
