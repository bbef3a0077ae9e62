"""The store: examples as Arrow record batches, in memory or mapped from shards on disk; four bytes a token.

Token ids are stored as they are. Which of them are learnt is stored as run lengths (not learnt, learnt, not learnt,
...), which are a few numbers for most examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from narrowboat.data.examples import IGNORED, Example, Row
from narrowboat.data.fingerprint import Fingerprint, combined

SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "runs": pa.list_(pa.int32()),  # run lengths: not learnt, learnt, not learnt, ...
        "num_supervised": pa.int32(),
        "document": pa.int32(),
        "segment": pa.int32(),
        "offset": pa.int64(),
        "kept": pa.float32(),
        "source": pa.string(),
        "before": pa.int32(),
        "after": pa.int32(),
    }
)


def to_batch(examples: Sequence[Example]) -> pa.RecordBatch:
    """Examples as one record batch."""
    return pa.RecordBatch.from_arrays(
        [
            _lists([example.input_ids for example in examples]),
            _lists([_runs(example.labels != IGNORED) for example in examples]),
            pa.array([example.num_supervised for example in examples], pa.int32()),
            pa.array([example.document for example in examples], pa.int32()),
            pa.array([example.segment for example in examples], pa.int32()),
            pa.array([example.offset for example in examples], pa.int64()),
            pa.array([example.kept for example in examples], pa.float32()),
            pa.array([example.source for example in examples], pa.string()),
            pa.array([example.before for example in examples], pa.int32()),
            pa.array([example.after for example in examples], pa.int32()),
        ],
        schema=SCHEMA,
    )


def _lists(arrays: Sequence[NDArray[np.int32]]) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    values = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(np.int32)))


def _runs(learnt: NDArray[np.bool_]) -> NDArray[np.int32]:
    changes = np.flatnonzero(np.diff(learnt)) + 1
    edges = np.concatenate([[0], changes, [len(learnt)]])
    if len(learnt) and learnt[0]:
        edges = np.concatenate([[0], edges])  # a first run of length 0
    return np.diff(edges).astype(np.int32)


def shifted(batch: pa.RecordBatch, num_segments: int, num_tokens: int) -> pa.RecordBatch:
    """Examples of a document's later block, with segments and offsets counted from the blocks before."""
    for name, by in (("segment", num_segments), ("offset", num_tokens)):
        moved = pc.add(batch.column(name), pa.scalar(by, SCHEMA.field(name).type))
        batch = batch.set_column(batch.schema.get_field_index(name), name, moved)
    return batch


class Store:
    """Examples by number, without reading the others.

    Args:
        batches: record batches of ``SCHEMA``.
        fingerprint: their fingerprint, if it is known.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], fingerprint: str = "") -> None:
        self.batches = [batch for batch in batches if len(batch)]
        self._firsts = np.cumsum([0, *(len(batch) for batch in self.batches)])
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, number: int) -> Example:
        if not 0 <= number < len(self):
            raise IndexError(number)
        which = int(np.searchsorted(self._firsts, number, side="right")) - 1
        batch, at = self.batches[which], number - int(self._firsts[which])
        columns = {name: batch.column(name)[at] for name in batch.schema.names}
        input_ids = columns["input_ids"].values.to_numpy(zero_copy_only=True)
        runs = columns["runs"].values.to_numpy(zero_copy_only=True)
        learnt = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        return Example(
            input_ids,
            np.where(learnt, input_ids, np.int32(IGNORED)),
            *(columns[name].as_py() for name in SCHEMA.names[3:]),
        )

    def numbered_from(self, first: int) -> Store:
        """The same examples, with documents numbered from ``first``."""
        if not first:
            return self
        name = "document"
        numbers = (pc.add(batch.column(name), pa.scalar(first, pa.int32())) for batch in self.batches)
        place = SCHEMA.get_field_index(name)
        moved = [batch.set_column(place, name, column) for batch, column in zip(self.batches, numbers, strict=True)]
        return Store(moved)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of all token ids, labels and their order (``fingerprint.py``)."""
        if not self._fingerprint:
            gathered = Fingerprint()
            for batch in self.batches:
                gathered.add(batch)
            self._fingerprint = str(gathered)
        return self._fingerprint

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Length of each example in tokens."""
        arrays = [np.diff(batch.column("input_ids").offsets.to_numpy()) for batch in self.batches]
        return np.concatenate(arrays).astype(np.int32) if arrays else np.empty(0, np.int32)

    @cached_property
    def begins_learnt(self) -> NDArray[np.bool_]:
        """For each example: whether its first own token is learnt."""
        arrays = []
        for batch in self.batches:
            runs = batch.column("runs")
            num_unlearnt = runs.values.to_numpy()[runs.offsets.to_numpy()[:-1]]
            arrays.append(num_unlearnt == batch.column("before").to_numpy())
        return np.concatenate(arrays) if arrays else np.empty(0, np.bool_)

    @cached_property
    def largest_id(self) -> int:
        """The largest token id; -1 where there are no tokens."""
        largest = (pc.max(batch.column("input_ids").values).as_py() for batch in self.batches)
        return max((found for found in largest if found is not None), default=-1)

    def column(self, name: str) -> NDArray[np.int32]:
        """One number for each example: num_supervised, document, segment or offset."""
        arrays = [batch.column(name).to_numpy(zero_copy_only=True) for batch in self.batches]
        return np.concatenate(arrays) if arrays else np.empty(0, np.int32)


class Rows:
    """Packed rows over a store: ``rows[i]`` is built when it is used; ``lengths`` and ``num_supervised`` are
    precomputed.
    """

    def __init__(self, store: Store, groups: Sequence[Sequence[int]]) -> None:
        self.store = store
        self._members = np.array([example for group in groups for example in group], np.int64)
        self._firsts = np.cumsum([0, *(len(group) for group in groups)])

    @classmethod
    def packed(cls, store: Store, numbers: NDArray[np.int64], rows: NDArray[np.int64]) -> Rows:
        """Put the examples ``numbers`` into the rows with the numbers ``rows``, which ``packing.row_numbers`` gives."""
        packed = cls(store, ())
        packed._members = numbers[np.argsort(rows, kind="stable")]
        packed._firsts = np.concatenate([[0], np.cumsum(np.bincount(rows))])
        return packed

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, number: int) -> Row:
        if not 0 <= number < len(self):
            raise IndexError(number)
        members = self._members[self._firsts[number] : self._firsts[number + 1]].tolist()
        return Row.join([self.store[member] for member in members], members)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the store's token ids and labels, and of the examples of each row in order.

        Runs with the same fingerprint and schedule (seed, batch_tokens, longest_first) see the same data.
        """
        return combined([self.store.fingerprint, self._members, self._firsts])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each row in tokens."""
        return self._sum(self.store.lengths)

    @cached_property
    def num_supervised(self) -> NDArray[np.int64]:
        """Number of learnt tokens of each row."""
        return self._sum(self.store.column("num_supervised"))

    def _sum(self, values: NDArray[np.int32]) -> NDArray[np.int64]:
        if not len(self):
            return np.empty(0, np.int64)
        return np.add.reduceat(values[self._members].astype(np.int64), self._firsts[:-1])
