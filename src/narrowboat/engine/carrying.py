"""A train of segments through the model: their losses in an order in which each can be followed by its backward.

- ``cut``: each segment forwards and at once backwards, with what came before as constants. One pass; what is held is
  one segment's activations and the carry.
- ``exact``: all segments forwards without a graph, then from last to first each again with a graph; its backward gets
  what later segments want of its keys and values, and leaves what it wants of earlier ones. One more forward, and the
  carry at each segment's start is held until its backward. Equal to plain autograd when nothing is dropped.
- a number: ``exact`` within that many segments, ``cut`` between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from narrowboat.data.examples import IGNORED
from narrowboat.data.trains import Train, segments
from narrowboat.errors import DataError
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.memory.carry.handover import Carry, Handover


@dataclass(frozen=True)
class Stretch:
    """One segment's tokens, ready for the model.

    Attributes:
        input_ids: ``[1, tokens]`` int64.
        targets: ``[1, tokens]`` int64, what each has to predict, or -100.
        num_supervised: how many of them are learnt.
        follows: whether a further segment of the document follows.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    num_supervised: int
    follows: bool

    @property
    def num_tokens(self) -> int:
        """Number of its tokens."""
        return self.input_ids.shape[1]

    @property
    def silent(self) -> Stretch:
        """The same with nothing to predict: no logits are made."""
        return Stretch(self.input_ids, torch.full_like(self.targets, IGNORED), 0, self.follows)


class LossOf(Protocol):
    """The model's loss over one segment, which leaves what it hands on in ``handover``."""

    def __call__(self, stretch: Stretch, handover: Handover) -> torch.Tensor: ...


@dataclass
class _Open:
    """A document that is not at its end yet.

    Attributes:
        document: its number; -1 for none.
        carries: by the number of segments gone by: those of the last two steps.
    """

    document: int = -1
    carries: dict[int, Carry] = field(default_factory=dict)

    def start(self, train: Train, carrier: Carrier) -> Carry:
        if train.segment == 0:
            return carrier.start()
        known = self.carries if train.document == self.document else {}
        if train.segment not in known:
            where = f", {train.source}" if train.source else ""
            raise DataError(
                f"Document {train.document}{where}: segment {train.segment} comes, but nothing is carried from segment "
                f"{train.segment - 1}; a document's segments have to come in their order, without gaps."
            )
        return known[train.segment]

    def stop(self, train: Train, carry: Carry) -> None:
        """Keep what the next step needs, and what this one needs if it is done again."""
        if train.is_end:
            self.document, self.carries = -1, {}
        else:
            again = {train.segment: self.carries[train.segment]} if train.segment in self.carries else {}
            self.document, self.carries = train.document, again | {carry.num_segments: carry}


class Carrying:
    """Takes trains through a model.

    Args:
        carrier: gives the handovers.
        device: where the model is.
    """

    def __init__(self, carrier: Carrier, device: torch.device) -> None:
        self.carrier, self._device = carrier, device
        self._stepped, self._read = _Open(), _Open()  # by steps, and by what looks on meanwhile: evaluations, answers

    def num_losses(self, train: Train) -> int:
        """How many losses ``losses`` gives."""
        return sum(len(group) for group, is_learnt in self._groups(train) if is_learnt)

    def losses(self, train: Train, loss_of: LossOf) -> Iterator[torch.Tensor]:
        """Each segment's loss once; run its backward before asking for the next.

        Where gradients do not reach a loss, segments go through without a graph and give none.

        Raises:
            DataError: the train goes on from where nobody has been, or leaves the model's positions.
        """
        carry = self._stepped.start(train, self.carrier)
        for group, is_learnt in self._groups(train):
            befores: list[Carry] = []
            for stretch in group[:-1] if is_learnt else group:
                handover = self.carrier.handover(carry, stretch.num_tokens, stretch.follows)
                with torch.no_grad():
                    loss_of(stretch.silent, handover)
                if is_learnt:
                    befores.append(carry)
                carry = handover.after
            if not is_learnt:
                continue
            handover = self.carrier.handover(
                carry, group[-1].num_tokens, group[-1].follows, wants_gradients=bool(befores)
            )
            handed = carry if befores else None
            del carry  # the handover lets go of it when no backward needs it any more
            yield loss_of(group[-1], handover)
            carry, later = handover.after, handover.gradients
            del handover
            for stretch in reversed(group[:-1]):
                before = befores.pop()
                handover = self.carrier.handover(
                    before, stretch.num_tokens, False, later, handed, wants_gradients=bool(befores)
                )
                yield loss_of(stretch, handover)
                later, handed = handover.gradients, before
        self._stepped.stop(train, carry)

    @torch.no_grad()
    def evaluate(self, train: Train, loss_of: LossOf) -> list[torch.Tensor]:
        """Each segment's loss, in order, without gradients."""
        carry = self._read.start(train, self.carrier)
        losses = []
        for stretch in self._stretches(train):
            handover = self.carrier.handover(carry, stretch.num_tokens, stretch.follows)
            del carry
            losses.append(loss_of(stretch, handover))
            carry = handover.after
        self._read.stop(train, carry)
        return losses

    @torch.no_grad()
    def read(self, train: Train, model: Any) -> tuple[Stretch, Handover]:
        """Take a document, or what follows where one was left, through ``model``; its last segment stays open, for text
        to be written on.
        """
        carry = self._read.start(train, self.carrier)
        for number, stretch in enumerate(self._stretches(train), 1):
            is_last = number == len(train.lengths)
            handover = self.carrier.handover(carry, stretch.num_tokens, not is_last, leaves_open=is_last)
            model(
                input_ids=stretch.input_ids, shift_labels=stretch.silent.targets, num_items_in_batch=1,
                position_ids=handover.positions(self._device), dropout_seeds=[0], carry=handover,
            )  # fmt: skip
            carry = handover.after
        return stretch, handover

    def state_dict(self) -> dict[str, Any]:
        """The carry of a document in whose middle the last step ended."""
        carries = [carry.state() for carry in self._stepped.carries.values()]
        return {"document": self._stepped.document, "carries": carries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        carries = [Carry.from_state(carry, self._device) for carry in state["carries"]]
        self._stepped = _Open(state["document"], {carry.num_segments: carry for carry in carries})

    def mark(self) -> tuple[_Open, _Open]:
        """Where it is, for ``go_back``."""
        return replace(self._stepped), replace(self._read)

    def go_back(self, mark: tuple[_Open, _Open]) -> None:
        """Be where ``mark`` was taken."""
        self._stepped, self._read = mark

    def _groups(self, train: Train) -> Iterator[tuple[list[Stretch], bool]]:
        """Segments between which gradients flow, and whether there is anything to learn in them."""
        stretches = self._stretches(train)
        size = self.carrier.options.gradient_segments or len(train.lengths)
        while group := list(itertools.islice(stretches, size)):
            yield group, any(stretch.num_supervised for stretch in group)

    def _stretches(self, train: Train) -> Iterator[Stretch]:
        """One after the other, so that a long document's tokens are not all on the device."""
        labels = train.targets
        for where, follows in segments(train):
            ids, targets = (torch.from_numpy(part[where].astype("int64")) for part in (train.input_ids, labels))
            num_supervised = int((labels[where] != IGNORED).sum())
            yield Stretch(ids[None].to(self._device), targets[None].to(self._device), num_supervised, follows)
