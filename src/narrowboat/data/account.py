"""The account of the data, in which every token of the input is counted exactly once.

tokens in = learnt + context + masked + dropped (by reason). A token that is shown a second time counts as input again
and is in ``context``; so tokens in = read + repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from narrowboat.data.keys import looks_like
from narrowboat.errors import cut

MAX_NAMED = 20  # broken records that are named; all are counted
UNLEARNT = "records are marked as not to be learnt"


@dataclass
class Account:
    """Counts of what was read; each worker keeps its own account, and accounts can be added up."""

    num_documents: int = 0
    num_segments: int = 0
    num_examples: int = 0
    num_lost: int = 0  # characters that the tokenizer has no token for
    num_open: int = 0  # dialogues whose last answer ends without an end-of-turn token
    num_joined_turns: int = 0
    num_folded_systems: int = 0
    num_unheeded: int = 0  # messages that are marked to be learnt although they are not answers
    read_tokens: int = 0  # by the training tokenizer, with its special tokens and the template's words
    repeated_tokens: int = 0  # shown again: overlap, pinned turns, notes about what was left out
    learnt_tokens: int = 0
    context_tokens: int = 0
    masked_tokens: int = 0
    dropped_tokens: Counter[str] = field(default_factory=Counter)  # by reason
    dropped_documents: Counter[str] = field(default_factory=Counter)  # by reason
    num_broken: int = 0
    broken: list[tuple[str, str]] = field(default_factory=list)  # place and reason of the first ones
    formats: Counter[str] = field(default_factory=Counter)  # records by the format they were read as
    left_out_files: Counter[str] = field(default_factory=Counter)  # by suffix or reason, and folders by name
    unread_fields: Counter[str] = field(default_factory=Counter)  # unknown fields
    aside_fields: Counter[str] = field(default_factory=Counter)  # fields set aside on purpose
    hidden: Counter[str] = field(default_factory=Counter)  # content that the chat template omits
    special_names: Counter[str] = field(
        default_factory=Counter
    )  # names of special tokens in texts, by what they became
    template_dates: Counter[str] = field(default_factory=Counter)  # the fixed date that the chat template was given
    num_compressed: int = 0  # dialogues of which turns were left out
    compressed_from_tokens: int = 0
    compressed_to_tokens: int = 0
    num_cut_prompts: int = 0
    oversized: list[tuple[str, int]] = field(default_factory=list)  # the first dialogues above the limit: place, tokens
    longest_prompt_tokens: int = 0  # in the dialogues above the limit
    longest_answer_tokens: int = 0
    needed_tokens: int = 0  # data.max_tokens that would hold the last exchange of each of them
    sources: list[dict[str, Any]] = field(default_factory=list)  # each source of a mixture and what became of it
    num_train_examples: int = 0
    num_heldout_examples: int = 0
    num_rows: int = 0
    row_tokens: int = 0  # of the longest
    filled_tokens: int = 0  # of all rows
    lengths: Counter[int] = field(default_factory=Counter)  # number of examples by length, rounded up to a power of two

    @property
    def tokens_in(self) -> int:
        """Tokens that were read, and tokens that were shown again."""
        return self.read_tokens + self.repeated_tokens

    @property
    def tokens_out(self) -> int:
        """Learnt, context, masked and dropped tokens; equal to ``tokens_in``."""
        return self.learnt_tokens + self.context_tokens + self.masked_tokens + self.dropped_tokens.total()

    @property
    def row_fill(self) -> float:
        """Share of filled positions if every row were padded to the longest row."""
        places = self.num_rows * self.row_tokens
        return self.filled_tokens / places if places else 0.0

    def add(self, other: Account) -> None:
        """Add the counts of another account."""
        for name, value in vars(other).items():
            if not value:  # as nearly all of one document's are
                continue
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif name.startswith(("longest_", "needed_")):
                setattr(self, name, max(getattr(self, name), value))
            else:
                setattr(self, name, getattr(self, name) + value)
        del self.broken[MAX_NAMED:], self.oversized[MAX_NAMED:]

    def add_broken(self, place: str, reason: str, num: int = 1) -> None:
        """Count ``num`` records that cannot be used."""
        self.num_broken += num
        if len(self.broken) < MAX_NAMED:
            self.broken.append((place, cut(reason)))

    def add_oversized(self, place: str, num_tokens: int, num_prompt: int, num_answer: int) -> None:
        """Note a dialogue whose last exchange alone has ``num_tokens``, too many."""
        self.oversized.append((place, num_tokens))
        self.longest_prompt_tokens = max(self.longest_prompt_tokens, num_prompt)
        self.longest_answer_tokens = max(self.longest_answer_tokens, num_answer)
        self.needed_tokens = max(self.needed_tokens, num_tokens)

    def notices(self) -> Iterator[str]:
        """One sentence for each kind of thing that was skipped, dropped or changed, with its number."""
        if self.num_broken:
            total = self.num_documents + self.num_broken
            shown = "; ".join(f"{place}: {reason}" for place, reason in self.broken[:5])
            more = f"; and {self.num_broken - 5:,} more" if self.num_broken > 5 and len(self.broken) > 5 else ""
            yield f"kept {self.num_documents:,} of {total:,} records; skipped: {shown}{more}"
        yield from self._fields()
        for reason, num_tokens in self.dropped_tokens.items():
            yield f"dropped {num_tokens:,} of {self.read_tokens:,} tokens: {reason}"
        if self.num_compressed:
            cut = 1 - self.compressed_to_tokens / self.compressed_from_tokens
            yield f"{self.num_compressed:,} dialogues were too long; {cut:.0%} of their tokens were left out"
        counted = {
            "characters have no token in this tokenizer, so the model cannot see them": self.num_lost,
            "dialogues end without an end-of-turn token, so the model cannot learn to stop": self.num_open,
            "turns were joined to the turn before by the same speaker": self.num_joined_turns,
            "system prompts were put before the first question: the template takes none": self.num_folded_systems,
            "messages are marked to be learnt, but are not answers; data.learn: all learns them": self.num_unheeded,
            "prompts above the limit were cut in their middle": self.num_cut_prompts,
            UNLEARNT: self.dropped_documents[UNLEARNT],
        }
        yield from (f"{num:,} {text}" for text, num in counted.items() if num)
        for what, num in self.hidden.items():
            yield f"{num:,} {what} are omitted by the chat template, so they are not learnt"
        for what, num in self.special_names.items():
            yield f"{num:,} names of special tokens are in the texts and are read as {what}; see data.special_tokens"
        for date in self.template_dates:
            yield f"the chat template asks for the date and always gets {date}, so the data stays the same"
        if self.left_out_files:
            names = ", ".join(f"{num:,} {suffix}" for suffix, num in self.left_out_files.most_common(8))
            yield f"{self.left_out_files.total():,} files and folders are not read: {names}"

    def _fields(self) -> Iterator[str]:
        """A sentence for each unknown field that looks important, then one sentence for all others."""
        quiet: list[str] = []
        for name, num in self.unread_fields.items():
            if what := looks_like(name.partition(" of a ")[0]):
                yield (
                    f"NOT FOLLOWED: the field {name}, {num:,} times, looks like {what}, and is unknown; docs/data.md "
                    f"has the fields that are read, and data.columns: id={name.partition(' ')[0]} sets it aside"
                )
            else:
                quiet.append(f"{name} ({num:,})")
        if quiet:
            yield f"unknown fields, which are not read: {', '.join(quiet)}"

    def as_dict(self) -> dict[str, Any]:
        """The counts and both sides of the equation, as a dictionary for JSON."""
        counts = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        sums = {"tokens_in": self.tokens_in, "tokens_out": self.tokens_out, "row_fill": round(self.row_fill, 4)}
        return counts | sums

    @classmethod
    def from_dict(cls, counts: dict[str, Any]) -> Account:
        """The account that ``as_dict`` gave."""
        account = cls()
        for name, value in vars(account).items():
            read = counts[name]
            if name == "lengths":
                read = {int(length): num for length, num in read.items()}
            setattr(account, name, Counter(read) if isinstance(value, Counter) else read)
        account.broken = [(place, reason) for place, reason in account.broken]
        account.oversized = [(place, num_tokens) for place, num_tokens in account.oversized]
        return account
