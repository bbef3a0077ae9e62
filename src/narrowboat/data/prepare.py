"""Preparation: from files to rows that can be trained on, with an account of every token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.account import Account
from narrowboat.data.making import Maker
from narrowboat.data.packing import best_fit
from narrowboat.data.records import Document, recognise, to_document
from narrowboat.data.sources import Broken, Record, Source, find, read
from narrowboat.data.store import Rows, Store, to_batch
from narrowboat.errors import DataError
from narrowboat.events import Notice, Tell
from narrowboat.options.schema import Options

BATCH_DOCUMENTS = 64


@dataclass(frozen=True)
class Prepared:
    """Rows to learn from, rows to measure on (never learnt, one example each), and the account of both."""

    train: Rows
    heldout: Rows
    account: Account


def prepare(
    options: Options, tokenizer: Any, max_positions: int, tell: Tell, cache_folder: Path | None = None
) -> Prepared:
    """Read ``data.train`` and ``data.heldout``, and make rows for a model of ``max_positions``.

    Args:
        options: what to read, and how to cut, compress and pack it.
        tokenizer: the model's transformers tokenizer.
        max_positions: the model's number of positions: no example is longer.
        tell: takes notices of what was skipped, cut or dropped.
        cache_folder: where prepared data is kept and found again; without it, it is held in memory.

    Raises:
        DataError: for a missing path, no usable record, or nothing to learn in any of them.
    """
    max_tokens = min(options.data.max_tokens or max_positions, max_positions)
    maker = Maker(options, tokenizer, max_tokens)
    store, account = _make_all(options.data.train, options, maker, tell, "data.train")
    if options.data.heldout:
        heldout_store, heldout_account = _make_all(options.data.heldout, options, maker, tell, "data.heldout")
        train_numbers, heldout_numbers = np.arange(len(store)), np.arange(len(heldout_store))
        account.add(heldout_account)
    else:
        heldout_store = store
        train_numbers, heldout_numbers = _split(store, options.data.heldout_share, options.train.seed)
    train = Rows(store, _pack(store, train_numbers, options))
    heldout = Rows(heldout_store, [[number] for number in heldout_numbers.tolist()])
    account.num_rows = len(train)
    account.row_tokens = int(train.lengths.max())
    account.num_train_examples, account.num_heldout_examples = len(train_numbers), len(heldout)
    return Prepared(train, heldout, account)


def _make_all(paths: Sequence[str], options: Options, maker: Maker, tell: Tell, key: str) -> tuple[Store, Account]:
    if not paths:
        raise DataError(f"{key} names no file; write for example {key}: documents.jsonl")
    sources, left_out = find(paths)
    account = Account(left_out_files=left_out)
    batches = [to_batch(list(maker.make(batch, account))) for batch in _documents(sources, options, account)]
    _tell(account, tell, key)
    if options.data.strict and account.broken:
        raise DataError("\n".join(f"{place}: {reason}" for place, reason in account.broken))
    store = Store(batches)
    names = ", ".join(paths)
    if not account.num_documents:
        first = f"; the first: {account.broken[0][0]}: {account.broken[0][1]}" if account.broken else ""
        raise DataError(f"{key} ({names}): no record can be used, {len(account.broken):,} were skipped{first}")
    if not account.learnt_tokens:
        reasons = "; ".join(f"{reason}: {num:,} tokens" for reason, num in account.dropped_tokens.items())
        raise DataError(
            f"{key} ({names}): no token would be learnt out of {account.read_tokens:,} in {account.num_documents:,} "
            f"documents ({reasons or 'every one is masked'}); look at data.learn, data.max_tokens and the chat template"
        )
    return store, account


def _documents(sources: Sequence[Source], options: Options, account: Account) -> Iterator[list[tuple[int, Document]]]:
    """Numbered documents in batches; broken records go into the account."""
    batch: list[tuple[int, Document]] = []
    number = 0
    for source in sources:
        for record in read(source):
            document = _document(record, options, account)
            if document is not None:
                batch.append((number, document))
                number += 1
            if len(batch) == BATCH_DOCUMENTS:
                yield batch
                batch = []
    if batch:
        yield batch


def _document(record: Record | Broken, options: Options, account: Account) -> Document | None:
    if isinstance(record, Broken):
        account.broken.append((record.place, record.reason))
        return None
    try:
        name = options.data.format if options.data.format != "auto" else recognise(record.value)
        document = to_document(record.place, record.value, record.kind, name)
    except DataError as error:
        account.broken.append((record.place, str(error)))
        return None
    account.formats[name] += 1
    return document


def _tell(account: Account, tell: Tell, key: str) -> None:
    if account.broken:
        total = account.num_documents + len(account.broken)
        shown = "; ".join(f"{place}: {reason}" for place, reason in account.broken[:5])
        more = f"; and {len(account.broken) - 5:,} more" if len(account.broken) > 5 else ""
        tell(Notice(f"{key}: kept {account.num_documents:,} of {total:,} records; skipped: {shown}{more}"))
    for reason, num_tokens in account.dropped_tokens.items():
        tell(Notice(f"{key}: dropped {num_tokens:,} of {account.read_tokens:,} tokens: {reason}"))
    if account.num_joined_turns:
        tell(Notice(f"{key}: {account.num_joined_turns:,} turns joined to the turn before by the same speaker"))
    if account.left_out_files:
        names = ", ".join(f"{num:,} {suffix}" for suffix, num in account.left_out_files.most_common(8))
        tell(Notice(f"{key}: {account.left_out_files.total():,} files left out, of kinds that are not read: {names}"))


def _split(store: Store, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Examples to learn from and to hold out, by whole documents; at least one of each where there are two."""
    of = store.column("document")
    documents = np.unique(of)
    num = min(max(round(share * len(documents)), 1), len(documents) - 1) if share else 0
    chosen = np.random.default_rng(seed).permutation(documents)[:num]
    is_heldout = np.isin(of, chosen)
    return np.flatnonzero(~is_heldout), np.flatnonzero(is_heldout)


def _pack(store: Store, numbers: NDArray[np.int64], options: Options) -> list[list[int]]:
    if not options.packing.enabled:
        return [[number] for number in numbers.tolist()]
    lengths = store.lengths[numbers]
    row_tokens = max(options.packing.row_tokens or 0, int(lengths.max()))
    return [[int(numbers[i]) for i in group] for group in best_fit(lengths, row_tokens)]
