"""Gathering: turns files into a store of examples, from the cache, or prepared on all cores and then cached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from narrowboat.data import cache
from narrowboat.data.account import UNLEARNT, Account
from narrowboat.data.keys import Told
from narrowboat.data.kinds import Source
from narrowboat.data.making import Maker
from narrowboat.data.raw import Broken, Record
from narrowboat.data.reading import Reader
from narrowboat.data.records import Document, Records, Text, Unlearnt
from narrowboat.data.store import Store, shifted
from narrowboat.data.workers import make_all, num_workers
from narrowboat.errors import DataError
from narrowboat.events import Notice, Tell
from narrowboat.options.schema import Options

BATCH_DOCUMENTS = 256
BATCH_CHARS = 1 << 19
SETTINGS = {"format", "columns", "learn", "unlearnt", "special_tokens", "strict"}
"""The options of ``data`` that decide what becomes of a file."""
OnProgress = Callable[[int, int], None]
"""Called with ``(bytes read, bytes of all sources)`` after every batch."""


@dataclass(frozen=True)
class Gathering:
    """Makes stores of examples.

    Args:
        options: how to read the data.
        tokenizer: the model's tokenizer.
        maker: makes examples of documents.
        tell: receives a notice about where data was found or kept.
        cache_folder: folder of the cache; None holds the data in memory.
        on_progress: called with the bytes read so far.
    """

    options: Options
    tokenizer: Any
    maker: Maker
    tell: Tell
    cache_folder: Path | None
    on_progress: OnProgress | None

    def gather(self, sources: Sequence[Source], account: Account, key: str) -> tuple[Store, Account]:
        """Examples of ``sources``, and their account. ``key`` is the option that names the sources.

        Raises:
            DataError: the cache cannot be written, or a record cannot be used and the data is read strictly.
        """
        if self.cache_folder is None:
            return Store(list(self._make(sources, account))), account
        options = self.options
        settings: dict[str, Any] = {
            "max_tokens": self.maker.max_tokens,
            "data": options.data.model_dump(include=SETTINGS),
            "segments": options.segments.model_dump(),
            "dialogues": options.dialogues.model_dump(),
            "carries": options.carry.is_on,
        }
        folder = self.cache_folder / cache.key_of(sources, self.tokenizer, settings)
        with cache.alone(folder):
            found = cache.find(folder)
            if found is not None:
                self.tell(Notice(f"{key}: prepared before, read from {folder}"))
                return found
            if folder.exists():
                self.tell(Notice(f"{key}: the prepared data in {folder} is damaged and is prepared again"))
            store = cache.keep(folder, self._make(sources, account), account)
        self.tell(Notice(f"{key}: prepared and kept in {folder}"))
        return store, account

    def _make(self, sources: Sequence[Source], account: Account) -> Iterator[pa.RecordBatch]:
        """Batches of examples; ``account`` is complete after the last batch."""
        reading = self._reading(account)
        total = sum(source.num_bytes for source in sources)
        num = 1 if self.options.dialogues.uses_attention else num_workers(self.options, total)
        document, base_tokens, base_segments = -1, 0, 0
        for made in make_all(_batches(reading.documents(sources)), self.maker, self.tokenizer, num):
            if made.first != document:
                document, base_tokens, base_segments = made.first, 0, 0
            yield shifted(made.examples, base_segments, base_tokens) if base_tokens else made.examples
            base_tokens += made.account.read_tokens  # the next batch may continue the same document
            base_segments += made.account.num_segments
            account.add(made.account)
            if self.options.data.strict and account.num_broken:
                raise DataError("\n".join(f"{place}: {reason}" for place, reason in account.broken))
            if self.on_progress is not None:
                self.on_progress(reading.reader.num_bytes, total)
        account.unread_fields.update(reading.records.told.unread)
        account.aside_fields.update(reading.records.told.aside)

    def _reading(self, account: Account) -> _Reading:
        data = self.options.data
        names = {yours: usual for usual, _, yours in (pair.partition("=") for pair in data.columns)}
        records = Records(data.format, names, Told(data.strict))
        block_chars = max(BATCH_CHARS, 32 * self.maker.segment_tokens)
        lead_chars = min(32 * max(self.maker.overlap_tokens, 1), block_chars // 4)  # longer than any token
        return _Reading(Reader(block_chars, lead_chars, records.wanted), records, account)


@dataclass(frozen=True)
class _Reading:
    """Reads files as documents; what cannot be used is counted in the account."""

    reader: Reader
    records: Records
    account: Account

    def documents(self, sources: Sequence[Source]) -> Iterator[Document]:
        """Every document; a very long text comes in blocks."""
        for source in sources:
            for item in self.reader.read(source):
                if isinstance(item, Broken):
                    self.account.add_broken(item.place, item.reason, item.num)
                else:
                    yield from self._of_record(item)
            self._count_unread(source)

    def _of_record(self, record: Record) -> Iterator[Document]:
        try:
            document, name = self.records.document(record)
        except Unlearnt:
            self.account.dropped_documents[UNLEARNT] += 1
            return
        except DataError as error:
            self.account.add_broken(record.place, str(error))
            return
        self.account.formats[name] += record.is_last
        if isinstance(document, Text) and document.num_chars > 2 * self.reader.block_chars and not record.block:
            for block in self.reader.blocks(record.place, document.kind, [document.text]):
                yield self.records.document(block)[0]
        else:
            yield document

    def _count_unread(self, source: Source) -> None:
        """Count columns that are not read, and so were not converted."""
        for column, num in (+self.reader.unread).items():
            try:
                self.records.told.add(column, num=num)
            except DataError as error:
                self.account.add_broken(source.name, str(error))
        self.reader.unread.clear()


def _batches(documents: Iterable[Document]) -> Iterator[list[tuple[int, Document]]]:
    """Numbered documents in batches; a block of a very long one is a batch of its own."""
    batch: list[tuple[int, Document]] = []
    number, num_chars = -1, 0
    for document in documents:
        is_block = isinstance(document, Text) and (document.block > 0 or not document.is_last)
        number += not (isinstance(document, Text) and document.block)
        if batch and (is_block or len(batch) == BATCH_DOCUMENTS or num_chars > BATCH_CHARS):
            yield batch
            batch, num_chars = [], 0
        if is_block:
            yield [(number, document)]
            continue
        batch.append((number, document))
        num_chars += document.num_chars
    if batch:
        yield batch
