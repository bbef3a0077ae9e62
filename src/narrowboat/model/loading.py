"""A model's weights read one at a time, each handed over before the next is read.

Transformers reads ahead with several threads, so that a model that is cast on its way is there twice. Here a file's
tensors are mapped and not read; one becomes memory when its turn comes, is cast and quantised by transformers, and is
laid down where it shall rest as soon as the model has it. So loading takes the resting weights and one tensor. A
tensor that is neither cast nor quantised is never copied: its memory is the file's own pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


class Taker(Protocol):
    """Takes weights over while a model is read."""

    def arrive(self, read: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """``read()``, pages of a file, in ``dtype`` if its cast copy may lie where it is to rest; or as it is."""

    def lay_down(self, layer: nn.Module, parameter: torch.Tensor, is_mapped: bool) -> None:
        """Take over ``parameter``, which ``layer`` has just got; ``is_mapped``: its memory is pages of the file."""


Mapped = WeakValueDictionary[int, torch.UntypedStorage]
"""Storages that are pages of a file."""

WITHOUT_THREADS = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""What transformers looks up in the environment."""


@contextmanager
def one_at_a_time(files: Sequence[Path], dtype: torch.dtype, taker: Taker) -> Iterator[dict[str, Any] | None]:
    """The tensors of safetensors ``files`` by name, for ``from_pretrained`` inside; None for files of another kind.

    Args:
        files: of one model.
        dtype: of its weights.
        taker: is given each parameter as soon as the model has it.
    """
    mapped: Mapped = WeakValueDictionary()
    before = {name: os.environ.get(name) for name in WITHOUT_THREADS}
    os.environ.update(WITHOUT_THREADS)
    hook = register_module_parameter_registration_hook(_handing_over(taker, mapped))
    try:
        yield _slices(files, partial(_Slice, dtype=dtype, taker=taker, mapped=mapped))
    finally:
        hook.remove()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Slice:
    """A tensor in a file, not read yet; what it gives is remembered as the file's own."""

    def __init__(self, lazy: Any, dtype: torch.dtype, taker: Taker, mapped: Mapped) -> None:
        self._lazy, self._dtype, self._taker, self._mapped = lazy, dtype, taker, mapped

    def __getitem__(self, index: Any) -> torch.Tensor:
        read: list[torch.Tensor] = []

        def look() -> torch.Tensor:
            read.append(self._lazy[index])
            return read[0]

        arrived = self._taker.arrive(look, self._dtype)
        if arrived is read[0]:
            storage = arrived.untyped_storage()
            self._mapped[storage._cdata] = storage
        return arrived

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lazy, name)


def _slices(paths: Sequence[Path], make: Callable[[Any], _Slice]) -> dict[str, Any] | None:
    if any(path.suffix != ".safetensors" for path in paths):
        return None
    found: dict[str, Any] = {}
    for path in paths:
        file = safe_open(path, framework="pt")
        found |= {name: make(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    return found


def _handing_over(taker: Taker, mapped: Mapped) -> Callable[[nn.Module, str, Any], None]:
    def hook(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            is_plain = type(parameter) is nn.Parameter  # else it was quantised, and is no longer what the file holds
            taker.lay_down(module, parameter, is_plain and parameter.untyped_storage()._cdata in mapped)

    return hook
