"""Rows of a benchmark in a JSON file: what is measured again replaces its row, so that long ones can go in pieces."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "results"
Row = dict[str, Any]


def merge(name: str, rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Write ``rows`` into ``results/NAME.json``, where rows are told apart by ``keys``; all that are there now."""
    path = FOLDER / f"{name}.json"
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    by_key = {tuple(row.get(key) for key in keys): row for row in [*known, *rows]}
    merged = list(by_key.values())
    FOLDER.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "rows": merged}, indent=1) + "\n", encoding="utf-8")
    return merged


def machine() -> Row:
    """Where it was measured."""
    return {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
            "cores": os.cpu_count(), "torch": torch.__version__}  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; all but the first column to the right."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write(name: str, ending: str, text: str) -> None:
    """``results/NAME.ENDING``."""
    (FOLDER / f"{name}.{ending}").write_text(text, encoding="utf-8")
