"""A device whose work is done later than it is asked for, in the worst order that the waits allow.

Its tensors have shapes at once and values when their stream comes to it. A stream is a queue, and who runs ahead is
chosen: the arithmetic, so that copies come as late as they may, or the copies, so that they come as early as they may,
or nobody, so that the host is as far ahead as it can be. Whatever lacks a wait is wrong in one of these orders whenever
it is tried, where threads that really run would find it now and then. Memory is a card's: a block belongs to the stream
that asked for it, is lent again in that stream's order, and is full of NaN before it is written.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as trees
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "late"
ARITHMETIC, COPIES, NOBODY = "arithmetic", "copies", "nobody"
ORDERS = (ARITHMETIC, COPIES, NOBODY)
GRANULE_BYTES = 512

aten = torch.ops.aten
_ALIASES = {aten.detach.default, aten.alias.default}
_EMPTY = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
_ASKS_FOR_VALUES = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default}


@dataclass
class Event:
    """A place in a stream: what was asked for before it."""

    stream: Stream
    place: int

    def is_done(self) -> bool:
        return self.stream.num_done >= self.place

    def synchronize(self) -> None:
        self.stream.reach(self.place)


class Stream:
    """Work that is done in the order in which it was asked for."""

    def __init__(self, of: World) -> None:
        self._world = of
        self._queue: deque[Callable[[], None] | Event] = deque()
        self.num_asked = self.num_done = 0

    def ask(self, work: Callable[[], None] | Event) -> None:
        """Do ``work`` later, or nothing before an event."""
        with self._world.lock:
            self._queue.append(work)
            self.num_asked += 1
            self._world.run_ahead()

    def record_event(self) -> Event:
        return Event(self, self.num_asked)

    def wait_event(self, event: Event) -> None:
        if not self._world.leaves_out(sys._getframe(1)):
            self.ask(event)

    def wait_stream(self, stream: Stream) -> None:
        if not self._world.leaves_out(sys._getframe(1)):
            self.ask(stream.record_event())

    def synchronize(self) -> None:
        if not self._world.leaves_out(sys._getframe(1)):
            self.record_event().synchronize()

    def reach(self, place: int) -> None:
        """Come to ``place``, and do of other streams' work what is waited for."""
        with self._world.lock:
            while self.num_done < place:
                first = self._queue[0]
                if isinstance(first, Event) and not first.is_done():
                    first.stream.reach(first.place)  # which may let this one run ahead
                else:
                    self._next()
            self._world.run_ahead()

    def run_ahead(self) -> None:
        """Do what can be done without work of others."""
        while self._queue and not (isinstance(first := self._queue[0], Event) and not first.is_done()):
            self._next()

    def _next(self) -> None:
        work = self._queue.popleft()
        if not isinstance(work, Event):
            work()
        self.num_done += 1


