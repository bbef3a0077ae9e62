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
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from narrowboat.machine.precision import parts_of
from narrowboat.owner.causes import Counter, Where, current_cause
from narrowboat.owner.owner import holdings
from narrowboat.units import format_bytes

Slot = tuple[str, Where]
"""A cause and where its bytes lie."""


@dataclass(frozen=True)
class Reading:
    """Bytes at one moment. ``by_cause`` holds the device's bytes alone; host memory counts what is pinned in it."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    file_bytes: int
    by_cause: dict[str, int]


class Meter(Counter):
    """Counts live tensor storage while it is entered.

    Args:
        budget_bytes: refuse the operator that would take the device above this; None only counts.
        one_memory: the device's memory is the host's, as a CPU's is: what rests on the host counts as the device's.
        granule_bytes: of the device's allocator: every storage takes a multiple of it.
    """

    def __init__(self, budget_bytes: int | None = None, one_memory: bool = False, granule_bytes: int = 1) -> None:
        super().__init__()
        self.budget_bytes, self._one_memory, self._granule_bytes = budget_bytes, one_memory, granule_bytes
        self._live: dict[Slot, int] = defaultdict(int)
        self._live_device_bytes = 0
        self._peak_bytes = 0
        self._at_peak: dict[Slot, int] = {}
        self._peak_by_place: dict[Where, int] = defaultdict(int)
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._slots: dict[int, Slot] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside a meter; PyTorch's guard against it takes longer than the counting."""
        return False

    def watch(self, tensor: torch.Tensor, name: str, where: Where = "device") -> None:
        """Count ``tensor`` under ``name`` and as lying ``where`` from here on, whether it was seen before or not."""
        for part in parts_of(tensor):
            key = part.untyped_storage()._cdata
            if key not in self._seen:
                self._take(part, (name, where))
                continue
            slot, old = self._slot(name, where), self._slots[key]
            self._add(old, -self._size(part.untyped_storage(), old))
            self._slots[key] = slot
            self._add(slot, self._size(part.untyped_storage(), slot))

    def watch_model(self, model: torch.nn.Module) -> None:
        """Count a model's tensors, which were there before: as its owner says, or as lying on the device."""
        for holding in holdings(model):
            self.watch(holding.tensor, holding.cause, holding.where)

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

    def _size(self, storage: torch.UntypedStorage, slot: Slot) -> int:
        return _rounded(storage.nbytes(), self._granule_of(slot))

    def _granule_of(self, slot: Slot) -> int:
        return self._granule_bytes if slot[1] == "device" else 1

    def _slot(self, name: str, where: Where) -> Slot:
        return name, "device" if self._one_memory and where in ("host", "pinned") else where

    def _take(self, tensor: torch.Tensor, said: Slot) -> None:
        """Count a storage that is new here until it is freed."""
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._slots[key] = slot = self._slot(*said)
        num_bytes = storage.nbytes()
        try:
            self._add(slot, self._size(storage, slot))
        except torch.OutOfMemoryError:  # the caller's tensor dies with it
            del self._slots[key]
            raise

        def freed(_: object) -> None:
            del self._seen[key]
            last = self._slots.pop(key)
            self._add(last, -_rounded(num_bytes, self._granule_of(last)))

        self._seen[key] = weakref.ref(storage, freed)

    def _add(self, slot: Slot, num_bytes: int) -> None:
        where = slot[1]
        if where == "device":
            if num_bytes > 0 and self.budget_bytes is not None:
                self._refuse(num_bytes)
            self._live_device_bytes += num_bytes
        self._live[slot] += num_bytes
        if where != "device":
            total = sum(size for (_, place), size in self._live.items() if place == where)
            self._peak_by_place[where] = max(self._peak_by_place[where], total)
        elif self._live_device_bytes > self._peak_bytes:
            self._peak_bytes = self._live_device_bytes
            self._at_peak = dict(self._live)

    def _refuse(self, num_bytes: int) -> None:
        if self._live_device_bytes + num_bytes > (self.budget_bytes or 0):
            raise torch.OutOfMemoryError(
                f"{format_bytes(num_bytes)} more would take the device from {format_bytes(self._live_device_bytes)} "
                f"above the budget of {format_bytes(self.budget_bytes or 0)}."
            )

    @staticmethod
    def _reading(live: dict[Slot, int], device_bytes: int, peaks: dict[Where, int] | None = None) -> Reading:
        by_place: dict[Where, int] = defaultdict(int)
        by_cause: dict[str, int] = {}
        for (name, where), num_bytes in live.items():
            by_place[where] += num_bytes
            if where == "device" and num_bytes:
                by_cause[name] = by_cause.get(name, 0) + num_bytes
        by_place |= peaks or {}
        ordered = dict(sorted(by_cause.items(), key=lambda item: -item[1]))
        host_bytes = by_place["host"] + by_place["pinned"]
        return Reading(device_bytes, host_bytes, by_place["disk"], by_place["file"], ordered)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor):
                for part in parts_of(leaf):
                    self._take(part, current_cause())
        return out


def _rounded(num_bytes: int, granule_bytes: int) -> int:
    return -(-num_bytes // granule_bytes) * granule_bytes
