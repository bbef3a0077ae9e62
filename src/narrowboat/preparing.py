"""Prepares data for a run or ahead of it: reads, cuts and packs once, keeps the result, and shows the account of
tokens.

No weights are loaded, except for ``dialogues.scorer: attention``, which needs the base model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from narrowboat.assembly import Setting, Wanted, assembled
from narrowboat.choosing import choose_to_read
from narrowboat.data.prepare import Prepared, prepare
from narrowboat.data.show import ASCII_MARKS, MARKS, NO_MARKS, account_table, chosen, parts, samples
from narrowboat.errors import ModelError, OptionError, OutOfMemory
from narrowboat.events import Event, Notice
from narrowboat.machine.caches import cache_folder
from narrowboat.model.anatomy import num_positions
from narrowboat.model.gaze import Gaze
from narrowboat.options.schema import Options

FOLDER = "data"
"""Folder of prepared data, in Narrowboat's cache folder."""

UNCOUNTED_TOKENS = 2**24
"""The longest row, in tokens, of a model that does not count positions."""


def prepared_data(setting: Setting, quiet: bool = False) -> Prepared:
    """Rows for the setting's model, from the cache or prepared now, with a progress bar if that takes long.

    Raises:
        DataError: a file is missing, or there is nothing to learn.
    """
    options, tokenizer = setting.options, setting.tokenizer
    folder = Path(options.data.cache).expanduser() if options.data.cache else cache_folder() / FOLDER
    max_positions = num_positions(setting.config.get_text_config()) or UNCOUNTED_TOKENS
    with _Bar(quiet) as bar, Gaze(partial(_base, setting)) as gaze:
        attention = gaze if options.dialogues.uses_attention else None
        data = prepare(options, tokenizer, max_positions, setting.tell, folder, on_progress=bar, attention=attention)
    _refuse_unknown_ids(setting, data)
    return data


def _refuse_unknown_ids(setting: Setting, data: Prepared) -> None:
    """Refuse token ids without a row in the embedding, on which the first step would fail with an index error."""
    num_rows = setting.config.get_text_config().vocab_size
    largest = max(rows.store.largest_id for rows in (data.train, data.heldout))
    if largest >= num_rows:
        tokenizer = setting.tokenizer
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ModelError(
            f"{setting.options.model.name}: the data hold token {largest} ({token!r}), and its embedding has "
            f"{num_rows:,} rows; the tokenizer knows {len(tokenizer):,} tokens. Use the model's own tokenizer, or a "
            "checkpoint whose embedding was made larger."
        )


@contextmanager
def _base(setting: Setting) -> Iterator[Any]:
    """The base model alone, under a plan for the longest row that it has to read."""
    plan, budget_bytes = choose_to_read(setting)
    wanted = Wanted(plan, budget_bytes, trains=False, has_adapter=False)
    try:
        with assembled(setting, wanted) as ready:
            yield ready.model
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"Memory ran out while dialogues.scorer: attention read a dialogue: {str(error).splitlines()[0]} A larger "
            "memory.budget would help; dialogues.scorer: lexical needs no model."
        ) from None


def refuse_no_data(options: Options) -> None:
    """Refuse a run without training data, before anything is loaded.

    Raises:
        OptionError: no file is named.
    """
    if not options.data.train:
        raise OptionError("data.train names no file; write for example data.train: documents.jsonl")


def run(options: Options, as_json: bool, num_shown: int) -> None:
    """Prepare data and print its account, as ``narrowboat prepare`` does; notices go to standard error.

    Raises:
        NarrowboatError: a subclass says what was refused.
    """
    refuse_no_data(options)
    setting = Setting.of(options, _say)
    data = prepared_data(setting, quiet=as_json)
    if as_json:
        shown = [
            {
                "source": example.source,
                "segment": example.segment,
                "tokens": example.num_tokens,
                "learnt_tokens": example.num_supervised,
                "parts": [{"text": text, "kind": kind} for text, kind in parts(example, setting.tokenizer)],
            }
            for example in chosen(data, num_shown)
        ]
        print(json.dumps(data.account.as_dict() | ({"samples": shown} if num_shown else {})))
        return
    console = Console(highlight=False)
    marks = (ASCII_MARKS if console.options.ascii_only else MARKS) if console.color_system is None else NO_MARKS
    for sample in samples(data, setting.tokenizer, num_shown, marks):
        console.print(sample)
    console.print(account_table(data.account, "#" if console.options.ascii_only else "█"))


def _say(event: Event) -> None:
    if isinstance(event, Notice):
        print(event.text, file=sys.stderr)


class _Bar:
    """A progress bar of bytes read, on standard error if that is a terminal, from the second batch to the last."""

    def __init__(self, quiet: bool) -> None:
        columns = (TextColumn("prepare"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> _Bar:
        return self

    def __call__(self, num_bytes: int, total_bytes: int) -> None:
        self._progress.update(self._task, completed=num_bytes, total=total_bytes)
        if num_bytes < total_bytes:
            self._progress.start()
        else:  # what is told next is told without it
            self._progress.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
