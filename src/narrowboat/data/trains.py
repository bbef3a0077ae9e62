"""Trains: a document's segments in order, for a model that passes a carry (keys and values) from one to the next.

A segment by itself shows some tokens of its neighbour, because its first token could not be predicted otherwise. In a
train no token is shown twice: segments are put back at their places in the document, and the last token of a segment
predicts the first of the next. A document longer than a step batch becomes several trains, in consecutive steps.
Segments without anything to learn, such as those of a long question, are joined to the next segment that has something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.examples import IGNORED, Example, Row, Tokens
from narrowboat.data.packing import best_fit
from narrowboat.data.store import Rows, Store
from narrowboat.errors import DataError


@dataclass(frozen=True, slots=True)
class Train(Row):
    """Consecutive segments of one document; ``lengths`` are the segments' lengths in tokens.

    Attributes:
        document: number of the document.
        segment: number of the first segment, counted from 0.
        offset: position of the first token in the document.
        following: the label of the token after the last one, or ``IGNORED``.
        is_end: whether the document ends here.
        source: file and line, for messages.
    """

    document: int = 0
    segment: int = 0
    offset: int = 0
    following: int = IGNORED
    is_end: bool = True
    source: str = ""

    @property
    def targets(self) -> Tokens:
        """The token that each position has to predict, or ``IGNORED``; ``[tokens]``."""
        return np.append(self.labels[1:], np.int32(self.following)).astype(np.int32)

    @property
    def num_supervised(self) -> int:
        """Number of tokens that are predicted and learnt."""
        return int((self.targets != IGNORED).sum())

    @property
    def position_ids(self) -> Tokens:
        """Positions in the document, ``[tokens]``."""
        return np.arange(self.offset, self.offset + self.num_tokens, dtype=np.int32)

    @classmethod
    def couple(
        cls,
        examples: Sequence[Example],
        numbers: Sequence[int] = (),
        preceding: Example | None = None,
        following: Example | None = None,
    ) -> Train:
        """Join segments into one train, with shared tokens only once.

        Args:
            examples: consecutive segments of one document.
            preceding: the one before, if the document began earlier.
            following: the next one, if the document goes on.
            numbers: which examples of the data set they are, for people.

        Raises:
            DataError: they are not consecutive.
        """
        _refuse_gaps(
            [example for example in (preceding, *examples, following) if example is not None], preceding is None
        )
        stop = 0 if preceding is None else preceding.offset + preceding.num_tokens
        first, ids, labels = stop, [], []
        for example in examples:
            skipped = stop - example.offset
            ids.append(example.input_ids[skipped:])
            labels.append(example.labels[skipped:])
            stop = example.offset + example.num_tokens
        behind = IGNORED if following is None else int(following.labels[stop - following.offset])
        return cls(
            np.concatenate(ids), np.concatenate(labels), tuple(map(len, ids)), tuple(numbers),
            examples[0].document, examples[0].segment, first, behind, following is None, examples[0].source,
        )  # fmt: skip


class Trains(Rows):
    """Rows that are trains; ``rows[i]`` is joined when it is used."""

    @property
    def documents(self) -> NDArray[np.int32]:
        """Number of each train's document."""
        return self.store.column("document")[self._members[self._firsts[:-1]]]

    @property
    def longest_document(self) -> tuple[int, int]:
        """Tokens and segments of the longest document."""
        ends = self.store.column("offset")[self._members] + self.store.lengths[self._members]
        numbers = self.store.column("segment")[self._members] + 1
        return (int(ends.max()), int(numbers.max())) if len(ends) else (0, 0)

    def share_beyond(self, budget_tokens: int, retention_ratio: float = 1.0) -> float:
        """The share of the documents' tokens that a carry of ``budget_tokens`` cannot hold at their ends."""
        documents = self.store.column("document")[self._members]
        lengths = np.zeros(int(documents.max()) + 1, np.int64)
        np.maximum.at(
            lengths, documents, self.store.column("offset")[self._members] + self.store.lengths[self._members]
        )
        kept = np.minimum(np.ceil(lengths * retention_ratio), budget_tokens)
        return float(1 - kept.sum() / lengths.sum())

    @property
    def longest_segment(self) -> int:
        """Tokens of the longest segment."""
        return int(self.store.lengths[self._members].max()) if len(self._members) else 0

    def __getitem__(self, number: int) -> Train:
        if not 0 <= number < len(self):
            raise IndexError(number)
        members = self._members[self._firsts[number] : self._firsts[number + 1]].tolist()
        document = self.store.column("document")

        def neighbour(number: int) -> Example | None:
            is_there = 0 <= number < len(self.store) and document[number] == document[members[0]]
            return self.store[number] if is_there else None

        examples = [self.store[member] for member in members]
        return Train.couple(examples, members, neighbour(members[0] - 1), neighbour(members[-1] + 1))


