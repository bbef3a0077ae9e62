"""A meter that takes a step apart: for each moment of it what was alive by cause and place, and the operations done.

A moment is "forward, layer 3", "loss", "backward, layer 3": what layers hold adds up from moment to moment, what works
on top of it does not. Within a moment each operator has its own maximum, so that all of them can be carried over to
longer rows, where another one may be the largest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from narrowboat.memory.meter import Meter
from narrowboat.plan import Place

Slot = tuple[str, Place]
"""A cause and where its bytes lie."""

Bytes = dict[Slot, int]
Moment = tuple[str, int]
"""What the step is doing, and at which layer."""

START, FORWARD, LOSS, BACKWARD, UPDATE = "start", "forward", "loss", "backward", "update"

_FLASH_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
_DEVICE = torch.ops.prim.device.default
_TRAVELS = {torch.ops.aten.copy_.default: 3, torch.ops.aten.clone.default: 1}
"""Weights come by clones; layer inputs leave by copies, and are read twice: for keys and values, and for the rest."""


@dataclass(frozen=True)
class Work:
    """What a device has to do.

    Attributes:
        products: floating-point operations of matrix products.
        attention: floating-point operations of attention.
        moved_bytes: read and written by all other operators.
        calls: of operators.
        host_bytes: travelling between device and host.
        disk_bytes: travelling between device and scratch file.
    """

    products: int = 0
    attention: int = 0
    moved_bytes: int = 0
    calls: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Work:
        return Work(*(a * times for a in astuple(self)))


class Recorder(Meter):
    """Records while it is entered and ``moment`` is not None.

    Attributes:
        begun: what was alive when each moment began.
        peaks: for each moment, place and operator what was alive when most was alive at that place.
        work: operations of each moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """Begin a new record."""
        self._moment: Moment | None = None
        self._operator: Any = None
        self._totals: dict[Any, int] = {}
        self.begun: dict[Moment, Bytes] = {}
        self.peaks: dict[Moment, dict[Any, Bytes]] = defaultdict(dict)
        self.work: dict[Moment, Work] = defaultdict(Work)

    def begin(self, name: str, layer: int = 0) -> None:
        """From here on it is the moment ``(name, layer)``."""
        self._moment = (name, layer)
        self._operator = None
        self.begun[self._moment] = self.alive()
        for place in ("device", "host", "disk"):
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
        for key, size in {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.items():
            if key in self._slots:
                found[self._slots[key]] += size
        return dict(found)

    def _add(self, slot: Slot, num_bytes: int) -> None:
        super()._add(slot, num_bytes)
        if self._moment is not None:
            self._note(slot[1])

    def _note(self, place: Place) -> None:
        total = sum(size for slot, size in self._live.items() if slot[1] == place)
        key = (place, self._operator)
        if total > self._totals.get((self._moment, key), -1):
            self._totals[self._moment, key] = total
            self.peaks[self._moment][key] = self.alive()  # type: ignore[index]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE or self._moment is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._operator = (func, args[0].dim() if args and isinstance(args[0], torch.Tensor) else 0)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.work[self._moment] += self._work_of(func, args, kwargs or {}, out)
        return out

    def _work_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
        if func.is_view:
            return Work()
        if func is _FLASH_FORWARD or func is _FLASH_BACKWARD:
            return Work(attention=_flash_operations(func, args), calls=1)
        if func is _GROUPED_PRODUCT:
            return Work(products=2 * args[0].numel() * args[1].shape[-1], calls=1)
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            return Work(products=formula(*args, **kwargs, out_val=out), calls=1)
        touched = {id(t): t for t in (*args, out) if isinstance(t, torch.Tensor)}.values()
        size = sum(t.numel() * t.element_size() for t in touched)
        if func in _TRAVELS:
            place = self._slots.get(args[0].untyped_storage()._cdata, ("", "device"))[1]
            travelling = _TRAVELS[func] * size // 2
            if place == "host":
                return Work(host_bytes=travelling, calls=1)
            if place == "disk":
                return Work(disk_bytes=travelling, calls=1)
        return Work(moved_bytes=size, calls=1)


def _flash_operations(func: Any, args: tuple[Any, ...]) -> int:
    """Two products forwards, five backwards; a causal square is half a square."""
    forward = func is _FLASH_FORWARD
    q, k, v = args[:3] if forward else args[1:4]
    place = 4 if forward else 7
    causal = len(args) > place and args[place]  # the dispatcher leaves out what is the default
    pairs = q.shape[2] * k.shape[2] / (2 if causal else 1)
    return int((2 if forward else 5) * pairs * q.shape[0] * q.shape[1] * (q.shape[3] + v.shape[3]))
