"""A mixture of sources by shares: as many whole documents of each source as its share allows, none of them twice.

The source that is scarcest for its share is used in full. Of the others, documents chosen by the seed are left out. So
an epoch has the shares that were asked for, and no document is learnt more often than another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from narrowboat.data.account import Account
from narrowboat.data.fingerprint import combined
from narrowboat.data.store import Store
from narrowboat.errors import DataError

LEFT_OUT = "left out for the shares of data.train"


@dataclass(frozen=True)
class Mixture:
    """Several stores as one, and which source each example is of.

    Args:
        names: names of the sources.
        shares: each source's share of the tokens of an epoch.
        stores: each source's examples.
    """

    names: Sequence[str]
    shares: Sequence[float]
    stores: Sequence[Store]

    def store(self) -> Store:
        """All examples in one store, with documents numbered throughout."""
        batches, num_documents = [], 0
        for store in self.stores:
            numbered = store.numbered_from(num_documents)
            batches += numbered.batches
            num_documents = max(num_documents, int(numbered.column("document").max(initial=-1)) + 1)
        return Store(batches, combined(store.fingerprint for store in self.stores))

    def chosen(self, store: Store, numbers: NDArray[np.int64], seed: int, account: Account) -> NDArray[np.int64]:
        """The examples among ``numbers`` that are used; a line for each source goes into ``account``.

        Raises:
            DataError: a source has nothing to learn from.
        """
        firsts = np.cumsum([0, *map(len, self.stores)])
        source_of = firsts.searchsorted(numbers, side="right") - 1
        lengths = store.lengths[numbers].astype(np.int64)
        tokens = np.bincount(source_of, lengths, len(self.stores)).astype(np.int64)
        if not tokens.all():
            raise DataError(f"{self.names[int(tokens.argmin())]}: it has nothing to learn, so it cannot have a share")
        total = min(num / share for num, share in zip(tokens.tolist(), self.shares, strict=True))
        documents = store.column("document")[numbers]
        is_kept = np.zeros(len(numbers), np.bool_)
        for i, (name, share) in enumerate(zip(self.names, self.shares, strict=True)):
            own = np.flatnonzero(source_of == i)
            of, inverse = np.unique(documents[own], return_inverse=True)
            sizes = np.bincount(inverse, lengths[own]).astype(np.int64)
            order = np.random.default_rng([seed, i]).permutation(len(of))
            num_kept = max(int(np.cumsum(sizes[order]).searchsorted(share * total + 0.5, side="right")), 1)
            is_kept[own] = np.isin(inverse, order[:num_kept])
            account.sources.append(
                {
                    "name": name, "share": share, "documents": len(of), "tokens": int(tokens[i]),
                    "used_documents": num_kept, "used_tokens": int(sizes[order[:num_kept]].sum()),
                }
            )  # fmt: skip
        _count_left_out(store, numbers[~is_kept], account)
        return numbers[is_kept]


def _count_left_out(store: Store, numbers: NDArray[np.int64], account: Account) -> None:
    """Count left-out tokens as dropped, instead of as learnt, context or masked."""
    num_tokens = int(store.lengths[numbers].sum())
    if not num_tokens:
        return
    num_learnt = int(store.column("num_supervised")[numbers].sum())
    num_around = int(store.column("before")[numbers].sum() + store.column("after")[numbers].sum())
    num_context = min(num_around, account.context_tokens, num_tokens - num_learnt)
    num_masked = min(num_tokens - num_learnt - num_context, account.masked_tokens)
    account.learnt_tokens -= num_learnt
    account.masked_tokens -= num_masked
    account.context_tokens -= num_tokens - num_learnt - num_masked
    account.dropped_tokens[LEFT_OUT] += num_tokens
    account.dropped_documents[LEFT_OUT] += len(np.unique(store.column("document")[numbers]))
