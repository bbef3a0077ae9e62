"""The account of the data as a small table: what was read, what becomes of every token, what was left out and why.

Narrow enough for a phone: words to the left, numbers to the right, and no line is broken within a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

WIDTH = 44
NAMED_PLACES = 3
"""Broken records that are named; the report names more."""


@dataclass(frozen=True)
class Entry:
    """A line of the table: what, how many, and the share of all tokens where that means something."""

    label: str
    number: int
    share: float | None = None
    is_part: bool = False


def account_entries(account: Mapping[str, Any]) -> list[Entry]:
    """The lines; what is zero is left out, but for the tokens that are learnt."""
    total = int(account.get("tokens_in") or 0)
    if not total:
        return []
    return [
        Entry("documents", int(account.get("num_documents", 0))),
        Entry("tokens in", total),
        *_parts(account, total),
        *_made(account),
        *_left_out(account),
    ]


def _parts(account: Mapping[str, Any], total: int) -> Iterator[Entry]:
    counted = {
        "learnt": account.get("learnt_tokens", 0),
        "context, seen only": account.get("context_tokens", 0),
        "questions, seen only": account.get("masked_tokens", 0),
    } | {f"dropped: {reason}": number for reason, number in (account.get("dropped_tokens") or {}).items()}
    for label, number in counted.items():
        if number or label == "learnt":
            yield Entry(label, number, number / total, is_part=True)


def _made(account: Mapping[str, Any]) -> Iterator[Entry]:
    named = {
        "segments": "num_segments", "examples to train on": "num_train_examples",
        "examples held out": "num_heldout_examples", "rows": "num_rows", "longest row, tokens": "row_tokens",
    }  # fmt: skip
    yield from (Entry(label, int(account[key])) for label, key in named.items() if account.get(key))


def _left_out(account: Mapping[str, Any]) -> Iterator[Entry]:
    for reason, number in (account.get("dropped_documents") or {}).items():
        yield Entry(f"documents dropped: {reason}", number)
    if account.get("num_broken"):
        yield Entry("records skipped as broken", int(account["num_broken"]))


def account_lines(account: Mapping[str, Any]) -> list[str]:
    """The table in plain text, and the places of the first broken records below it."""
    entries = account_entries(account)
    if not entries:
        return ["nothing was read"]
    lines = [line for entry in entries for line in _lines(entry)]
    places = list(account.get("broken") or [])
    lines += [f"  {place}: {reason}" for place, reason in places[:NAMED_PLACES]]
    if len(places) > NAMED_PLACES:
        lines.append(f"  and {account.get('num_broken', len(places)) - NAMED_PLACES:,} more")
    return lines


def _lines(entry: Entry) -> list[str]:
    label = "  " + entry.label if entry.is_part else entry.label
    number = f"{entry.number:,}" + (f"  {share(entry.share):>6}" if entry.share is not None else " " * 8)
    room = WIDTH - len(number)
    if len(label) < room:
        return [label.ljust(room) + number.rstrip()] if entry.share is None else [label.ljust(room) + number]
    return [label, "".ljust(room) + number.rstrip()]


def share(value: float) -> str:
    """``21 %``; a trace of something is not nothing."""
    return "< 1 %" if 0 < value < 0.005 else f"{100 * value:.0f} %"
