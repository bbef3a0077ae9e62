"""Where frozen weights rest, and their visits to the device, one layer at a time.

A layer computes far longer on a long sequence than its weights take to arrive, so all layers but the one at work and
the next one may rest in host memory or in a file; the head comes for the loss, and the embedding looks its rows up
where it rests. On a card the next layer is fetched while the last one computes: two layers' weights instead of all,
no time as long as a layer's arithmetic takes longer than its journey. On a CPU a file's mapped pages are the weights
themselves: nothing is copied, and the system drops pages when it needs room. Exact.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from narrowboat.events import Tell
from narrowboat.memory.forwards import forward_of
from narrowboat.memory.meter import BASE_WEIGHTS, PLACE, cause
from narrowboat.memory.rooms import HostMemory, map_scratch
from narrowboat.model.anatomy import Anatomy
from narrowboat.plan import Place

HEAD, EMBEDDING = -1, -2
"""The numbers of head and embedding among the units whose weights rest; layers count from 0."""


@dataclass
class _Weight:
    """A frozen tensor: where it hangs, the device it came from, and what it rests in."""

    owner: Any
    name: str
    home: torch.device
    resting: torch.Tensor
    moved: bool = False

    def put(self, tensor: torch.Tensor) -> None:
        setattr(self.owner, self.name, tensor)


@dataclass
class _Fetched:
    """One unit's weights on the device, or on their way there."""

    tensors: list[torch.Tensor]
    arrived: torch.cuda.Event | None


