"""Shows prepared data: the account as a table, and examples in colour (learnt, context, masked).

The functions return renderables of rich for a console to print.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from narrowboat.data.account import Account
from narrowboat.data.examples import IGNORED, Example
from narrowboat.data.prepare import Prepared

LEARNT, CONTEXT, MASKED, CUT_OUT = "bold green", "cyan", "dim", "italic yellow"
STYLES = {"learnt": LEARNT, "context": CONTEXT, "masked": MASKED}
MARKS = {"learnt": ("⟦", "⟧"), "context": ("⟨", "⟩")}  # put around runs of tokens where there are no colours
ASCII_MARKS = {"learnt": ("[[", "]]"), "context": ("<<", ">>")}
NO_MARKS: Mapping[str, tuple[str, str]] = {}
_MOST_CHARS = 1200  # longest run of tokens that is shown; the middle of a longer one is left out


def account_table(account: Account, bar: str = "█") -> RenderableType:
    """The account as a table: what was read, what became of every token, and a histogram of lengths drawn with
    ``bar``.
    """
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")

    def line(name: str, number: int, of: int = 0, note: str = "", style: str = "") -> None:
        share = f"{number / of:.1%}" if of else ""
        table.add_row(Text(name, style), f"{number:,}", " ".join(part for part in (share, note) if part))

    formats = ", ".join(f"{num:,} {name}" for name, num in account.formats.most_common())
    line("documents", account.num_documents, note=formats)
    if account.num_broken:
        line(
            "records skipped",
            account.num_broken,
            note=f"the first: {_short(account.broken[0][0])}: {account.broken[0][1]}",
        )
    if account.num_segments:
        line("segments", account.num_segments)
    line("examples", account.num_examples, note=f"{account.num_heldout_examples:,} held out")
    total = account.tokens_in
    note = f"{account.read_tokens:,} read, {account.repeated_tokens:,} shown again" if account.repeated_tokens else ""
    line("tokens in", total, note=note, style="bold")
    line("  learnt", account.learnt_tokens, total, style=LEARNT)
    line("  context", account.context_tokens, total, style=CONTEXT)
    line("  masked", account.masked_tokens, total, style=MASKED)
    for reason, num_tokens in account.dropped_tokens.most_common():
        line("  dropped", num_tokens, total, reason, "red")
    for source in account.sources:
        used = f"{source['used_documents']:,} of {source['documents']:,} documents"
        line("from a source", source["used_tokens"], 0, f"{source['name']}: share {source['share']:g}, {used}")
    if account.num_compressed:
        left = 1 - account.compressed_to_tokens / account.compressed_from_tokens
        line("dialogues compressed", account.num_compressed, note=f"{left:.0%} of their tokens left out")
    line("rows", account.num_rows, note=f"of {account.row_tokens:,} tokens or less, {account.row_fill:.1%} full")
    return Group(table, "", _histogram(account, bar))


def _short(place: str) -> str:
    """The last two parts of a path, and the line if there is one."""
    return "/".join(place.split("/")[-2:])


def _histogram(account: Account, bar: str) -> RenderableType:
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    most = max(account.lengths.values(), default=1)
    for tokens, num in sorted(account.lengths.items()):
        table.add_row(f"up to {tokens:,} tokens", f"{num:,}", Text(bar * max(round(30 * num / most), 1), "cyan"))
    return table


def chosen(prepared: Prepared, num: int) -> list[Example]:
    """``num`` examples, spread evenly over the data."""
    store = prepared.train.store
    places = np.linspace(0, len(store) - 1, min(num, len(store))).round().astype(int)
    return [store[number] for number in np.unique(places).tolist()]


def samples(
    prepared: Prepared, tokenizer: Any, num: int, marks: Mapping[str, tuple[str, str]] = NO_MARKS
) -> Iterator[RenderableType]:
    """``num`` examples, spread evenly over the data, with learnt, context and masked text in different colours.

    ``marks`` are put around runs of tokens, for output without colours.
    """
    for example in chosen(prepared, num):
        share = f"{example.num_supervised:,} of {example.num_tokens:,} tokens learnt"
        seen = example.before + example.after
        context = f", {seen:,} context" if seen else ""
        kept = f", {example.kept:.0%} of the dialogue" if example.kept < 1 else ""
        place = f", segment {example.segment + 1}" if example.segment else ""
        title, subtitle = Text(f"{_short(example.source)}{place}"), Text(share + context + kept)
        yield Panel(coloured(example, tokenizer, marks), title=title, subtitle=subtitle)


def coloured(example: Example, tokenizer: Any, marks: Mapping[str, tuple[str, str]] = NO_MARKS) -> Text:
    """An example's text with each run in its colour and between its ``marks``; the middle of long runs is left out."""
    text = Text()
    for shown, kind in parts(example, tokenizer):
        before, after = marks.get(kind, ("", ""))
        if len(shown) <= _MOST_CHARS:
            text.append(f"{before}{shown}{after}", STYLES[kind])
            continue
        text.append(before + shown[: _MOST_CHARS // 2], STYLES[kind])
        text.append(f"\n[... {len(shown) - _MOST_CHARS:,} characters ...]\n", CUT_OUT)
        text.append(shown[-_MOST_CHARS // 2 :] + after, STYLES[kind])
    return text


def parts(example: Example, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """An example's text in runs that are ``learnt``, ``context`` or ``masked``."""
    names = list(STYLES)
    kinds = np.where(example.labels != IGNORED, names.index("learnt"), names.index("masked"))
    kinds[: example.before] = kinds[len(kinds) - example.after :] = names.index("context")
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    for start, end in itertools.pairwise(edges):
        yield tokenizer.decode(example.input_ids[start:end], skip_special_tokens=False), names[kinds[start]]
