"""A fingerprint of prepared data: a digest of every token id, every label and their order, and of nothing else.

Two data sets have the same fingerprint when a model learns the same from them, whatever their files are called and
however their examples are batched. Price: one pass of BLAKE2 over 4 bytes a token while the data is prepared (a
gigabyte a second). The digest is kept in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

COLUMNS = ("input_ids", "runs", "document", "segment", "offset")
"""Columns that count: token ids, which of them are learnt, and each example's place in its document."""


class Fingerprint:
    """Collects examples batch by batch. Every column, and the lengths of its lists, has its own digest, so the limits
    between batches make no difference.
    """

    def __init__(self) -> None:
        self._values = {name: blake2b(digest_size=16) for name in COLUMNS}
        self._lengths = {name: blake2b(digest_size=16) for name in COLUMNS}

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the examples of a batch of ``store.SCHEMA``."""
        for name in COLUMNS:
            column = batch.column(name)
            if pa.types.is_list(column.type):
                self._lengths[name].update(np.diff(column.offsets.to_numpy()).astype("<i4"))
                column = column.flatten()
            self._values[name].update(column.to_numpy().astype("<i8" if name == "offset" else "<i4", copy=False))

    def passing(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the same batches, adding each one."""
        for batch in batches:
            self.add(batch)
            yield batch

    def __str__(self) -> str:
        return combined(digest.hexdigest() for digest in (*self._lengths.values(), *self._values.values()))


def combined(parts: Iterable[str | NDArray[np.int64]]) -> str:
    """One fingerprint of several, or of numbers, in their order; 32 hexadecimal digits."""
    digest = blake2b(digest_size=16)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part.astype("<i8", copy=False).tobytes()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()
