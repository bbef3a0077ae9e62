"""What a forecast does without: the values of tensors, and most of the parts that are all alike.

A forecast runs the code of a step on tensors that have shapes and no memory. Where that code asks for a value, or goes
through a thousand tiles of one kind, it asks here; so this is the one place that knows a forecast from a run. Without
a forecast nothing is left out and every question is put to the tensor. No bytes, no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import is_fake

from narrowboat.machine.rates import Capability

T = TypeVar("T")

_repeats: ContextVar[float] = ContextVar("narrowboat_repeats", default=1.0)
_card: ContextVar[Capability | None] = ContextVar("narrowboat_card", default=None)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether there is anything in ``tensor``: not in a forecast, and not on ``meta``."""
    return not (is_fake(tensor) or tensor.is_meta)


def is_forecast() -> bool:
    """Whether tensors that are made now have no memory."""
    return is_fake(torch.empty(0))


@contextmanager
def forecast_of(card: Capability | None) -> Iterator[None]:
    """Forecast a step on a card of that kind; None is a CPU."""
    token = _card.set(card)
    try:
        yield
    finally:
        _card.reset(token)


def card_of(tensor: torch.Tensor) -> Capability | None:
    """The kind of card that ``tensor`` is on, or is forecast to be on; None for anything else."""
    if tensor.device.type == "cuda":
        return torch.cuda.get_device_capability(tensor.device)
    return _card.get() if is_fake(tensor) else None


def is_true(condition: torch.Tensor) -> bool:
    """The value of a scalar, for which the device has to finish; a forecast takes everything for well."""
    return not has_values(condition) or bool(condition)


def number(scalar: torch.Tensor) -> float:
    """The value of a scalar, for which the device has to finish; 0 in a forecast."""
    return float(scalar) if has_values(scalar) else 0.0


@contextmanager
def standing_for(times: float) -> Iterator[None]:
    """Count the work that is done inside ``times`` over."""
    token = _repeats.set(times * _repeats.get())
    try:
        yield
    finally:
        _repeats.reset(token)


def repeats() -> float:
    """How many times over the present work counts."""
    return _repeats.get()


def some_of(items: Sequence[T], like: torch.Tensor, first: int, last: int = 0) -> Iterator[T]:
    """All ``items``; if ``like`` has no values, only the ``first`` and the ``last`` few of them.

    The items take the same memory and evenly growing work, but for those at the ends. Each one beside the gap stands
    for its share of what is left out.
    """
    num_left_out = len(items) - first - last
    if has_values(like) or num_left_out <= 0:
        yield from items
        return
    beside = [i for i, is_there in ((first - 1, first), (len(items) - last, last)) if is_there]
    for i in (*range(first), *range(len(items) - last, len(items))):
        with standing_for(1 + num_left_out / len(beside) if i in beside else 1.0):
            yield items[i]
