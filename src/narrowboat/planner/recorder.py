"""A meter that takes a step apart: for each moment of it what was alive by cause and place, and the operations done.

A moment is "forward, layer 3", "loss", "backward, layer 3": what layers hold adds up from moment to moment, what works
on top of it does not. Within a moment each place of the code (an operator with those before it) has its own maximum,
so that all of them can be carried on to longer rows, where another one may be the largest.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch.utils.flop_counter import flop_registry

from narrowboat.machine.card import GRANULE_BYTES
from narrowboat.machine.precision import parts_of
from narrowboat.memory import efficient
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

_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
_INSIDE: Slot = (WORKING_SET, "device")
_DEVICE = torch.ops.prim.device.default
_COPY = torch.ops.aten.copy_.default
READS_AFTER = 2
"""How often a CPU reads a layer's input where it lies: for keys and values, and for the rest."""


@dataclass(frozen=True)
class _Attention:
    """An operator of attention: where its queries and whether it is causal are among its arguments, how its tensors
    lie, and the bytes that it takes for itself.
    """

    first: int
    causal: int
    heads_first: bool = False
    inside: Callable[..., int] = lambda *tensors: 0


class Recorder(Meter):
    """Records from ``begin`` to ``end`` while it is entered.

    Args:
        on_card: memory is a card's: another one than the host's, and given in its allocator's steps.

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
        if (how := _ATTENTION.get(func)) is not None:
            self._note("device", how.inside(*args[: how.first + 3]))
        if not func.is_view:
            self.work[self._moment].append(self._work_of(func, args, kwargs or {}, out) * repeats())
        return out

    def _work_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
        if (how := _ATTENTION.get(func)) is not None:
            return Work(attention=_attention_operations(how, args), calls=1)
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


def _attention_operations(how: _Attention, args: tuple[Any, ...]) -> int:
    """Two products forwards, five backwards; of a causal square half is seen."""
    q, k, v = args[how.first : how.first + 3]
    heads, tokens = (1, 2) if how.heads_first else (2, 1)
    num_queries, num_keys = q.shape[tokens], k.shape[tokens]
    causal = len(args) > how.causal and args[how.causal]  # the dispatcher leaves out what is the default
    pairs = num_queries * num_keys - (num_queries**2 / 2 if causal else 0)
    products = 5 if how.first else 2
    return int(products * pairs * q.shape[0] * q.shape[heads] * (q.shape[3] + v.shape[3]))


def _inside_flash_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """What PyTorch's CUDA kernel takes for itself: the query gradient in fp32, and gradients of grouped keys and values
    for every head, summed over the group only at the end. Tensors are ``[batch, tokens, heads, size]``.
    """
    num_groups = q.shape[2] // k.shape[2]
    expanded = num_groups * (k.numel() + v.numel()) * k.element_size() if num_groups > 1 else 0
    return 4 * q.numel() + expanded


_aten = torch.ops.aten
_ATTENTION: dict[Any, _Attention] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _Attention(0, 4, heads_first=True),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _Attention(1, 7, heads_first=True),
    _aten._flash_attention_forward.default: _Attention(0, 8),
    _aten._flash_attention_backward.default: _Attention(1, 11, inside=_inside_flash_backward),
    _aten._efficient_attention_forward.default: _Attention(0, 9, inside=efficient.inside_forward),
    _aten._efficient_attention_backward.default: _Attention(1, 14, inside=efficient.inside_backward),
}
