"""States as JSON beside a safetensors file: trees of tensors, numbers and names, bit for bit, without pickle.

An optimizer's states are dictionaries within lists within dictionaries, whose keys may be numbers and whose tensors may
be of torchao's kinds, codes with scales. JSON takes the tree, with ``{"#tensor": name}`` in a tensor's place; what JSON
has no word for (a tuple, a key that is no text, a number format) gets one that begins with ``#``. Reading makes nothing
but such values, and tensors of the three kinds that are named here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from narrowboat.machine.extras import require

QUANTISED = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
"""Kinds of tensors that hold other tensors, and the modules they are in."""


def flatten(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """``tree`` as JSON takes it, and its plain tensors by name; one that stands in several places is there once.

    Args:
        tree: of dictionaries, lists, tuples, tensors, numbers, texts.

    Raises:
        TypeError: something else is in it; says what and where.
    """
    flattener = _Flattener()
    return flattener.of(tree, ""), flattener.tensors


def restore(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of ``flatten``.

    Raises:
        ValueError, KeyError, TypeError: it is no such tree, or a tensor is missing.
    """
    if isinstance(tree, list):
        return [restore(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    word = next((key for key in tree if key.startswith("#")), None)
    if word is None:
        return {key: restore(value, tensors) for key, value in tree.items()}
    value = tree[word]
    match word:
        case "#tensor":
            return tensors[value]
        case "#tuple":
            return tuple(restore(item, tensors) for item in value)
        case "#dict":
            return {key: restore(item, tensors) for key, item in value}
        case "#float":
            return float(value)
        case "#dtype":
            return _dtype(value)
        case "#quantised":
            return _quantised(value, tensors)
        case _:
            raise ValueError(f"{word!r:.40} is no kind of value")


class _Flattener:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._seen: list[torch.Tensor] = []  # an id is a tensor's own only while that is alive

    def of(self, value: Any, place: str) -> Any:
        match value:
            case None | bool() | int() | str():
                return value
            case float():
                return value if math.isfinite(value) else {"#float": str(value)}
            case list():
                return [self.of(item, f"{place}/{i}") for i, item in enumerate(value)]
            case tuple():
                return {"#tuple": [self.of(item, f"{place}/{i}") for i, item in enumerate(value)]}
            case dict():
                return self._dict(value, place)
            case torch.Tensor():
                return self._tensor(value, place)
            case torch.dtype():
                return {"#dtype": str(value).removeprefix("torch.")}
        raise TypeError(f"{place.strip('/')} is a {type(value).__name__}, which cannot be saved")

    def _dict(self, values: Mapping[Any, Any], place: str) -> Any:
        pairs = [(key, self.of(value, f"{place}/{key}")) for key, value in values.items()]
        if all(isinstance(key, str) and not key.startswith("#") for key in values):
            return dict(pairs)
        if all(isinstance(key, str | int) for key in values):
            return {"#dict": [list(pair) for pair in pairs]}
        raise TypeError(f"{place.strip('/')} has keys that are neither text nor whole numbers, which cannot be saved")

    def _tensor(self, tensor: torch.Tensor, place: str) -> Any:
        if is_traceable_wrapper_subclass(tensor):
            kind = type(tensor).__name__
            if kind not in QUANTISED:
                raise TypeError(f"{place.strip('/')} is a {kind}, which cannot be saved")
            names, context = tensor.__tensor_flatten__()
            parts = {name: self._tensor(getattr(tensor, name), f"{place}/{name}") for name in names}
            outer = [list(tensor.shape), list(tensor.stride())]
            return {"#quantised": [kind, parts, self.of(context, f"{place}/context"), *outer]}
        if id(tensor) not in self._names:
            self._names[id(tensor)] = place.strip("/")
            self._seen.append(tensor)
            self.tensors[place.strip("/")] = tensor.detach()
        return {"#tensor": self._names[id(tensor)]}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r:.40} is no number format")
    return found


def _quantised(value: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    kind, parts, context, shape, stride = value
    made = getattr(require(QUANTISED[kind], f"the checkpoint's {kind}"), kind)
    inner = {name: restore(part, tensors) for name, part in parts.items()}
    tensor: torch.Tensor = made.__tensor_unflatten__(inner, restore(context, tensors), torch.Size(shape), tuple(stride))
    return tensor