class WeightStream:
    """Moves the frozen weights of one model; nothing is moved until ``rest`` says where to."""

    def __init__(self, anatomy: Anatomy, tell: Tell) -> None:
        self._anatomy = anatomy
        self._device = _compute_device(anatomy.causal)
        self._host = HostMemory(tell)
        self._units: dict[int, list[_Weight]] = {}
        self._undo = ExitStack()
        self._copies = False
        self._visiting: set[int] = set()
        self._coming: dict[int, Future[_Fetched] | _Fetched] = {}
        self._last = 0
        self._stream: torch.cuda.Stream | None = None
        self._porter: ThreadPoolExecutor | None = None

    @property
    def copies(self) -> bool:
        """Whether weights come to the device by copies, so that what autograd remembers of them does not last."""
        return self._copies

    def rest(self, place: Place) -> None:
        """Let frozen weights rest at ``place`` from now on."""
        self.close()
        if place == "device":
            return
        self._undo.callback(self._go_home)
        self._copies = place == "host" or self._device.type != "cpu"
        mapped = _mapped_files() if place == "disk" else []
        anatomy, seen = self._anatomy, set[int]()
        units: dict[int, torch.nn.Module] = {i: layer.module for i, layer in enumerate(anatomy.layers)}
        units[HEAD] = anatomy.head
        if not any(p.requires_grad for p in anatomy.embedding.parameters()):
            units[EMBEDDING] = anatomy.embedding
        for unit, module in units.items():
            weights = _frozen(module, seen, with_buffers=unit == EMBEDDING)
            self._units[unit] = [self._lay_down(weight, place, mapped) for weight in weights]
        if EMBEDDING in units and self._device.type != "cpu":
            self._look_up_at_rest(anatomy.embedding)

    def visit_layer(self, index: int) -> AbstractContextManager[None]:
        """A context in which the weights of a layer are on the device."""
        return self._visit(index)

    def visit_head(self) -> AbstractContextManager[None]:
        """A context in which the head's weights are on the device."""
        return self._visit(HEAD)

    def close(self) -> None:
        """Bring all weights back to where they came from."""
        self._undo.close()

    def _lay_down(self, weight: _Weight, place: Place, mapped: Sequence[range]) -> _Weight:
        tensor = weight.resting
        weight.moved = True
        with torch.no_grad(), cause(BASE_WEIGHTS, place):
            if place == "host":
                weight.resting = self._host.empty(tensor.shape, tensor.dtype, self._device).copy_(tensor)
            elif is_fake(tensor):
                weight.resting = torch.empty_like(tensor)
            elif tensor.device.type == "cpu" and any(tensor.data_ptr() in stretch for stretch in mapped):
                weight.moved = False
            else:
                folder = Path(tempfile.gettempdir())
                weight.resting = map_scratch(folder, tensor.shape, tensor.dtype).copy_(tensor)
        weight.put(weight.resting)
        if isinstance(weight.owner, torch.nn.Parameter):
            setattr(weight.owner, PLACE, place)
        return weight

    def _go_home(self) -> None:
        self._coming.clear()
        if self._porter is not None:
            self._porter.shutdown()
        for weights in self._units.values():
            for weight in weights:
                if weight.moved:
                    weight.put(torch.empty_like(weight.resting, device=weight.home).copy_(weight.resting))
                if isinstance(weight.owner, torch.nn.Parameter):
                    delattr(weight.owner, PLACE)
        self._units, self._copies, self._porter = {}, False, None

    def _look_up_at_rest(self, embedding: torch.nn.Module) -> None:
        """Rows of the embedding are few beside its size: take them where it rests and send only them."""
        own_forward, device = embedding.forward, self._device

        def forward(ids: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = own_forward(ids.cpu())
            return rows.to(device, non_blocking=True)

        self._undo.enter_context(forward_of(embedding, forward))

    @contextmanager
    def _visit(self, unit: int) -> Iterator[None]:
        if not self._copies or unit in self._visiting:
            yield
            return
        fetched = self._take(unit)
        self._visiting.add(unit)
        for weight, tensor in zip(self._units[unit], fetched.tensors, strict=True):
            weight.put(tensor)
        self._send_for(self._next(unit))
        try:
            yield
        finally:
            self._visiting.remove(unit)
            for weight in self._units[unit]:
                weight.put(weight.resting)

    def _next(self, unit: int) -> int | None:
        """Who is likely to come next: the way goes up the layers and down again."""
        if unit == HEAD:
            return None
        num_layers, last, self._last = len(self._anatomy.layers), self._last, unit
        turns = unit == last and unit == num_layers - 1
        following = unit - 1 if unit < last or turns else unit + 1
        return following if 0 <= following < num_layers else None

    def _send_for(self, unit: int | None) -> None:
        if unit is None or unit in self._visiting:
            return
        if self._device.type == "cuda":
            self._porter = self._porter or ThreadPoolExecutor(1, "narrowboat-weights")
            self._coming[unit] = self._porter.submit(self._fetch, unit)
        else:
            self._coming[unit] = self._fetch(unit)

    def _take(self, unit: int) -> _Fetched:
        coming = self._coming.pop(unit, None)
        self._coming.clear()  # whoever was sent for in vain
        fetched = coming.result() if isinstance(coming, Future) else coming or self._fetch(unit)
        if fetched.arrived is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(fetched.arrived)
            for tensor in fetched.tensors:
                tensor.record_stream(stream)  # not used anew before the layer's arithmetic is done
        return fetched

    def _fetch(self, unit: int) -> _Fetched:
        weights = self._units[unit]
        with torch.no_grad(), cause(BASE_WEIGHTS):
            if self._device.type != "cuda":
                return _Fetched([weight.resting.clone() for weight in weights], None)
            self._stream = self._stream or torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._stream):
                tensors = [weight.resting.to(self._device, non_blocking=True) for weight in weights]
                return _Fetched(tensors, self._stream.record_event())


def _frozen(module: torch.nn.Module, seen: set[int], with_buffers: bool) -> Iterator[_Weight]:
    """The frozen tensors of a module that nobody has ``seen`` yet, with what bitsandbytes needs to unpack them."""
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            yield _Weight(parameter, "data", parameter.device, parameter.data)
            state = getattr(parameter, "quant_state", None)
            while state is not None:  # its scales may be packed themselves
                for name, value in vars(state).items():
                    if isinstance(value, torch.Tensor) and value.dim() > 0:
                        yield _Weight(state, name, value.device, value)
                state = getattr(state, "state2", None)
        if with_buffers:
            for name, buffer in part.named_buffers(recurse=False):
                yield _Weight(part, name, buffer.device, buffer)


def _compute_device(causal: torch.nn.Module) -> torch.device:
    """Where arithmetic happens: where the adapters are."""
    parameters = list(causal.parameters())
    return next((p.device for p in parameters if p.requires_grad), parameters[0].device)


def _mapped_files() -> list[range]:
    """Addresses of this process that are pages of files (Linux); a model's file may be mapped already."""
    maps = Path("/proc/self/maps")
    stretches = []
    for line in maps.read_text().splitlines() if maps.exists() else ():
        addresses, _, _, _, inode, *_ = line.split()
        if inode != "0":
            start, stop = (int(address, 16) for address in addresses.split("-"))
            stretches.append(range(start, stop))
    return stretches
