"""Tables: reads rows of Parquet and Arrow files; only columns that are needed are converted.

A damaged row group, record batch or row is skipped and named. Arrow files are checked before their values are used,
because they contain memory offsets. Price: one pass over the bytes of a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from narrowboat.data.containers import UNREADABLE, said
from narrowboat.data.raw import Broken, Record

ROWS = 64


def parquet_rows(file: str | IO[bytes], name: str, wanted: Set[str], unread: Counter[str]) -> Iterator[Record | Broken]:
    """A record for each row of a Parquet file.

    Args:
        file: the file or its path.
        name: the file's name for messages.
        wanted: columns that are converted; empty converts all.
        unread: counts values in the other columns.
    """
    try:
        table = pq.ParquetFile(file, page_checksum_verification=True)
    except UNREADABLE as error:
        yield Broken(name, f"not a Parquet file that can be read: {said(error)}")
        return
    with table:
        names = table.schema_arrow.names
        if len({*names}) < len(names):
            yield Broken(name, _TWINS)
            return
        columns = [column for column in names if not wanted or column in wanted]
        first = 0
        for group in range(table.num_row_groups):
            described = table.metadata.row_group(group)
            num_read = 0
            try:
                for batch in table.iter_batches(ROWS, row_groups=[group], columns=columns):
                    yield from _rows(batch, name, first + num_read)
                    num_read += len(batch)
            except UNREADABLE as error:
                num_lost = max(described.num_rows - num_read, 1)
                rows = f"rows {first + num_read + 1:,} to {first + described.num_rows:,}"
                yield Broken(f"{name}, row group {group + 1}, {rows}", f"damaged: {said(error)}", num_lost)
            for column in {*names} - {*columns}:
                unread[column] += _num_full(described, column)
            first += described.num_rows


def _num_full(described: Any, column: str) -> int:
    """Number of rows of a row group with a value in ``column``, according to its statistics."""
    for number in range(described.num_columns):
        chunk = described.column(number)
        if chunk.path_in_schema == column and chunk.statistics is not None and chunk.statistics.has_null_count:
            return int(described.num_rows - chunk.statistics.null_count)
    return int(described.num_rows)


def arrow_rows(file: pa.NativeFile, name: str, wanted: Set[str], unread: Counter[str]) -> Iterator[Record | Broken]:
    """A record for each row of an Arrow file, in the stream format (which ``datasets`` writes) or the file format.

    ``name``, ``wanted`` and ``unread`` are those of ``parquet_rows``.
    """
    first = 0
    for number, batch in enumerate(_batches(file), 1):
        if isinstance(batch, str):
            yield Broken(f"{name}, record batch {number}", f"damaged: {batch}")
            continue
        names = batch.schema.names
        if len({*names}) < len(names):
            yield Broken(name, _TWINS)
            return
        columns = [column for column in names if not wanted or column in wanted]
        for column in {*names} - {*columns}:
            unread[column] += _num_in(batch.column(column))
        chosen = batch.select(columns)
        for start in range(0, len(chosen), ROWS):
            yield from _rows(chosen.slice(start, ROWS), name, first + start)
        first += len(batch)


def _num_in(column: pa.Array) -> int:
    """Number of rows with a value, as far as it is known."""
    try:
        column.validate()
    except UNREADABLE:
        return len(column)
    return len(column) - int(column.null_count)


_TWINS = "two columns have the same name"


def _batches(file: pa.NativeFile) -> Iterator[pa.RecordBatch | str]:
    """Yield each record batch, or why it cannot be read."""
    try:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        if not is_file:
            yield from reader
            return
        num = reader.num_record_batches
    except UNREADABLE as error:
        yield said(error)
        return
    for i in range(num):
        try:
            yield reader.get_batch(i)
        except UNREADABLE as error:
            yield said(error)


def _rows(batch: pa.RecordBatch, name: str, first: int) -> Iterator[Record | Broken]:
    """Yield the rows of a batch; where they cannot be converted together, each half is tried."""
    try:
        batch.validate(full=True)
        values: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    except UNREADABLE as error:
        if len(batch) == 1:
            yield Broken(f"{name}, row {first + 1}", f"cannot be converted: {said(error)}")
            return
        half = len(batch) // 2
        yield from _rows(batch.slice(0, half), name, first)
        yield from _rows(batch.slice(half), name, first + half)
        return
    for number, value in enumerate(values, first + 1):
        yield Record(f"{name}, row {number}", value, "record", fills_nulls=True)
