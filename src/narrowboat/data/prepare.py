"""Preparation: from files to rows that can be trained on, with an account of every token.

Files are read as a stream and tokenised over all cores. Prepared data is kept, and found again for the same data,
tokenizer, template, options and version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from narrowboat.data import cache
from narrowboat.data.account import Account
from narrowboat.data.keyframes import AttentionMass
from narrowboat.data.making import Maker
from narrowboat.data.packing import row_numbers
from narrowboat.data.reading import Broken, Progress, Record, blocks, read
from narrowboat.data.records import Document, Text, to_document
from narrowboat.data.sources import Source, find
from narrowboat.data.store import Rows, Store, shifted
from narrowboat.data.trains import Trains, stretches
from narrowboat.data.workers import make_all, num_workers
from narrowboat.errors import DataError
from narrowboat.events import Notice, Tell
from narrowboat.options.schema import Options

BATCH_DOCUMENTS = 256
BATCH_CHARS = 1 << 19
OnProgress = Callable[[int, int], None]
"""``(bytes read, bytes of all sources)``, told after every batch."""


@dataclass(frozen=True)
class Prepared:
    """Rows to learn from, rows to measure on (never learnt, one example each), and the account of both.

    ``train.fingerprint`` and ``heldout.fingerprint`` are digests of all token ids, labels and their order.
    """

    train: Rows
    heldout: Rows
    account: Account


def prepare(
    options: Options,
    tokenizer: Any,
    max_positions: int,
    tell: Tell,
    cache_folder: Path | None = None,
    *,
    on_progress: OnProgress | None = None,
    attention: AttentionMass | None = None,
) -> Prepared:
    """Read ``data.train`` and ``data.heldout``, and make rows for a model of ``max_positions``.

    Args:
        options: what to read, and how to cut, compress and pack it.
        tokenizer: the model's transformers tokenizer.
        max_positions: the model's number of positions: no example is longer.
        tell: takes notices of what was skipped, cut or dropped.
        cache_folder: where prepared data is kept and found again; without it, it is held in memory.
        on_progress: called after every batch.
        attention: the base model's attention, for ``dialogues.scorer: attention``; what it scored is not kept.

    Raises:
        DataError: for a missing path, no usable record, or nothing to learn in any of them.
    """
    max_tokens = _max_tokens(options, max_positions, tell)
    maker = Maker(options, tokenizer, max_tokens, attention)
    preparation = _Preparation(options, tokenizer, maker, tell, None if attention else cache_folder, on_progress)
    store, account = preparation.run(options.data.train, "data.train")
    if options.data.heldout:
        heldout_store, heldout_account = preparation.run(options.data.heldout, "data.heldout")
        train_numbers, heldout_numbers = np.arange(len(store)), np.arange(len(heldout_store))
        account.add(heldout_account)
    else:
        heldout_store = store
        train_numbers, heldout_numbers = _split(store, options.data.heldout_share, options.train.seed)
    if options.carry.is_on:
        most_tokens = None if options.carry.gradient_segments is None else options.train.batch_tokens
        train: Rows = Trains(store, stretches(store, train_numbers, most_tokens))
        heldout: Rows = Trains(heldout_store, stretches(heldout_store, heldout_numbers, None))
    else:
        train = Rows.packed(store, train_numbers, _pack(store.lengths[train_numbers], options))
        heldout = Rows.packed(heldout_store, heldout_numbers, np.arange(len(heldout_numbers)))
    account.num_rows = len(train)
    account.row_tokens, account.filled_tokens = int(train.lengths.max()), int(train.lengths.sum())
    lengths = store.lengths if store is heldout_store else np.concatenate([store.lengths, heldout_store.lengths])
    tops = 2 ** np.ceil(np.log2(lengths)).astype(np.int64)
    account.lengths = Counter(dict(zip(*(part.tolist() for part in np.unique(tops, return_counts=True)), strict=True)))
    account.num_train_examples, account.num_heldout_examples = len(train_numbers), len(heldout)
    return Prepared(train, heldout, account)


@dataclass(frozen=True)
class _Preparation:
    """One set of files to examples and their account."""

    options: Options
    tokenizer: Any
    maker: Maker
    tell: Tell
    cache_folder: Path | None
    on_progress: OnProgress | None

    @property
    def _names(self) -> dict[str, str]:
        """``data.columns`` as ``{their name: the usual name}``."""
        return {yours: usual for usual, _, yours in (pair.partition("=") for pair in self.options.data.columns)}

    def run(self, paths: Sequence[str], key: str) -> tuple[Store, Account]:
        """Examples of the files under ``paths``, found or made."""
        if not paths:
            raise DataError(f"{key} names no file; write for example {key}: documents.jsonl")
        sources, left_out = find(paths)
        account = Account(left_out_files=left_out)
        if self.cache_folder is None:
            store = Store(list(self._make(sources, account)))
        else:
            store, account = self._find_or_make(sources, account, self.cache_folder, key)
        for text in account.notices():
            self.tell(Notice(f"{key}: {text}"))
        _check(account, self.options, f"{key} ({', '.join(paths)})")
        return store, account

    def _find_or_make(
        self, sources: Sequence[Source], account: Account, cache_folder: Path, key: str
    ) -> tuple[Store, Account]:
        options = self.options
        settings: dict[str, Any] = {
            "max_tokens": self.maker.max_tokens,
            "data": options.data.model_dump(include={"format", "columns", "learn"}),
            "segments": options.segments.model_dump(),
            "dialogues": options.dialogues.model_dump(),
            "carries": options.carry.is_on,
        }
        folder = cache_folder / cache.key_of(sources, self.tokenizer, settings)
        with cache.alone(folder):
            found = cache.find(folder)
            if found is not None:
                self.tell(Notice(f"{key}: prepared before, read from {folder}"))
                return found
            if folder.exists():
                self.tell(Notice(f"{key}: what was prepared in {folder} is damaged and is made again"))
            store = cache.keep(folder, self._make(sources, account), account)
        self.tell(Notice(f"{key}: prepared and kept in {folder}"))
        return store, account

    def _make(self, sources: Sequence[Source], account: Account) -> Iterator[pa.RecordBatch]:
        progress, total = Progress(), sum(source.num_bytes for source in sources)
        batches = self._batches(sources, account, progress)
        num = 1 if self.options.dialogues.uses_attention else num_workers(self.options, total)
        document, base_tokens, base_segments = -1, 0, 0
        for made in make_all(batches, self.maker, self.tokenizer, num):
            if made.first != document:
                document, base_tokens, base_segments = made.first, 0, 0
            yield shifted(made.examples, base_segments, base_tokens) if base_tokens else made.examples
            base_tokens += made.account.read_tokens  # in case a further block of the same document follows
            base_segments += made.account.num_segments
            account.add(made.account)
            if self.options.data.strict and account.num_broken:
                raise DataError("\n".join(f"{place}: {reason}" for place, reason in account.broken))
            if self.on_progress is not None:
                self.on_progress(progress.num_bytes, total)

    def _batches(
        self, sources: Sequence[Source], account: Account, progress: Progress
    ) -> Iterator[list[tuple[int, Document]]]:
        """Numbered documents in batches; a block of a very long one is a batch of its own."""
        block_chars = max(BATCH_CHARS, 32 * self.maker.segment_tokens)
        lead_chars = min(32 * max(self.maker.overlap_tokens, 1), block_chars // 4)  # no token is as long
        batch: list[tuple[int, Document]] = []
        number, num_chars = -1, 0
        for source in sources:
            for record in read(source, block_chars, lead_chars, progress):
                for document in self._documents(record, account, block_chars, lead_chars):
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

    def _documents(
        self, record: Record | Broken, account: Account, block_chars: int, lead_chars: int
    ) -> Iterator[Document]:
        """What a record holds; a broken one goes into the account."""
        if isinstance(record, Broken):
            account.add_broken(record.place, record.reason)
            return
        try:
            document, name = to_document(record, self.options.data.format, self._names)
        except DataError as error:
            account.add_broken(record.place, str(error))
            return
        account.formats[name] += record.is_last
        if isinstance(document, Text) and document.num_chars > 2 * block_chars and not record.block:
            for part in blocks(record.place, document.kind, [document.text], block_chars, lead_chars):
                yield to_document(part)[0]
        else:
            yield document


def _max_tokens(options: Options, max_positions: int, tell: Tell) -> int:
    """The longest example; says which wish cannot be met."""
    limits = [(max_positions, "the model's positions"), (options.data.max_tokens or max_positions, "data.max_tokens")]
    limit, name = min(limits)
    wishes = {"data.max_tokens": options.data.max_tokens, "segments.max_tokens": options.segments.max_tokens}
    for key, wish in wishes.items():
        if wish is not None and wish > limit:
            tell(Notice(f"{key}: {wish:,} is above {name}, {limit:,}, and gives way"))
    return limit


def _check(account: Account, options: Options, names: str) -> None:
    """Stop where there is nothing to learn from."""
    first = f"; the first: {account.broken[0][0]}: {account.broken[0][1]}" if account.broken else ""
    if options.data.strict and account.num_broken:
        raise DataError("\n".join(f"{place}: {reason}" for place, reason in account.broken))
    if not account.num_documents:
        raise DataError(f"{names}: no record can be used, {account.num_broken:,} were skipped{first}")
    if not account.learnt_tokens:
        reasons = "; ".join(f"{reason}: {num:,} tokens" for reason, num in account.dropped_tokens.items())
        raise DataError(
            f"{names}: no token would be learnt out of {account.read_tokens:,} in {account.num_documents:,} documents "
            f"({reasons or 'every one is masked'}); look at data.learn, data.max_tokens and the chat template"
        )


def _split(store: Store, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Examples to learn from and to hold out, by whole documents; at least one of each where there are two."""
    of = store.column("document")
    documents = np.unique(of)
    num = min(max(round(share * len(documents)), 1), len(documents) - 1) if share else 0
    chosen = np.random.default_rng(seed).permutation(documents)[:num]
    is_heldout = np.isin(of, chosen)
    return np.flatnonzero(~is_heldout), np.flatnonzero(is_heldout)


def _pack(lengths: NDArray[np.int32], options: Options) -> NDArray[np.int64]:
    """The row of each example."""
    if not options.packing.enabled:
        return np.arange(len(lengths))
    return row_numbers(lengths, options.packing.row_tokens or int(lengths.max()))
