"""Batches: which rows an optimizer step sees, which rows go through the model together, and their tensors.

A step batch is a pure function of the seed and the step's number, so a run can be resumed at any step without saved
state. Every epoch has the same number of steps, and shuffles the rows anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from narrowboat.data.examples import IGNORED, Row, positions
from narrowboat.data.packing import row_numbers


class StepSchedule:
    """The rows of every step batch: ``schedule[step]``, with steps counted across epochs; ``len(schedule)`` is one
    epoch.

    A step batch holds at most ``batch_tokens``, or one row that is longer. Every epoch assigns rows anew to slots of
    about their length (within 1/64 of ``batch_tokens``), so the number of steps stays the same.

    Args:
        lengths: tokens of each row.
        batch_tokens: tokens of a step batch.
        seed: decides the order, together with the epoch's number.
        longest_first: start each epoch with the step batch that holds the longest row, so that a run that does not fit
            fails in its first step.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        batch_tokens: int,
        seed: int,
        longest_first: bool = False,
    ) -> None:
        self.lengths: NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)
        self.seed, self.longest_first = seed, longest_first
        self._room = _round_up(self.lengths, batch_tokens)
        steps = row_numbers(self._room, batch_tokens)
        self._steps = int(steps.max(initial=-1)) + 1
        self._step_of_slot = steps[np.argsort(-self._room, kind="stable")]  # slots by falling room
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> list[int]:
        """Row numbers of step batch ``step``."""
        epoch, place = divmod(step, self._steps)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._deal(epoch))
        return self._epoch[1][place]

    def _deal(self, epoch: int) -> list[list[int]]:
        """Rows of each step batch in the order of ``epoch``."""
        random = np.random.default_rng([self.seed, epoch])
        shuffled = random.permutation(len(self.lengths))
        by_room = shuffled[np.argsort(-self._room[shuffled], kind="stable")]  # random among rows of equal room
        steps: list[list[int]] = [[] for _ in range(self._steps)]
        for row, step in zip(by_room.tolist(), self._step_of_slot.tolist(), strict=True):
            steps[step].append(row)
        order = random.permutation(self._steps).tolist()
        if self.longest_first:
            first = max(order, key=lambda step: (max(self.lengths[steps[step]]), self.lengths[steps[step]].sum()))
            order.remove(first)
            order.insert(0, first)
        return [steps[step] for step in order]


def _round_up(lengths: NDArray[np.int64], batch_tokens: int) -> NDArray[np.int64]:
    """Round similar lengths up to the same size, so that rows can change places without exceeding ``batch_tokens``.

    The sizes are the multiples of ``batch_tokens`` / 64 and the fractions 1/2, 1/3, ... of ``batch_tokens``. So rows of
    one length fit as often as they would without rounding.
    """
    parts = batch_tokens // np.arange(1, min(batch_tokens, 4096) + 1)
    sizes = np.unique(np.concatenate([parts, batch_tokens * np.arange(1, 65) // 64]))
    sizes = sizes[sizes > 0]
    fits = lengths <= batch_tokens
    rounded = sizes[np.searchsorted(sizes, np.minimum(lengths, batch_tokens))]
    return np.where(fits, rounded, lengths)


def group_rows(lengths: Sequence[int] | NDArray[np.int64], micro_batch_tokens: int) -> list[list[int]]:
    """Group row indices into micro-batches of similar length, longest first, so that little padding is needed.

    A group's padded size (number of rows times its longest row) is at most ``micro_batch_tokens``, or it is one row.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -int(lengths[i])):
        longest = int(lengths[groups[-1][0]]) if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= micro_batch_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward. All tensors are int64 ``[rows, tokens]``.

    Padding is on the right. Its label is ``IGNORED``, and its positions start at 0 again, so that attention which finds
    packed documents by their restarting positions (as transformers does without an ``attention_mask``) takes it for a
    document of its own. So ``attention_mask`` is given only where rows are padded and none is packed.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    lengths: tuple[tuple[int, ...], ...]  # lengths of each row's documents, without padding
    num_supervised: int
    learnt: (
        torch.Tensor
    )  # [num_supervised], flat positions before learnt labels, kept here so that no device has to compute them

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(map(sum, self.lengths))

    def to(self, device: torch.device | str) -> MicroBatch:
        """The micro-batch on ``device``."""
        mask = None if self.attention_mask is None else self.attention_mask.to(device, non_blocking=True)
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            attention_mask=mask,
            learnt=self.learnt.to(device, non_blocking=True),
        )


def collate(rows: Sequence[Row], pad_id: int) -> MicroBatch:
    """Stack ``rows``, padded on the right to the longest."""
    num_tokens = max(row.num_tokens for row in rows)
    shape = (len(rows), num_tokens)
    input_ids = np.full(shape, pad_id, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    position_ids = np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.int64)
    for i, row in enumerate(rows):
        used = row.num_tokens
        input_ids[i, :used] = row.input_ids
        labels[i, :used] = row.labels
        mask[i, :used] = 1
        padding = (num_tokens - used,) if used < num_tokens else ()
        position_ids[i] = positions((*row.lengths, *padding))
    is_padded = not mask.all()
    is_packed = any(len(row.lengths) > 1 for row in rows)
    return MicroBatch(
        torch.from_numpy(input_ids),
        torch.from_numpy(labels),
        torch.from_numpy(position_ids),
        torch.from_numpy(mask) if is_padded and not is_packed else None,
        tuple(row.lengths for row in rows),
        sum(row.num_supervised for row in rows),
        torch.from_numpy(np.flatnonzero(np.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED) != IGNORED)),
    )
