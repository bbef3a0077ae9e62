"""Reports lost data where little or nothing is left: how much, by which limit, and which value would be enough."""

from __future__ import annotations

from dataclasses import dataclass

from narrowboat.data.account import Account
from narrowboat.data.fitting import TOO_LONG

MOST = 0.5
"""Share of tokens or documents from which the loss counts as most of the data."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of an example's tokens; ``name`` is what sets it, ``positions`` the model's number of positions."""

    tokens: int
    name: str
    positions: int


def is_most(account: Account) -> bool:
    """Whether most of the data is dropped."""
    num_tokens, num_documents = account.dropped_tokens.total(), account.dropped_documents.total()
    return num_tokens > MOST * account.read_tokens or num_documents > MOST * (account.num_documents + num_documents)


def told(account: Account, limit: Limit) -> str:
    """How many tokens and documents were lost, by which reason, and what would help; empty if none were lost."""
    parts = [f"{num:,} of {account.read_tokens:,} tokens: {why}" for why, num in account.dropped_tokens.most_common()]
    parts += [
        f"{num:,} {why}" for why, num in account.dropped_documents.most_common() if why not in account.dropped_tokens
    ]
    if account.num_broken:
        parts.append(
            f"{account.num_broken:,} records skipped, the first {account.broken[0][0]}: {account.broken[0][1]}"
        )
    if account.oversized:
        parts.append(_oversized(account, limit))
    return "; ".join(parts)


def _oversized(account: Account, limit: Limit) -> str:
    """Dialogues whose last exchange alone is too long: the first, the longest, and a value that would be enough."""
    num = account.dropped_documents[TOO_LONG]
    first = ", ".join(f"{place} ({tokens:,} tokens)" for place, tokens in account.oversized[:3])
    said = (
        f"the limit is {limit.tokens:,} tokens by {limit.name}; {num:,} dialogues have a longer last exchange, the "
        f"first {first}; their longest prompt has {account.longest_prompt_tokens:,} tokens, their longest answer "
        f"{account.longest_answer_tokens:,}"
    )
    if account.needed_tokens <= limit.positions:
        said += f"; data.max_tokens: {account.needed_tokens} would hold all of them"
    else:
        said += f"; the longest needs {account.needed_tokens:,}, and the model has {limit.positions:,} positions"
    if account.longest_answer_tokens < limit.tokens:
        said += "; dialogues.oversized: cut_prompt cuts out the middle of long prompts"
    return said