class World:
    """The device's streams, its memory, and which wait is left out.

    Attributes:
        order: who runs ahead.
        left_out: the wait that is not made.
        waits: all waits that the lane asked for.
        reserved_bytes: taken from the machine so far.
        failed: what an operator that was done too early ran into.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._here = threading.local()
        self.begin(NOBODY)

    def begin(self, order: str, left_out: str = "") -> None:
        """Begin anew."""
        with self.lock:
            self.order, self.left_out = order, left_out
            self.waits: set[str] = set()
            self.arithmetic = Stream(self)
            self.streams = [self.arithmetic]
            self._free: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
            self._leaving: list[tuple[list[Event], Block]] = []
            self.reserved_bytes = 0
            self.failed: Exception | None = None

    def open_stream(self) -> Stream:
        """One more stream."""
        self.streams.append(Stream(self))
        return self.streams[-1]

    @property
    def stream(self) -> Stream:
        """The one that this thread asks."""
        return getattr(self._here, "stream", None) or self.arithmetic

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """A context in which this thread asks ``stream``."""
        before, self._here.stream = getattr(self._here, "stream", None), stream
        try:
            yield
        finally:
            self._here.stream = before

    def run_ahead(self) -> None:
        """Let those run ahead that may."""
        for stream in self.streams:
            if self.order == (ARITHMETIC if stream is self.arithmetic else COPIES):
                stream.run_ahead()

    def finish(self) -> None:
        """The host waits for everything, first for the arithmetic."""
        with self.lock:
            for stream in self.streams:
                stream.reach(stream.num_asked)

    def leaves_out(self, frame: Any) -> bool:
        """Whether the wait that is asked for in ``frame`` is the one to leave out; it goes by the lane's lines."""
        line, names = frame.f_lineno, []
        while frame is not None and len(names) < 2:
            name = frame.f_code.co_name
            if name == "_forget" or (name != "take" and frame.f_code.co_filename.endswith("owner/lane.py")):
                names.append(name)
            frame = frame.f_back
        wait = f"{line}: {' for '.join(names)}"
        self.waits.add(wait)
        return wait == self.left_out

    def take(self, num_bytes: int) -> Block:
        """Memory for this thread's stream."""
        with self.lock:
            for events, block in [*self._leaving]:
                if all(event.is_done() for event in events):
                    self._leaving.remove((events, block))
                    self._free[block.key].append(block.raw)
            size = max(1, -(-num_bytes // GRANULE_BYTES)) * GRANULE_BYTES
            key = id(self.stream), size
            if free := self._free[key]:
                return Block(self, free.pop(), key)
            self.reserved_bytes += size
            return Block(self, torch.empty(size, dtype=torch.uint8), key)

    def give_back(self, block: Block) -> None:
        with self.lock:
            if block.users:
                self._leaving.append(([stream.record_event() for stream in block.users], block))
            else:
                self._free[block.key].append(block.raw)


class Block:
    """Some memory, free as soon as no tensor lies there."""

    def __init__(self, of: World, raw: torch.Tensor, key: tuple[int, int]) -> None:
        self._world, self.raw, self.key = of, raw, key
        self.users: list[Stream] = []

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():
            self._world.give_back(self)


class Late(torch.Tensor):
    """A tensor whose values come later: ``raw`` is where they will be."""

    raw: torch.Tensor
    block: Block
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor, block: Block) -> Late:
        made: Late = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.raw, made.block = raw, block
        return made

    def __init__(self, raw: torch.Tensor, block: Block) -> None:
        pass

    @classmethod
    def empty(cls, shape: Any, stride: Any, dtype: torch.dtype) -> Late:
        """Room, full of NaN when its stream comes to it."""
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
        block = world.take(span * dtype.itemsize)
        raw = torch.empty(0, dtype=dtype).set_(block.raw.untyped_storage(), 0, shape, stride)  # type: ignore[call-overload]
        if dtype.is_floating_point:
            world.stream.ask(lambda: _fill_with_nan(raw))
        return cls(raw, block)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """A view of it; set, it lies elsewhere, on the host too, as a parameter between two visits does."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        is_late = isinstance(other, Late)
        self.raw, self.block = (other.raw if is_late else other), (other.block if is_late else None)  # type: ignore[assignment]

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.block.users.append(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with world.lock:
            return _ask(func, args, kwargs or {})


def _ask(func: Any, args: Any, kwargs: Any) -> Any:
    """Ask this thread's stream for an operator; its result's shape is there at once."""
    to = kwargs.get("device")
    host, blocks = to is not None and torch.device(to).type == "cpu", not kwargs.get("non_blocking", False)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    first = next(t for t in trees.tree_leaves((args, kwargs)) if isinstance(t, Late))
    if func.is_view or func in _ALIASES:
        made = func(*_raw(args), **_raw(kwargs))
        return trees.tree_map_only(torch.Tensor, lambda t: Late(t, first.block), made)
    if func in _ASKS_FOR_VALUES:
        world.finish()
        return trees.tree_map_only(torch.Tensor, _bring, func(*_raw(args), **_raw(kwargs)))
    shapes = None if (written := _written(func, args, kwargs)) else func(*_bare(args), **_bare(kwargs))
    if func in _EMPTY:
        return Late.empty(shapes.shape, shapes.stride(), shapes.dtype)
    if func is aten.copy_.default:
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    given, further = _raw(args), _raw(kwargs)
    if written:
        world.stream.ask(lambda: _do(func, given, further))
    else:
        room = torch.empty_like if host else (lambda t, device: Late.empty(t.shape, t.stride(), t.dtype))
        made = trees.tree_map_only(torch.Tensor, lambda t: room(t, device="cpu"), shapes)
        rooms = [t for t in trees.tree_leaves(_raw(made, scalars=True)) if isinstance(t, torch.Tensor)]
        world.stream.ask(lambda: _do(func, given, further, rooms))
    is_copy = host or (func is aten.copy_.default and not all(isinstance(t, Late) for t in args[:2]))
    if is_copy and blocks:
        world.stream.record_event().synchronize()
    if not written:
        return made
    count = len(func._schema.returns)
    return None if not count else written[0] if count == 1 else tuple(written)


@torch.no_grad()
def _do(func: Any, args: Any, kwargs: Any, rooms: list[torch.Tensor] | None = None) -> None:
    try:
        made = func(*args, **kwargs)
    except (IndexError, RuntimeError) as error:  # values that are none yet, taken for places
        world.failed = error
        return
    for room, value in zip(
        rooms or [], (t for t in trees.tree_leaves(made) if isinstance(t, torch.Tensor)), strict=False
    ):
        room.copy_(value)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes into."""
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return [given[a.name] for a in arguments if a.alias_info and a.alias_info.is_write and a.name in given]


def _raw(values: Any, scalars: bool = False) -> Any:
    """Where values will be; a scalar of the host's is read now, as a card's kernels do."""

    def one(t: torch.Tensor) -> torch.Tensor:
        return t.raw if isinstance(t, Late) else t if scalars or t.dim() else t.clone()

    return trees.tree_map_only(torch.Tensor, one, values)


def _bare(values: Any) -> Any:
    return trees.tree_map_only(
        torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), values
    )


def _bring(value: torch.Tensor) -> Late:
    made = Late.empty(value.shape, value.stride(), value.dtype)
    world.stream.ask(lambda: _do(aten.copy_.default, (made.raw, value), {}))
    return made


def _fill_with_nan(raw: torch.Tensor) -> None:
    with torch.no_grad():
        raw.fill_(torch.nan)


class _Module(_DummyBackendModule):  # type: ignore[misc]
    def Stream(self, device: Any) -> Stream:
        return world.open_stream()

    def current_stream(self, device: Any = None) -> Stream:
        return world.stream

    def stream(self, stream: Stream) -> Any:
        return world.on(stream)

    def synchronize(self, device: Any = None) -> None:
        world.finish()


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Late:
    return Late.empty(size, torch.empty(size, device="meta").stride(), dtype or torch.get_default_dtype())


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Late:
    return Late.empty(size, stride, dtype or torch.get_default_dtype())


def _arange(*given: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Late:
    return _bring(torch.arange(*given, dtype=dtype))


def open_device() -> None:
    """Make the device known to PyTorch, once and for as long as the process lasts."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    for name in ("arange", "arange.start", "arange.start_step"):  # PyTorch's own change the size of what they are given
        _library.impl(name, _arange, "PrivateUse1")


_library = torch.library.Library("aten", "IMPL")
world = World()
open_device()
