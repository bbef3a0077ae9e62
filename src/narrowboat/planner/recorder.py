"""A meter that takes a step apart: for each moment of it what was alive by cause and place, and the operations done.

A moment is "forward, layer 3", "loss", "backward, layer 3": what layers hold adds up from moment to moment, what works
on top of it does not. Within a moment each place of the code (an operator with those before it) has its own maximum,
so that all of them can be carried on to longer rows, where another one may be the largest.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch.utils.flop_counter import flop_registry

from narrowboat.machine.card import GRANULE_BYTES
from narrowboat.machine.precision import parts_of
from narrowboat.owner.causes import WORKING_SET, Where
from narrowboat.owner.meter import Meter, Slot
from narrowboat.owner.values import repeats
from narrowboat.planner.amounts import Work

Bytes = dict[Slot, int]
Moment = tuple[str, int]
"""What the step is doing, and at which layer."""

CONTEXT = 6
"""Operators in a row that tell one place of the code from another."""

START, FORWARD, LOSS, BACKWARD, UPDATE = "start", "forward", "loss", "backward", "update"

_FLASH_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
_INSIDE: Slot = (WORKING_SET, "device")
_DEVICE = torch.ops.prim.device.default
_COPY = torch.ops.aten.copy_.default
READS_AFTER = 2
"""How often a CPU reads a layer's input where it lies: for keys and values, and for the rest."""


class Recorder(Meter):
    """Records from ``begin`` to ``end`` while it is entered.

    Args:
        on_card: count what a card's operators take for themselves while they run as well.

    Attributes:
        begun: what was alive when each moment began.
        peaks: for each moment, and ``(where, *the last operators)``, what was alive when most was alive there.
        work: operator by operator, of each moment.
    """

    def __init__(self, on_card: bool = False) -> None:
        super().__init__(one_memory=not on_card, granule_bytes=GRANULE_BYTES if on_card else 1)
        self._on_card = on_card
        self.forget()

    def forget(self) -> None:
        """Begin a new record."""
        self._moment: Moment | None = None
        self._last: deque[Any] = deque(maxlen=CONTEXT)
        self._totals: dict[Any, int] = {}
        self.begun: dict[Moment, Bytes] = {}
        self.peaks: dict[Moment, dict[Any, Bytes]] = defaultdict(dict)
        self.work: dict[Moment, list[Work]] = defaultdict(list)

    def begin(self, name: str, layer: int = 0) -> None:
        """From here on it is the moment ``(name, layer)``."""
        self._moment = (name, layer)
        self._last.clear()
        self.begun[self._moment] = self.alive()
        for place in get_args(Where):
            self._note(place)

    def end(self) -> None:
        """Record no more."""
        self._moment = None

    def alive(self) -> Bytes:
        """What is alive now."""
        return {slot: size for slot, size in self._live.items() if size}

    def of(self, tensors: Iterable[torch.Tensor]) -> Bytes:
        """The bytes of ``tensors``, under the causes and places that they were counted under."""
        found: Bytes = defaultdict(int)
        storages = [part.untyped_storage() for tensor in tensors for part in parts_of(tensor)]
        for key, storage in {storage._cdata: storage for storage in storages}.items():
            if key in self._slots:
                found[self._slots[key]] += self._size(storage, self._slots[key])
        return dict(found)

    def _add(self, slot: Slot, num_bytes: int) -> None:
        super()._add(slot, num_bytes)
        if self._moment is not None and num_bytes > 0:
            self._note(slot[1])

    def _note(self, place: Where, inside_bytes: int = 0) -> None:
        total = sum(size for slot, size in self._live.items() if slot[1] == place) + inside_bytes
        key = (place, *self._last)
        if total > self._totals.get((self._moment, key), -1):
            self._totals[self._moment, key] = total
            alive = self.alive()
            if inside_bytes:
                alive[_INSIDE] = alive.get(_INSIDE, 0) + inside_bytes
            self.peaks[self._moment][key] = alive  # type: ignore[index]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:
            return func(*args)
        if self._moment is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._last.append(func)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._on_card and func is _FLASH_BACKWARD:
            self._note("device", _inside_flash_backward(*args[1:4]))
        if not func.is_view:
            self.work[self._moment].append(self._work_of(func, args, kwargs or {}, out) * repeats())
        return out

    def _work_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
        if func is _FLASH_FORWARD or func is _FLASH_BACKWARD:
            return Work(attention=_flash_operations(func, args), calls=1)
        if func is _GROUPED_PRODUCT:
            return Work(products=2 * args[0].numel() * args[1].shape[-1], calls=1)
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            return Work(products=formula(*args, **kwargs, out_val=out), calls=1)
        touched = {id(t): t for t in (*args, out) if isinstance(t, torch.Tensor)}.values()
        size = sum(t.numel() * t.element_size() for t in touched)
        if func is _COPY:
            to, source = (self._place_of(t) for t in args[:2])
            away = source if to == "device" else to
            once = size // 2 * (1 if to == "device" or self._on_card else 1 + READS_AFTER)
            if away == "disk":
                return Work(disk_bytes=once, calls=1)
            if away in ("host", "pinned"):
                return Work(host_bytes=once, calls=1)
        return Work(moved_bytes=size, calls=1)

    def _place_of(self, tensor: torch.Tensor) -> Where:
        return self._slots.get(tensor.untyped_storage()._cdata, ("", "device"))[1]


def _flash_operations(func: Any, args: tuple[Any, ...]) -> int:
    """Two products forwards, five backwards; a causal square is half a square."""
    forward = func is _FLASH_FORWARD
    q, k, v = args[:3] if forward else args[1:4]
    place = 4 if forward else 7
    causal = len(args) > place and args[place]  # the dispatcher leaves out what is the default
    pairs = q.shape[2] * k.shape[2] / (2 if causal else 1)
    return int((2 if forward else 5) * pairs * q.shape[0] * q.shape[1] * (q.shape[3] + v.shape[3]))


def _inside_flash_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """What PyTorch's CUDA kernel takes for itself: the query gradient in fp32, and gradients of grouped keys and values
    for every head, summed over the group only at the end.
    """
    num_groups = q.shape[1] // k.shape[1]
    expanded = num_groups * (k.numel() + v.numel()) * k.element_size() if num_groups > 1 else 0
    return 4 * q.numel() + expanded
