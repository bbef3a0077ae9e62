"""The model card of an exported model or adapter: base and licence, options, account of the data, and results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from narrowboat.model.embedded import HUB_NAME as EMBEDDED_HUB_NAME
from narrowboat.model.embedded import NAME as EMBEDDED
from narrowboat.monitor.history import History
from narrowboat.options.load import fields
from narrowboat.options.schema import Options
from narrowboat.units import format_bytes

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
LICENCE_LINE = re.compile(r"^license(?:_name)?:\s*([\w.+-]+)\s*$", re.MULTILINE)


def card(model: str, base: Path, options: Options | None, history: History | None, merged: bool) -> str:
    """The model card: Markdown with a YAML header.

    Args:
        model: the name under which the base was loaded.
        base: the base's folder.
        options: the options of the run, if they are known.
        history: the history of the run, if it is known.
        merged: True for a merged model, False for an adapter.
    """
    licence = licence_of(model, base)
    model = model.partition("@")[0]  # its revision is among the options
    hub_name = EMBEDDED_HUB_NAME if model == EMBEDDED else model if _is_hub_name(model) else ""
    shown = f"`{hub_name or base.name}`"
    lines = [
        "---",
        f"library_name: {'transformers' if merged else 'peft'}",
        *([f"base_model: {hub_name}"] if hub_name else []),
        *([f"license: {licence}"] if licence else []),
        f"tags: [{'fine-tuned' if merged else 'lora'}, narrowboat]",
        "---",
        "",
        f"# {'A model fine-tuned from' if merged else 'A LoRA adapter for'} {shown}",
        "",
        f"Made by Narrowboat {version('narrowboat')}. The base's licence holds for it as well: "
        f"{licence or 'see the base; its folder names none'}.",
    ]
    for title, table in (("Results", _results(history)), ("Data", _account(history)), ("Options", _options(options))):
        if rows := list(table):
            lines += ["", f"## {title}", "", "| | |", "|---|---|", *(f"| {_cell(a)} | {_cell(b)} |" for a, b in rows)]
    return "\n".join(lines) + "\n"


def _is_hub_name(model: str) -> bool:
    return HUB_NAME.fullmatch(model) is not None and not Path(model).is_dir()


def licence_of(model: str, base: Path) -> str | None:
    """The licence that the base's own card names; None where it names none."""
    if model == EMBEDDED:
        return "apache-2.0"
    try:
        head = (base / "README.md").read_text(encoding="utf-8", errors="replace")[:20_000].split("\n---", 1)[0]
    except OSError:
        return None
    found = LICENCE_LINE.search(head)
    return found[1] if found else None


def _results(history: History | None) -> Iterator[tuple[str, str]]:
    if history is None:
        return
    first, last = history.heldout_losses
    yield "steps", f"{max(history.steps, default=0):,}"
    yield "tokens", f"{history.num_tokens:,}"
    if first is not None:
        yield "held-out loss before", f"{first:.4f}"
    if last is not None:
        yield "held-out loss after", f"{last:.4f}"
    yield "peak memory", f"{format_bytes(history.peak_bytes)} of {format_bytes(history.budget_bytes)}"
    yield from (history.start.versions if history.start else {}).items()


def _account(history: History | None) -> Iterator[tuple[str, str]]:
    account = history.data.account if history and history.data else {}
    yield from (
        (key.replace("_", " "), f"{value:,}") for key, value in account.items() if isinstance(value, int) and value
    )


def _options(options: Options | None) -> Iterator[tuple[str, str]]:
    """Options that differ from their defaults, without paths of this machine."""
    for key, field in fields() if options else ():
        group, name = key.split(".")
        value: Any = getattr(getattr(options, group), name)
        if value != field.default and group not in ("data", "memory") and key not in ("model.name", "train.folder"):
            yield key, ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _cell(text: str) -> str:
    """Text for a table cell, escaped so that it neither ends the table nor opens a tag."""
    plain = " ".join(text.split())
    return "".join({"|": "\\|", "<": "&lt;", "`": "'"}.get(letter, letter) for letter in plain)
