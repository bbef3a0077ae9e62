"""What a layer is called with: a tree of tensors and other things, bound to the names of the layer's own signature.

Layers of transformers take their arguments by position or by name, in tuples and dictionaries. Here they are one flat
mapping from a path, such as ``("position_embeddings", 0)``, to a tensor, so that tensors can be cut, replaced and
watched without knowing what they mean. Costs some microseconds a call.
"""

from __future__ import annotations

import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

Path = tuple[Any, ...]
"""Where a tensor is: an argument's name, then indices and keys."""

KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@lru_cache(maxsize=256)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def bound(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, torch.Tensor, dict[str, Any]]:
    """The first argument's name and value, which are the hidden states, and all others by name.

    Args:
        forward: whose signature says what comes at which place.
        args, kwargs: as it was called.
    """
    signature = _signature(getattr(forward, "__func__", forward))
    is_method = hasattr(forward, "__func__")
    given = signature.bind(*((None, *args) if is_method else args), **kwargs).arguments
    names = [name for name in signature.parameters if name in given][is_method:]
    arguments = {name: given[name] for name in names}
    for name in names:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name)
    first = names[0]
    return first, arguments.pop(first), arguments


def takes(forward: Callable[..., Any], name: str) -> bool:
    """Whether ``forward`` has a parameter of this name."""
    return name in inspect.signature(inspect.unwrap(forward)).parameters


@dataclass(frozen=True)
class Slot:
    """Stands for the ``number``-th tensor of a tree whose tensors are somewhere else."""

    number: int


def tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """All tensors in ``value``, a tree of tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from tensors(part, (*path, i))
    elif isinstance(value, (Mapping, UserDict)):
        for key in value:
            yield from tensors(value[key], (*path, key))


def replaced(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same tree with ``change(path, leaf)`` in the place of each tensor or slot; ``value`` stays what it is."""
    if isinstance(value, (torch.Tensor, Slot)):
        return change(path, value)
    if isinstance(value, (tuple, list)):
        parts = [replaced(part, change, (*path, i)) for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, (Mapping, UserDict)):
        made: Any = copy.copy(value)
        for key in list(value):
            made[key] = replaced(value[key], change, (*path, key))
        return made
    return value


def mappings(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Names of the arguments in which layers may leave tensors for one another."""
    return (name for name, value in arguments.items() if isinstance(value, (Mapping, UserDict)))
