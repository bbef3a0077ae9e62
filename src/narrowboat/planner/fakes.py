"""Fake tensors that remember: what an operator made of some shapes is not worked out again.

A fake tensor has a shape and no memory. PyTorch's own mode spends about 0.2 ms on an operator; a step repeats the same
few operators on the same few shapes for every tile and layer, so a look-up replaces it: a third of the time, the same
tensors. Views stay views of the same storage, which the meter counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_DEVICE = torch.ops.prim.device.default
_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
_EFFICIENT_BACKWARD = torch.ops.aten._efficient_attention_backward.default
_UNSTEADY = {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Operators whose result does not follow from shapes alone, or that change an argument's shape."""


@dataclass(frozen=True)
class _Same:
    """The result is an argument itself."""

    argument: int


@dataclass(frozen=True)
class _View:
    """The result shares an argument's storage, ``offset`` elements further on."""

    argument: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _New:
    """The result is a tensor of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_Recipe = tuple[type | None, list[_Same | _View | _New]]


class RememberingFakeMode(FakeTensorMode):
    """A ``FakeTensorMode`` with a shorter way for what it has seen before."""

    def __init__(self) -> None:
        super().__init__()
        self._recipes: dict[Any, _Recipe] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.dispatch(func, types, args, kwargs)

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What ``func`` gives, from memory if possible."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is _GROUPED_PRODUCT:
            return _grouped_product(*args[:3])
        if func is _EFFICIENT_BACKWARD:  # PyTorch's rule takes one argument less than its operator
            return (*(t.new_empty(t.shape) for t in args[1:4]), None)
        kwargs = kwargs or {}
        tensors: list[FakeTensor] = []
        try:
            key = (func, _key(args, tensors), _key(tuple(kwargs.items()), tensors))
            recipe = self._recipes.get(key)
        except _NoKey:
            return super().dispatch(func, types, args, kwargs)
        if recipe is None:
            out = super().dispatch(func, types, args, kwargs)
            if _UNSTEADY.isdisjoint(func.tags) and (recipe := _recipe_of(out, tensors)):
                self._recipes[key] = recipe
            return out
        kind, results = recipe
        made = [self._make(result, tensors) for result in results]
        return made[0] if kind is None else kind(made)

    def _make(self, result: _Same | _View | _New, tensors: list[FakeTensor]) -> FakeTensor:
        if isinstance(result, _Same):
            return tensors[result.argument]
        with in_kernel_invocation_manager(self):
            if isinstance(result, _New):
                device = result.device
                bare = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
            else:
                base = tensors[result.argument]
                device = base.fake_device
                bare = torch.empty(0, dtype=result.dtype, device="meta")
                start = base.storage_offset() + result.offset
                bare.set_(base.untyped_storage(), start, result.shape, result.stride)
        return FakeTensor(self, bare, device)


class _NoKey(Exception):
    """An argument by which a result cannot be remembered."""


def _key(value: Any, tensors: list[FakeTensor]) -> Any:
    """``value`` by what results depend on; its tensors are added to ``tensors``."""
    if isinstance(value, FakeTensor):
        if value.constant is not None:
            raise _NoKey
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.fake_device
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, tuple([_key(part, tensors) for part in value])
    if isinstance(value, torch.Tensor) or value.__hash__ is None:
        raise _NoKey
    return kind, value  # True is not 1, and 1 is not 1.0


def _recipe_of(out: Any, tensors: list[FakeTensor]) -> _Recipe | None:
    kind = list if isinstance(out, list) else tuple if isinstance(out, tuple) else None  # also for named tuples
    results: list[_Same | _View | _New] = []
    for result in out if kind else [out]:
        if not isinstance(result, FakeTensor) or result.constant is not None:
            return None
        results.append(_result(result, tensors))
    return kind, results


def _result(out: FakeTensor, tensors: list[FakeTensor]) -> _Same | _View | _New:
    for i, tensor in enumerate(tensors):
        if out is tensor:
            return _Same(i)
    storage = out.untyped_storage()._cdata
    for i, tensor in enumerate(tensors):
        if tensor.untyped_storage()._cdata == storage:
            offset = int(out.storage_offset()) - int(tensor.storage_offset())
            return _View(i, out.shape, out.stride(), offset, out.dtype)
    return _New(out.shape, out.stride(), out.dtype, out.fake_device)


def _grouped_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
    """Products of the experts of a mixture; PyTorch's rule for fake tensors refuses what its CPU does well, float32.

    Of two matrices whose inner dimension is cut into groups, which end at ``ends``, there is a product for each group:
    gradients of the experts' weights. Rows are padded to 16 bytes.
    """
    align = 16 // a.element_size()
    num_columns = b.shape[-1]
    stride = -(-num_columns // align) * align
    is_by_group = a.dim() == b.dim() == 2 and ends is not None
    groups = (ends.shape[0],) if is_by_group and ends is not None else ()
    return a.new_empty(*groups, *a.shape[:-1], stride)[..., :num_columns]
