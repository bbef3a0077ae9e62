"""The account of the data: every token of the input is in exactly one of the counts.

tokens in = learnt + context + masked + dropped, by reason. What is shown a second time is counted in and is in
``context``; so tokens in = read + repeated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Account:
    """Counts that can be added up: each worker keeps its own."""

    num_documents: int = 0
    num_segments: int = 0
    num_examples: int = 0
    num_joined_turns: int = 0
    read_tokens: int = 0  # by the training tokenizer, with its special tokens and the template's words
    repeated_tokens: int = 0  # shown again: overlap, pinned turns, notes about omissions
    learnt_tokens: int = 0
    context_tokens: int = 0
    masked_tokens: int = 0
    dropped_tokens: Counter[str] = field(default_factory=Counter)  # by reason
    dropped_documents: Counter[str] = field(default_factory=Counter)  # by reason
    broken: list[tuple[str, str]] = field(default_factory=list)  # place and reason of records that cannot be used
    formats: Counter[str] = field(default_factory=Counter)
    kept_share: list[float] = field(default_factory=list)  # of dialogues that were compressed
    num_rows: int = 0
    row_tokens: int = 0
    num_train_examples: int = 0
    num_heldout_examples: int = 0
    left_out_files: Counter[str] = field(default_factory=Counter)  # by suffix
    histogram: dict[int, int] = field(default_factory=dict)  # examples by length, up to the key

    @property
    def tokens_in(self) -> int:
        """Read and repeated."""
        return self.read_tokens + self.repeated_tokens

    @property
    def tokens_out(self) -> int:
        """The other side of the equation."""
        return self.learnt_tokens + self.context_tokens + self.masked_tokens + self.dropped_tokens.total()

    def add(self, other: Account) -> None:
        """Add another one's counts to these."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif isinstance(value, dict):
                getattr(self, name).update({k: value[k] + getattr(self, name).get(k, 0) for k in value})
            else:
                setattr(self, name, getattr(self, name) + value)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        counts = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        return counts | {"tokens_in": self.tokens_in, "tokens_out": self.tokens_out, "num_broken": len(self.broken)}
