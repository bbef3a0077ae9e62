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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from narrowboat.data.examples import IGNORED, Row
from narrowboat.data.trains import Train, segments
from narrowboat.engine.feed import LossOf, row_seed
from narrowboat.engine.objective import Forward
from narrowboat.errors import DataError
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.memory.carry.handover import Carry, Handover
from narrowboat.owner.causes import Holding


@dataclass(frozen=True)
class SegmentTokens:
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
    def silent(self) -> SegmentTokens:
        """The same with nothing to predict: no logits are made."""
        return SegmentTokens(self.input_ids, torch.full_like(self.targets, IGNORED), 0, self.follows)


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
    """Takes trains through a model: a ``Feed`` of segments.

    Args:
        carrier: gives the handovers.
        device: where the model is.
    """

    allows_replanning = False  # a train goes through under one plan

    def __init__(self, carrier: Carrier, device: torch.device) -> None:
        self.carrier, self._device = carrier, device
        self._stepped, self._read = _Open(), _Open()  # by steps, and by what looks on meanwhile: evaluations, answers

    def num_backwards(self, rows: Sequence[Row]) -> int:
        """Segments between which gradients flow have one each, if anything is learnt in them."""
        groups = (group for row in rows for group in self._groups(_as_train(row)))
        return sum(len(group) for group, is_learnt in groups if is_learnt)

    def losses(self, rows: Sequence[Row], seed: int, loss_of: LossOf) -> Iterator[torch.Tensor]:
        """Each segment's loss once.

        Where gradients do not reach a loss, segments go through without a graph and give none.

        Raises:
            DataError: a train goes on from where nobody has been, or leaves the model's positions.
        """
        for i, row in enumerate(rows):
            yield from self._losses(_as_train(row), row_seed(seed, i), loss_of)

    def num_evaluations(self, rows: Sequence[Row]) -> int:
        """One for each segment."""
        return sum(len(_as_train(row).lengths) for row in rows)

    def evaluate(self, rows: Sequence[Row], loss_of: LossOf) -> Iterator[torch.Tensor]:
        """One for each segment, in order."""
        for row in rows:
            yield from self._evaluated(_as_train(row), loss_of)

    @torch.no_grad()
    def by_token(self, row: Row, losses_of: LossOf) -> tuple[torch.Tensor, NDArray[np.int32]]:
        """Segment by segment."""
        train = _as_train(row)
        return torch.cat(list(self._evaluated(train, losses_of))), train.targets

    def alone(self, rows: Sequence[Row]) -> Iterator[Forward]:
        """None: each segment needs what those before it left."""
        return iter(())

    @torch.no_grad()
    def read(self, train: Train, model: Any) -> tuple[SegmentTokens, Handover]:
        """Take a document, or what follows where one was left, through ``model``; its last segment stays open, for text
        to be written on.
        """
        carry = self._read.start(train, self.carrier)
        for number, segment in enumerate(self._segments(train), 1):
            is_last = number == len(train.lengths)
            handover = self.carrier.handover(carry, segment.num_tokens, not is_last, leaves_open=is_last)
            model(
                input_ids=segment.input_ids, shift_labels=segment.silent.targets, num_items_in_batch=1,
                position_ids=handover.positions(self._device), dropout_seeds=[0], carry=handover,
            )  # fmt: skip
            carry = handover.after
        return segment, handover

    def state_dict(self) -> dict[str, Any]:
        """The carry of a document in whose middle the last step ended."""
        carries = [carry.state() for carry in self._stepped.carries.values()]
        return {"document": self._stepped.document, "carries": carries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        carries = [self.carrier.carry_of(carry, self._device) for carry in state["carries"]]
        self._stepped = _Open(state["document"], {carry.num_segments: carry for carry in carries})

    def holdings(self) -> Iterator[Holding]:
        """What open documents carry, for the owner's account."""
        for carry in (*self._stepped.carries.values(), *self._read.carries.values()):
            yield from carry.holdings()

    def mark(self) -> tuple[_Open, _Open]:
        """Where it is, for ``go_back``."""
        return replace(self._stepped), replace(self._read)

    def go_back(self, mark: tuple[_Open, _Open]) -> None:
        """Be where ``mark`` was taken."""
        self._stepped, self._read = mark

    def _losses(self, train: Train, seed: int, loss_of: LossOf) -> Iterator[torch.Tensor]:
        carry = self._stepped.start(train, self.carrier)
        for group, is_learnt in self._groups(train):
            befores: list[Carry] = []
            for segment in group[:-1] if is_learnt else group:
                handover = self.carrier.handover(carry, segment.num_tokens, segment.follows)
                with torch.no_grad():
                    loss_of(self._forward(segment.silent, handover, seed))
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
            yield loss_of(self._forward(group[-1], handover, seed))
            carry, later = handover.after, handover.gradients
            del handover
            for segment in reversed(group[:-1]):
                before = befores.pop()
                handover = self.carrier.handover(
                    before, segment.num_tokens, False, later, handed, wants_gradients=bool(befores)
                )
                yield loss_of(self._forward(segment, handover, seed))
                later, handed = handover.gradients, before
        self._stepped.stop(train, carry)

    def _evaluated(self, train: Train, loss_of: LossOf) -> Iterator[torch.Tensor]:
        carry = self._read.start(train, self.carrier)
        for segment in self._segments(train):
            handover = self.carrier.handover(carry, segment.num_tokens, segment.follows)
            del carry
            yield loss_of(self._forward(segment, handover, 0))
            carry = handover.after
        self._read.stop(train, carry)

    def _forward(self, segment: SegmentTokens, handover: Handover, seed: int) -> Forward:
        inputs = {
            "input_ids": segment.input_ids, "shift_labels": segment.targets,
            "position_ids": handover.positions(self._device), "carry": handover,
        }  # fmt: skip
        return Forward(inputs, [seed])

    def _groups(self, train: Train) -> Iterator[tuple[list[SegmentTokens], bool]]:
        """Segments between which gradients flow, and whether there is anything to learn in them."""
        ahead = self._segments(train)
        size = self.carrier.options.gradient_segments or len(train.lengths)
        while group := list(itertools.islice(ahead, size)):
            yield group, any(segment.num_supervised for segment in group)

    def _segments(self, train: Train) -> Iterator[SegmentTokens]:
        """One after the other, so that a long document's tokens are not all on the device."""
        labels = train.targets
        for where, follows in segments(train):
            ids, targets = (torch.from_numpy(part[where].astype("int64")) for part in (train.input_ids, labels))
            num_supervised = int((labels[where] != IGNORED).sum())
            yield SegmentTokens(ids[None].to(self._device), targets[None].to(self._device), num_supervised, follows)


def _as_train(row: Row) -> Train:
    assert isinstance(row, Train), "with a carrier, rows are trains"
    return row
