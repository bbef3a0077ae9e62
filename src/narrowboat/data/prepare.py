"""Preparation: turns files into rows for training, with an account of every token.

Files are read as a stream and tokenised on all cores. Prepared data is cached, and found again for the same data,
tokenizer, chat template, options and version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.account import Account
from narrowboat.data.gathering import Gathering, OnProgress
from narrowboat.data.keyframes import AttentionMass
from narrowboat.data.kinds import Source
from narrowboat.data.losses import Limit, is_most, told
from narrowboat.data.making import Maker
from narrowboat.data.mixture import Mixture
from narrowboat.data.packing import row_numbers
from narrowboat.data.sources import Found, find
from narrowboat.data.store import Rows, Store
from narrowboat.data.trains import Trains, num_silent, stretches
from narrowboat.errors import DataError
from narrowboat.events import Notice, Tell
from narrowboat.options.schema import Options


@dataclass(frozen=True)
class Prepared:
    """Rows to train on, held-out rows (one example each), and the account of both.

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
        max_positions: the model's number of positions, which limits the length of examples.
        tell: receives notices of what was skipped, cut or dropped.
        cache_folder: folder of the cache; None holds prepared data in memory.
        on_progress: called after every batch.
        attention: the base model's attention, for ``dialogues.scorer: attention``; such data is not cached.

    Without ``data.train`` there is only held-out data; ``train`` then has the same examples.

    Raises:
        DataError: a path is missing, no record is usable, or no record has anything to learn.
    """
    limit = _limit(options, max_positions, tell)
    maker = Maker(options, tokenizer, limit.tokens, attention)
    folder = None if attention else cache_folder
    preparation = _Preparation(options, Gathering(options, tokenizer, maker, tell, folder, on_progress), limit, tell)
    heldout = find(options.data.heldout, splits=options.data.splits == "auto", heldout=True)
    if options.data.heldout and not options.data.train:
        return preparation.to_measure(heldout)
    mixture, account, held = preparation.to_learn(heldout.sources)
    store = mixture.store() if len(mixture.stores) > 1 else mixture.stores[0]
    if options.data.heldout or held:
        name = ", ".join(options.data.heldout) or "the validation files of data.train"
        heldout.sources += [] if options.data.heldout else held
        heldout_store, heldout_account = preparation.examples(heldout, "data.heldout", name)
        train_numbers, heldout_numbers = np.arange(len(store)), np.arange(len(heldout_store))
        account.add(heldout_account)
    else:
        heldout_store = store
        train_numbers, heldout_numbers = _split(store, options.data.heldout_share, options.train.seed)
    if mixture.shares:
        train_numbers = mixture.chosen(store, train_numbers, options.train.seed, account)
    if options.carry.is_on and (num := num_silent(store, train_numbers)):
        tell(Notice(f"data.train: {num:,} segments have nothing to learn; each is joined to the step after it"))
    return _packed(options, account, (store, train_numbers), (heldout_store, heldout_numbers))


def _packed(
    options: Options,
    account: Account,
    learnt: tuple[Store, NDArray[np.int64]],
    heldout: tuple[Store, NDArray[np.int64]],
) -> Prepared:
    """Pack the training and held-out examples into rows, and complete the account."""
    if options.carry.is_on:
        most_tokens = None if options.carry.gradient_segments is None else options.train.batch_tokens
        train: Rows = Trains(learnt[0], stretches(*learnt, most_tokens))
        held: Rows = Trains(heldout[0], stretches(*heldout, None))
    else:
        train = Rows.packed(*learnt, _pack(learnt[0].lengths[learnt[1]], options))
        held = Rows.packed(*heldout, np.arange(len(heldout[1])))
    account.num_rows = len(train)
    account.row_tokens, account.filled_tokens = int(train.lengths.max()), int(train.lengths.sum())
    stores = [learnt[0]] if learnt[0] is heldout[0] else [learnt[0], heldout[0]]
    tops = 2 ** np.ceil(np.log2(np.concatenate([store.lengths for store in stores]))).astype(np.int64)
    account.lengths = Counter(dict(zip(*(part.tolist() for part in np.unique(tops, return_counts=True)), strict=True)))
    account.num_train_examples, account.num_heldout_examples = len(learnt[1]), len(held)
    return Prepared(train, held, account)


@dataclass(frozen=True)
class _Preparation:
    """Turns sets of files into examples and their accounts."""

    options: Options
    gathering: Gathering
    limit: Limit
    tell: Tell

    def to_measure(self, heldout: Found) -> Prepared:
        """Held-out examples alone."""
        store, account = self.examples(heldout, "data.heldout", ", ".join(self.options.data.heldout))
        numbers = np.arange(len(store))
        return _packed(self.options, account, (store, numbers), (store, numbers))

    def to_learn(self, heldout: Sequence[Source]) -> tuple[Mixture, Account, list[Source]]:
        """Training examples, separately for each source of a mixture, and the files that are held out by their names.

        Files that are also in ``heldout`` are not trained on.
        """
        data = self.options.data
        if not data.train:
            raise DataError("data.train names no file; write for example data.train: documents.jsonl")
        names = [(path,) for path in data.train_paths] if data.shares else [data.train_paths]
        stores, account, held = [], Account(), []
        for paths in names:
            found = find(paths, splits=data.splits == "auto")
            held += found.heldout
            measured = {source.identity for source in heldout}
            learnt = [source for source in found.sources if source.identity not in measured]
            if num := len(found.sources) - len(learnt):
                self.tell(Notice(f"data.train: {num:,} files are also named by data.heldout, and are not trained on"))
                found.sources = learnt
            if found.heldout and data.heldout:
                self.tell(
                    Notice("data.train: its validation files are not used, because data.heldout names other files")
                )
            store, own = self.examples(found, "data.train", ", ".join(paths))
            stores.append(store)
            account.add(own)
        return Mixture([", ".join(paths) for paths in names], data.shares, stores), account, held

    def examples(self, found: Found, key: str, names: str) -> tuple[Store, Account]:
        """Examples of the found files, and their account."""
        for text in found.told:
            self.tell(Notice(f"{key}: {text}"))
        store, account = self.gathering.gather(found.sources, Account(left_out_files=found.left_out), key)
        for text in account.notices():
            self.tell(Notice(f"{key}: {text}"))
        self._check(account, f"{key} ({names})")
        return store, account

    def _check(self, account: Account, names: str) -> None:
        """Stop where there is nothing to learn; report where most of the data is lost."""
        if self.options.data.strict and account.num_broken:
            raise DataError("\n".join(f"{place}: {reason}" for place, reason in account.broken))
        lost = told(account, self.limit)
        if not account.num_documents:
            raise DataError(
                f"{names}: no record can be used, {account.num_broken:,} were skipped{f'; {lost}' if lost else ''}"
            )
        if not account.learnt_tokens:
            raise DataError(
                f"{names}: no token would be learnt out of {account.read_tokens:,} in {account.num_documents:,} "
                f"documents ({lost or 'every one is masked'}); look at data.learn, data.max_tokens and the chat "
                "template"
            )
        if is_most(account):
            self.tell(Notice(f"{names}: most of the data is lost: {lost}"))


def _limit(options: Options, max_positions: int, tell: Tell) -> Limit:
    """The limit of an example's tokens; reports an option that asks for more."""
    limits = [(max_positions, "the model's positions"), (options.data.max_tokens or max_positions, "data.max_tokens")]
    tokens, name = min(limits)
    wishes = {"data.max_tokens": options.data.max_tokens, "segments.max_tokens": options.segments.max_tokens}
    for key, wish in wishes.items():
        if wish is not None and wish > tokens:
            tell(Notice(f"{key}: {wish:,} is above {name}, {tokens:,}, which is used instead"))
    return Limit(tokens, name, max_positions)


def _split(store: Store, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split examples into training and held-out ones by whole documents; both get one where there are two."""
    of = store.column("document")
    documents = np.unique(of)
    num = min(max(round(share * len(documents)), 1), len(documents) - 1) if share else 0
    chosen = np.random.default_rng(seed).permutation(documents)[:num]
    is_heldout = np.isin(of, chosen)
    return np.flatnonzero(~is_heldout), np.flatnonzero(is_heldout)


def _pack(lengths: NDArray[np.int32], options: Options) -> NDArray[np.int64]:
    """The row number of each example."""
    if not options.packing.enabled:
        return np.arange(len(lengths))
    return row_numbers(lengths, options.packing.row_tokens or int(lengths.max()))
