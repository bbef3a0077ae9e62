"""The owner of a model's bytes: where each tensor rests, who brings it and takes it away, how many bytes lie where.

One for each model, from the first byte that is read to the last that is let go. It holds the frozen weights, adapters,
the inputs of layers that wait for backward, optimizer states and the copies by which a step is taken back; whoever
counts bytes asks it (``holdings``), and nobody else moves a tensor that outlives a layer. A forecast is an owner whose
tensors have no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from narrowboat.events import Tell
from narrowboat.machine.precision import parts_of
from narrowboat.model.anatomy import Anatomy, unwrap
from narrowboat.model.leaves import frozen_leaves
from narrowboat.owner.causes import ADAPTERS, BASE_WEIGHTS, Holding
from narrowboat.owner.inputs import OnDevice, Store, store_at
from narrowboat.owner.lane import Lane
from narrowboat.owner.places import Disk, Host, Resting
from narrowboat.owner.weights import Weights
from narrowboat.plan import MemoryPlan, Place

ATTRIBUTE = "_narrowboat_owner"


def nothing(_: object) -> None:
    """Hears notices, and forgets them."""


class Owner:
    """Owns one model's bytes.

    Args:
        device: where the arithmetic is.
        tell: hears notices.
        keeps_files: nobody writes into the frozen weights, so that they may stay pages of the model's own files.
        as_card: things travel to the device and back although it is a CPU: a forecast of a card.

    Attributes:
        weights: the frozen ones.
        inputs: takes what the forward pass leaves for backward.
    """

    def __init__(
        self, device: torch.device, tell: Tell = nothing, keeps_files: bool = True, as_card: bool = False
    ) -> None:
        self.device = device
        self._lane = Lane(device) if as_card or device.type != "cpu" else None
        self._host, self._disk = Host(device, tell), Disk(device, tell, copies=as_card)
        self.weights = Weights(device, self._host, self._disk, keeps_files)
        self.inputs: Store = OnDevice()
        self._plan: MemoryPlan | None = None
        self._model: nn.Module | None = None
        self._others: list[Callable[[], Iterable[Holding]]] = []

    @classmethod
    def of(cls, model: nn.Module, tell: Tell = nothing) -> Owner:
        """The one that ``model`` has, or a new one for a model that somebody loaded: its device is the adapters'."""
        if (known := owner_of(model)) is not None:
            return known
        parameters = list(model.parameters())
        return cls(next((p.device for p in parameters if p.requires_grad), parameters[0].device), tell)

    def own(self, model: nn.Module) -> None:
        """Be the owner of ``model`` from here on: with its adapter, if it is to have one."""
        self._model = unwrap(model)
        setattr(self._model, ATTRIBUTE, self)

    def bring(self, model: nn.Module) -> None:
        """Bring the adapter of ``model``, which was made where its base rests, to the device."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(self.device)

    def begin(self, anatomy: Anatomy, plan: MemoryPlan) -> None:
        """Take over the model's weights, and arrange everything as ``plan`` says."""
        self.own(anatomy.causal)
        self.weights.adopt(anatomy)
        self.arrange(plan)

    def arrange(self, plan: MemoryPlan) -> None:
        """Let everything rest where ``plan`` says, between two micro-batches."""
        if self._plan is None or plan.inputs != self._plan.inputs:
            self.inputs.close()
            self.inputs = store_at(plan.inputs, self._host, self._disk, self._lane)
        self.weights.rest(plan.weights)
        self._plan = plan

    def place(self, name: Place) -> Resting:
        """The place beside the device that a plan calls ``name``; pinned or pageable host memory unless it is disk."""
        return self._disk if name == "disk" else self._host

    def hold(self, others: Callable[[], Iterable[Holding]]) -> None:
        """Count what ``others`` gives as well: optimizer states, copies."""
        self._others.append(others)

    def holdings(self) -> Iterator[Holding]:
        """Every tensor that outlives a step, what for and where."""
        yield from self.weights.holdings()
        for others in self._others:
            yield from others()

    def end(self) -> None:
        """Let go of the model.

        Raises:
            OutOfMemory: weights that came from the device do not fit there any more.
        """
        self.inputs.close()
        self.inputs, self._plan = OnDevice(), None
        self._others.clear()
        try:
            self.weights.leave()
        finally:
            if self._model is not None:
                delattr(self._model, ATTRIBUTE)
                self._model = None


def holdings(model: nn.Module) -> Iterator[Holding]:
    """All tensors of ``model`` and of what its owner holds for it, each once."""
    owner, seen = owner_of(model), set[int]()
    for holding in (*(owner.holdings() if owner else ()), *_own(model)):
        parts = [part for part in parts_of(holding.tensor) if part.untyped_storage()._cdata not in seen]
        seen.update(part.untyped_storage()._cdata for part in parts)
        yield from (Holding(part, holding.cause, holding.where) for part in parts)


def owner_of(model: nn.Module) -> Owner | None:
    """The owner of ``model``, if it has one."""
    owner: Owner | None = vars(unwrap(model)).get(ATTRIBUTE)
    return owner


def _own(model: nn.Module) -> Iterator[Holding]:
    for parameter in model.parameters():
        if parameter.requires_grad:
            yield Holding(parameter, ADAPTERS)
    for leaf in frozen_leaves(model, set()):
        yield Holding(leaf.tensor, BASE_WEIGHTS)
    for buffer in model.buffers():
        yield Holding(buffer, BASE_WEIGHTS)
