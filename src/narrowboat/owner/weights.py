"""Where frozen weights rest, and their visits to the device, one layer at a time.

A layer computes far longer on a long sequence than its weights take to arrive, so all layers but the one at work and
the next one may rest in host memory or in a file; the head comes for the loss, and the embedding looks its rows up
where it rests. On a card the next layer is fetched while the last one computes: two layers' weights instead of all,
no time as long as a layer's arithmetic takes longer than its journey. On a CPU a file's mapped pages are the weights
themselves: nothing is copied, and the system drops pages when it needs room. Exact, in every format.

Weights are laid down where they rest as soon as they are read (``lay_down``), so a model may be larger than the device
from its first byte on; and a plan that changes moves them from place to place, never by way of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import nn

from narrowboat.errors import OutOfMemory
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.forwards import forward_of
from narrowboat.model.leaves import Leaf, frozen_leaves, leaves_of
from narrowboat.owner.causes import BASE_WEIGHTS, Holding, Where, account, cause
from narrowboat.owner.lane import Arrival, Lane
from narrowboat.owner.places import Disk, Host, Resting, keep
from narrowboat.plan import Place
from narrowboat.units import format_bytes

HEAD, EMBEDDING = -1, -2
"""The numbers of head and embedding among the units whose weights rest; layers count from 0."""


@dataclass(eq=False)
class _Weight:
    """One frozen tensor.

    Attributes:
        leaf: where it hangs.
        resting: the tensor that hangs there between visits.
        where: that one lies.
        is_mapped: whether it is the pages of the model's own file.
        is_guest: whether it lay on the device when it was taken over, and goes back there in the end.
    """

    leaf: Leaf
    resting: torch.Tensor
    where: Where = "device"
    is_mapped: bool = False
    is_guest: bool = True

    def let_rest(self, tensor: torch.Tensor, where: Where) -> None:
        """Let ``tensor`` take its place for good."""
        self.resting, self.where = tensor, where
        self.leaf.put(tensor)
        account(tensor, BASE_WEIGHTS, where)


class Weights:
    """Moves the frozen weights of one model.

    Args:
        device: where the arithmetic is.
        host, disk: places to rest at.
        keeps_files: nobody writes into the weights, so that they may rest as pages of the model's own files.

    Attributes:
        place: where layers, head and embedding rest.
    """

    def __init__(self, device: torch.device, host: Host, disk: Disk, keeps_files: bool = True) -> None:
        self.place: Place = "device"
        self._keeps_files = keeps_files
        self._device, self._disk = device, disk
        self._places: dict[Place, Resting | None] = {"device": None, "host": host, "disk": disk}
        self._arrived: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        self._laid_down: dict[int, _Weight] = {}  # by storage, until the model is known
        self._units: dict[int, list[_Weight]] = {}
        self._idle: list[_Weight] = []
        self._num_layers = 0
        self._embedding: nn.Module | None = None
        self._undo = ExitStack()
        self._visiting: set[int] = set()
        self._coming: dict[int, Arrival] = {}
        self._last = 0
        self._lane = Lane(device)

    @property
    def copies(self) -> bool:
        """Whether weights come to the device by copies, so that what autograd remembers of them does not last."""
        place = self._places[self.place]
        return bool(self._units) and place is not None and place.copies

    def arrive(self, read: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """A weight as its file has it. One in another format than the model's is cast on its way to disk."""
        with cause(BASE_WEIGHTS, "file"):
            tensor = read()
        if self.place != "disk" or tensor.dtype == dtype or not tensor.is_floating_point():
            return tensor
        room = self._disk.empty(tensor.shape, dtype, BASE_WEIGHTS).copy_(tensor)
        self._arrived[_key(room)] = room.untyped_storage()
        return room

    def lay_down(self, layer: nn.Module, parameter: torch.Tensor, is_mapped: bool) -> None:
        """Take over a parameter of ``layer`` that has just been read; ``is_mapped``: its pages are the file's."""
        for leaf in leaves_of(parameter, layer):
            if _key(leaf.tensor) not in self._laid_down:  # else it is tied to one that was
                arrived_as: Where = "disk" if _key(leaf.tensor) in self._arrived else "file" if is_mapped else "host"
                where = "device" if leaf.tensor.device == self._device and arrived_as != "disk" else arrived_as
                weight = _Weight(leaf, leaf.tensor.detach(), where, is_mapped and self._keeps_files, is_guest=False)
                self._move(weight, self.place)
                self._laid_down[_key(weight.resting)] = weight

    def adopt(self, anatomy: Anatomy) -> None:
        """Know which weights belong together. What else the backbone works with goes to the device; a part that text
        does not go through, such as a tower for pictures, stays where it rests.
        """
        modules = {i: layer.module for i, layer in enumerate(anatomy.layers)} | {HEAD: anatomy.head}
        self._num_layers, self._embedding = len(anatomy.layers), None
        if not any(p.requires_grad for p in anatomy.embedding.parameters()):
            modules[EMBEDDING] = self._embedding = anatomy.embedding
        seen: set[int] = set()
        for unit, module in modules.items():
            leaves = [*frozen_leaves(module, seen)]
            if unit == EMBEDDING:
                leaves += [
                    Leaf(((part, n),)) for part in module.modules() for n, _ in part.named_buffers(recurse=False)
                ]
            self._units[unit] = [self._known(leaf) for leaf in leaves]
        for leaf in frozen_leaves(anatomy.backbone, seen):
            if (weight := self._known(leaf)).where != "device":
                self._move(weight, "device")
        self._idle = [self._known(leaf) for leaf in frozen_leaves(anatomy.causal, seen)]
        self._laid_down.clear()
        self._open()

    def rest(self, place: Place) -> None:
        """Let layers, head and embedding rest at ``place`` from now on."""
        self._close()
        self.place = place
        for weights in self._units.values():
            for weight in weights:
                self._move(weight, place)
        self._open()

    def visit_layer(self, index: int) -> AbstractContextManager[None]:
        """A context in which the weights of a layer are on the device."""
        return self._visit(index)

    def visit_head(self) -> AbstractContextManager[None]:
        """A context in which the head's weights are on the device."""
        return self._visit(HEAD)

    def leave(self) -> None:
        """Let go of the model: what came from the device goes back there, what was laid down elsewhere stays.

        Raises:
            OutOfMemory: the device has no room for it any more; what is not back stays where it rests.
        """
        self._close()
        guests = [w for weights in self._units.values() for w in weights if w.is_guest and w.where != "device"]
        self._units, self._idle, self.place = {}, [], "device"
        for i, weight in enumerate(guests):
            try:
                self._move(weight, "device")
            except torch.OutOfMemoryError as error:
                missing = sum(w.resting.nbytes for w in guests[i:])
                raise OutOfMemory(
                    f"The model's frozen weights do not fit on {self._device} any more: {format_bytes(missing)} of "
                    f"them stay in {'host memory' if weight.where in ('host', 'pinned') else 'a file'} ({error}). Save "
                    "what was trained; it is whole. Move the model only after freeing the device."
                ) from None

    def holdings(self) -> Iterator[Holding]:
        """All that rests, and where."""
        weights = [w for unit in self._units.values() for w in unit] or self._laid_down.values()
        for weight in (*weights, *self._idle):
            yield Holding(weight.resting, BASE_WEIGHTS, weight.where)

    def _known(self, leaf: Leaf) -> _Weight:
        """The weight that hangs at ``leaf``: laid down by us, or somebody else's."""
        known = self._laid_down.get(_key(leaf.tensor))
        if known is not None:
            return _Weight(leaf, known.resting, known.where, known.is_mapped, is_guest=False)
        is_here = leaf.tensor.device == self._device
        return _Weight(leaf, leaf.tensor.detach(), "device" if is_here else "host", is_guest=is_here)

    @torch.no_grad()
    def _move(self, weight: _Weight, place: Place) -> None:
        target, tensor = self._places[place], weight.resting
        where: Where = "device" if target is None else "file" if place == "disk" and weight.is_mapped else target.where
        if weight.where == where:
            return
        in_memory = ("device", "host") if place == "host" and not weight.is_mapped else ("device", "host", "file")
        if where == "file" or (tensor.device == self._device and {weight.where, where} <= {*in_memory}):
            weight.let_rest(tensor, where)  # it lies there already: on a CPU host and device are one
            return
        if target is None:
            with cause(BASE_WEIGHTS):
                tensor = torch.empty_like(tensor, device=self._device).copy_(tensor)
        else:
            tensor = keep(target, tensor, BASE_WEIGHTS)
        weight.let_rest(tensor, where)
        weight.is_mapped = False

    def _open(self) -> None:
        if self._embedding is not None and self.place != "device" and self._device.type != "cpu":
            self._look_up_at_rest(self._embedding)

    def _close(self) -> None:
        """Nobody is on the way any more."""
        self._coming.clear()
        self._lane.close()
        self._undo.close()

    def _look_up_at_rest(self, embedding: nn.Module) -> None:
        """Rows of the embedding are few beside its size: take them where it rests and send only them."""
        own_forward, device = embedding.forward, self._device

        def forward(ids: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = own_forward(ids.cpu())
            return rows.to(device, non_blocking=True)

        self._undo.enter_context(forward_of(embedding, forward))

    @contextmanager
    def _visit(self, unit: int) -> Iterator[None]:
        if not self.copies or unit in self._visiting:
            yield
            return
        tensors = self._take(unit)
        self._visiting.add(unit)
        for weight, tensor in zip(self._units[unit], tensors, strict=True):
            weight.leaf.put(tensor)
        del tensors
        self._send_for(self._next(unit))
        try:
            yield
        finally:
            self._visiting.remove(unit)
            for weight in self._units[unit]:
                weight.leaf.put(weight.resting)

    def _next(self, unit: int) -> int | None:
        """Who is likely to come next: the way goes up the layers and down again, or, without a backward, up again."""
        if unit == HEAD:
            return None
        top, last, self._last = self._num_layers - 1, self._last, unit
        turns, begins = unit == last == top, unit == 0 and last == top > 1
        following = unit - 1 if turns or (unit < last and not begins) else unit + 1
        return following if 0 <= following <= top else None

    def _send_for(self, unit: int | None) -> None:
        if unit is not None and unit not in self._visiting:
            self._coming[unit] = self._fetch(unit)

    def _take(self, unit: int) -> list[torch.Tensor]:
        coming = self._coming.pop(unit, None)
        self._coming.clear()  # whoever is not wanted arrives before the one that is fetched now
        return (coming or self._fetch(unit)).take()

    def _fetch(self, unit: int) -> Arrival:
        with cause(BASE_WEIGHTS):
            return self._lane.fetch([weight.resting for weight in self._units[unit]], waits=self.place == "disk")


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
