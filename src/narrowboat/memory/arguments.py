"""What a layer is called with and gives back: trees of tensors, taken apart by path and put together again.

Layers of transformers take their arguments by position or by name, in tuples and dictionaries. A path such as
``("position_embeddings", 0)`` says where a tensor is, so that tensors can be cut, replaced and watched without knowing
what they mean. Some microseconds a call.
"""

from __future__ import annotations

import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Path = tuple[Any, ...]
"""Where a tensor is: an argument's name, then indices and keys."""

MAPPINGS = (Mapping, UserDict)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of ``forward``, or of what it stands for."""
    return inspect.signature(forward).parameters


def bound(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The first argument, which is the hidden states, and all others by name.

    Args:
        forward: whose signature says what comes at which place.
        args: as it was called, by place.
        kwargs: and by name.
    """
    names = [name for name, parameter in parameters_of(forward).items() if parameter.kind not in VARIADIC]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    first = next(name for name in (*names, *given) if name in given)
    return given.pop(first), given


def takes(forward: Callable[..., Any], name: str) -> bool:
    """Whether ``forward`` has a parameter of this name."""
    return name in parameters_of(forward)


@dataclass(frozen=True)
class Slot:
    """Stands for the ``number``-th tensor of a tree whose tensors are somewhere else."""

    number: int


def tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """All tensors in ``value``, a tree of tuples, lists and mappings, with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from tensors(part, (*path, i))
    elif isinstance(value, MAPPINGS):
        for key in value:
            yield from tensors(value[key], (*path, key))


def replaced(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same tree with ``change(path, leaf)`` in the place of each tensor or slot; ``value`` stays what it is."""
    if isinstance(value, (torch.Tensor, Slot)):
        return change(path, value)
    if isinstance(value, (tuple, list)):
        parts = [replaced(part, change, (*path, i)) for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, MAPPINGS):
        made: Any = copy.copy(value)
        for key in list(value):
            made[key] = replaced(value[key], change, (*path, key))
        return made
    return value


def mappings(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Names of the arguments in which layers may leave tensors for one another."""
    return (name for name, value in arguments.items() if isinstance(value, MAPPINGS))
