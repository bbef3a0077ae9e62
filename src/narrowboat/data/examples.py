"""Examples and rows: token ids and labels, ready to train on.

An example is made of one segment or one dialogue. A row is one packed sequence of one or several examples that do not
see each other: positions restart at 0, and no label is predicted across a join.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""The label of a token that is not learnt; torch's ``cross_entropy`` ignores it."""

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids and labels of one segment or dialogue.

    ``labels[i]`` is ``input_ids[i]`` where the token is learnt and ``IGNORED`` elsewhere. ``labels[0]`` is always
    ignored, because no token comes before it. ``offset`` is the position of ``input_ids[0]`` in its document, so that
    segments can be put back in order. ``before`` and ``after`` count the tokens at either end that belong to a
    neighbouring example.
    """

    input_ids: Tokens  # [tokens]
    labels: Tokens  # [tokens]
    document: int = 0
    segment: int = 0
    offset: int = 0
    kept: float = 1.0  # share of the document's tokens that was kept; below 1 where exchanges were left out
    source: str = ""  # file and line, for messages
    before: int = 0
    after: int = 0

    @property
    def num_tokens(self) -> int:
        """Length of the example in tokens."""
        return len(self.input_ids)

    @property
    def num_supervised(self) -> int:
        """Number of tokens that are learnt."""
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True, slots=True)
class Row:
    """One packed sequence; ``lengths`` says where its documents end."""

    input_ids: Tokens  # [tokens]
    labels: Tokens  # [tokens]
    lengths: tuple[int, ...]
    examples: tuple[int, ...] = field(default=())  # numbers of its examples in the data set, for messages

    @classmethod
    def join(cls, examples: Sequence[Example], numbers: Sequence[int] = ()) -> Row:
        """Join ``examples`` into one row."""
        return cls(
            np.concatenate([example.input_ids for example in examples]),
            np.concatenate([example.labels for example in examples]),
            tuple(example.num_tokens for example in examples),
            tuple(numbers),
        )

    @property
    def num_tokens(self) -> int:
        """Length of the row in tokens."""
        return len(self.input_ids)

    @property
    def num_supervised(self) -> int:
        """Number of tokens that are learnt."""
        return int((self.labels != IGNORED).sum())

    @property
    def position_ids(self) -> Tokens:
        """Positions ``0, 1, 2, ...`` that restart with each document, ``[tokens]``."""
        return positions(self.lengths)


def positions(lengths: Sequence[int]) -> Tokens:
    """``positions((2, 3))`` is ``0 1 0 1 2``."""
    ends = np.cumsum(lengths)
    starts = np.repeat(ends - np.asarray(lengths), lengths)
    return (np.arange(ends[-1]) - starts).astype(np.int32)