def stretches(store: Store, numbers: NDArray[np.int64], most_tokens: int | None) -> list[list[int]]:
    """Group the examples ``numbers`` of a store into trains of consecutive segments, documents in order.

    Args:
        store: the store of the examples.
        numbers: rising numbers of examples; whole documents.
        most_tokens: longest train in tokens, unless one segment is longer. Segments without anything to learn are
            joined to the next segment, or at a document's end to the one before. None keeps documents whole.
    """
    documents, lengths = store.column("document")[numbers], store.lengths[numbers]
    learns, hands_on = _learnt(store, numbers)
    trains: list[list[int]] = []
    num_tokens, is_learnt, had_learnt = 0, False, False
    for i, number in enumerate(numbers.tolist()):
        goes_on = i > 0 and documents[i] == documents[i - 1]
        if goes_on and (not is_learnt or most_tokens is None or num_tokens + lengths[i] <= most_tokens):
            trains[-1].append(number)
            num_tokens += int(lengths[i])
        else:
            if i and not goes_on:
                _close(trains, is_learnt, had_learnt)
            had_learnt = goes_on
            trains.append([number])
            num_tokens, is_learnt = int(lengths[i]), False
        is_learnt = bool(is_learnt or learns[i] or hands_on[i])
    _close(trains, is_learnt, had_learnt)
    return trains


def _close(trains: list[list[int]], is_learnt: bool, goes_on: bool) -> None:
    """End a document: remaining segments without anything to learn are joined to the train before."""
    if goes_on and not is_learnt:
        rest = trains.pop()
        trains[-1] += rest


def num_silent(store: Store, numbers: NDArray[np.int64]) -> int:
    """How many of the examples ``numbers`` have no learnt token to predict."""
    learns, hands_on = _learnt(store, numbers)
    return int((~(learns | hands_on)).sum())


def _learnt(store: Store, numbers: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each of the examples ``numbers``: whether a token after its first is learnt, and whether its last token
    predicts a learnt first token of the document's next segment.
    """
    begins = store.begins_learnt[numbers]
    documents = store.column("document")[numbers]
    follows = np.append(documents[1:] == documents[:-1], False)
    return store.column("num_supervised")[numbers] > begins, follows & np.append(begins[1:], False)


class TrainSchedule:
    """The trains of every step batch, as ``StepSchedule`` is for rows: ``schedule[step]``, counted across epochs.

    Every epoch shuffles the documents anew; the trains of one document follow each other, one step each.

    Args:
        trains: the trains of a ``Trains``.
        batch_tokens: tokens of a step batch; a longer document has its steps to itself.
        seed: decides the order, together with the epoch's number.
    """

    def __init__(self, trains: Trains, batch_tokens: int, seed: int) -> None:
        self.seed = seed
        documents: dict[int, list[int]] = {}
        for number, document in enumerate(trains.documents.tolist()):
            documents.setdefault(document, []).append(number)
        short = [stretch[0] for stretch in documents.values() if len(stretch) == 1]
        groups = best_fit(trains.lengths[short], batch_tokens) if short else []
        self._runs = [[[short[i] for i in group]] for group in groups]  # consecutive steps
        self._runs += [[[number] for number in stretch] for stretch in documents.values() if len(stretch) > 1]
        self._steps = sum(map(len, self._runs))
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> list[int]:
        """Numbers of the trains of step batch ``step``."""
        epoch, place = divmod(step, self._steps)
        if self._epoch[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self._runs))
            self._epoch = (epoch, [numbers for run in order.tolist() for numbers in self._runs[run]])
        return self._epoch[1][place]


def segments(train: Train) -> Iterator[tuple[slice, bool]]:
    """The range of tokens of each segment in the train, and whether another segment of the document follows."""
    stop = 0
    for i, length in enumerate(train.lengths):
        start, stop = stop, stop + length
        yield slice(start, stop), i < len(train.lengths) - 1 or not train.is_end


def _refuse_gaps(examples: Sequence[Example], from_start: bool) -> None:
    start = examples[0]
    if from_start and (start.segment or start.offset):
        what = f"segment {start.segment} at token {start.offset:,}"
        raise DataError(
            f"document {start.document} ({start.source}): the part before {what} is missing; prepare the data again."
        )
    for before, after in pairwise(examples):
        end = before.offset + before.num_tokens
        name = f"document {after.document} ({after.source})" if after.source else f"document {after.document}"
        if after.document != before.document or after.segment < before.segment:
            raise DataError(
                f"{name}: segment {after.segment} comes after segment {before.segment} of document "
                f"{before.document}; a carry needs a document's segments in their order."
            )
        if after.segment != before.segment + 1 or after.offset > end:
            raise DataError(
                f"{name}: between segment {before.segment}, which ends at token {end:,}, and segment {after.segment}, "
                f"which starts at token {after.offset:,}, tokens are missing; prepare the data again."
            )
