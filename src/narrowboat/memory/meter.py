"""How many bytes of tensors are alive, by cause: a reading that needs no card and works on fake tensors too.

A dispatch mode sees every tensor that an operator returns and follows its storage by weak reference, so views count
once and a freed storage counts no more. Equal to the MiB to PyTorch's own CPU allocator record; what lives and dies
inside one operator is not seen. Costs some microseconds an operator, nothing in bytes.

With a budget, the meter refuses the operator that would pass it by raising ``torch.OutOfMemoryError``: on a CPU a
budget is as hard as the memory of a card, and running out of memory can be tested anywhere.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_iter

from narrowboat.machine.precision import parts_of
from narrowboat.plan import Place
from narrowboat.units import format_bytes

BASE_WEIGHTS = "base weights"
ADAPTERS = "adapters"
GRADIENTS = "gradients"
OPTIMIZER_STATES = "optimizer states"
LAYER_INPUTS = "layer inputs"
KEYS_VALUES = "keys and values"
CARRY = "carried keys and values"
LOSS = "loss"
WORKING_SET = "working set"

PLACE = "_narrowboat_place"
"""A parameter that rests elsewhere than on the device says so under this name."""

_current: ContextVar[tuple[str, Place]] = ContextVar("narrowboat_cause", default=(WORKING_SET, "device"))


@contextmanager
def cause(name: str, place: Place = "device") -> Iterator[None]:
    """Count what is allocated inside under ``name`` and at ``place``; free without a meter."""
    token = _current.set((name, place))
    try:
        yield
    finally:
        _current.reset(token)


_repeats: ContextVar[float] = ContextVar("narrowboat_repeats", default=1.0)


@contextmanager
def standing_for(times: float) -> Iterator[None]:
    """In a forecast what is done inside stands for ``times`` of its kind, others of which are left out."""
    token = _repeats.set(times * _repeats.get())
    try:
        yield
    finally:
        _repeats.reset(token)


def repeats() -> float:
    """How many times over the present work counts."""
    return _repeats.get()


def account(tensor: torch.Tensor, name: str) -> None:
    """From here on count ``tensor``, already alive, under ``name``; free without a meter."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Meter):
            mode.move(tensor, name)


