"""A fingerprint of prepared data: of every token id, every label and their order, and of nothing else.

Two data sets have the same fingerprint when a model learns the same from them, whatever their files are called and
however their examples are batched. Price: one pass of BLAKE2 while the data is made, 4 bytes a token (a gigabyte a
second); kept with the cache, so that it costs nothing to ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

COLUMNS = ("input_ids", "runs", "document", "segment", "offset")
"""Token ids, which of them are learnt, and where each example stands in its document."""


class Fingerprint:
    """Gathers examples batch by batch; every column, and its lists' lengths, has a digest of its own, so that it makes
    no difference where one batch ends and the next begins.
    """

    def __init__(self) -> None:
        self._values = {name: blake2b(digest_size=16) for name in COLUMNS}
        self._lengths = {name: blake2b(digest_size=16) for name in COLUMNS}

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the examples of a batch of ``store.SCHEMA``."""
        for name in COLUMNS:
            column = batch.column(name)
            if pa.types.is_list(column.type):
                self._lengths[name].update(np.diff(column.offsets.to_numpy()).astype("<i4"))
                column = column.flatten()
            self._values[name].update(column.to_numpy().astype("<i8" if name == "offset" else "<i4", copy=False))

    def passing(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same batches, each taken on its way."""
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