@dataclass(frozen=True)
class Reading:
    """Bytes at one moment. ``by_cause`` holds the device's bytes alone."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    by_cause: dict[str, int]


class Meter(TorchDispatchMode):
    """Counts live tensor storage while it is entered.

    Args:
        budget_bytes: refuse the operator that would take the device above this; None only counts.
        one_memory: the device's memory is the host's, as a CPU's is: what rests on the host counts as the device's.
    """

    def __init__(self, budget_bytes: int | None = None, one_memory: bool = False) -> None:
        super().__init__()
        self.budget_bytes, self._one_memory = budget_bytes, one_memory
        self._live: dict[tuple[str, Place], int] = defaultdict(int)
        self._live_device_bytes = 0
        self._peak_bytes = 0
        self._at_peak: dict[tuple[str, Place], int] = {}
        self._peak_by_place: dict[Place, int] = defaultdict(int)
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._slots: dict[int, tuple[str, Place]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside a meter; PyTorch's guard against it takes longer than the counting."""
        return False

    def watch(self, tensor: torch.Tensor, name: str | None = None, place: Place | None = None) -> None:
        """Count ``tensor``'s storage, once, under ``name`` (default: the current cause) until it is freed."""
        if tensor.device.type == "meta":
            return
        if is_traceable_wrapper_subclass(tensor):  # quantised
            for part in parts_of(tensor):
                self.watch(part, name, place)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        current_name, current_place = _current.get()
        place = place or current_place
        if place == "host" and self._one_memory:
            place = "device"
        self._slots[key] = (name or current_name, place)
        num_bytes = storage.nbytes()
        self._add(self._slots[key], num_bytes)

        def freed(_: object, key: int = key, num_bytes: int = num_bytes) -> None:
            del self._seen[key]
            slot = self._slots.pop(key)
            self._live[slot] -= num_bytes
            if slot[1] == "device":
                self._live_device_bytes -= num_bytes

        self._seen[key] = weakref.ref(storage, freed)

    def move(self, tensor: torch.Tensor, name: str) -> None:
        """Count a watched tensor's storage under another cause, at the same place."""
        key = tensor.untyped_storage()._cdata
        if key in self._slots:
            old = self._slots[key]
            num_bytes = tensor.untyped_storage().nbytes()
            self._slots[key] = (name, old[1])
            self._live[old] -= num_bytes
            self._live[self._slots[key]] += num_bytes

    def watch_model(self, model: torch.nn.Module) -> None:
        """Count parameters and buffers: frozen ones as base weights, trainable ones as adapters."""
        for parameter in model.parameters():
            place: Place = getattr(parameter, PLACE, "device")
            self.watch(parameter, ADAPTERS if parameter.requires_grad else BASE_WEIGHTS, place)
            for scale in _scales(parameter):
                self.watch(scale, BASE_WEIGHTS, place)
        for buffer in model.buffers():
            self.watch(buffer, BASE_WEIGHTS, "device")

    def reset_peak(self) -> None:
        """Let the peak begin anew from what is alive now."""
        self._peak_bytes = self._live_device_bytes
        self._at_peak = dict(self._live)
        self._peak_by_place.clear()

    @property
    def live(self) -> Reading:
        """What is alive now."""
        return self._reading(self._live, self._live_device_bytes)

    @property
    def peak(self) -> Reading:
        """The most that was alive since the last reset, with the causes of that moment."""
        return self._reading(self._at_peak, self._peak_bytes, self._peak_by_place)

    def _add(self, slot: tuple[str, Place], num_bytes: int) -> None:
        self._live[slot] += num_bytes
        if slot[1] != "device":
            total = sum(size for (_, place), size in self._live.items() if place == slot[1])
            self._peak_by_place[slot[1]] = max(self._peak_by_place[slot[1]], total)
            return
        self._live_device_bytes += num_bytes
        if self.budget_bytes is not None and self._live_device_bytes > self.budget_bytes:
            self._live[slot] -= num_bytes  # the caller's tensor dies with the exception
            self._live_device_bytes -= num_bytes
            raise torch.OutOfMemoryError(
                f"{format_bytes(num_bytes)} more would take the device from {format_bytes(self._live_device_bytes)} "
                f"above the budget of {format_bytes(self.budget_bytes)}."
            )
        if self._live_device_bytes > self._peak_bytes:
            self._peak_bytes = self._live_device_bytes
            self._at_peak = dict(self._live)

    @staticmethod
    def _reading(
        live: dict[tuple[str, Place], int], device_bytes: int, peaks: dict[Place, int] | None = None
    ) -> Reading:
        by_place: dict[Place, int] = defaultdict(int)
        by_cause: dict[str, int] = {}
        for (name, place), num_bytes in live.items():
            by_place[place] += num_bytes
            if place == "device" and num_bytes:
                by_cause[name] = by_cause.get(name, 0) + num_bytes
        if peaks is not None:
            by_place |= peaks
        ordered = dict(sorted(by_cause.items(), key=lambda item: -item[1]))
        return Reading(device_bytes, by_place["host"], by_place["disk"], ordered)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf)
        return out


def _scales(parameter: torch.nn.Parameter) -> Iterator[torch.Tensor]:
    """What bitsandbytes keeps beside a quantised weight: scales of blocks, and the scales of those."""
    holders = [parameter, getattr(parameter, "quant_state", None)]
    holders.append(getattr(holders[1], "state2", None))
    for holder in holders:
        for name in ("SCB", "absmax", "offset", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, torch.Tensor):
                yield value
