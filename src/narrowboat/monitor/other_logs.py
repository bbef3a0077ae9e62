"""Logs of transformers' and TRL's trainers, read as a history: what they print each few steps, and their errors."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from narrowboat.errors import DataError
from narrowboat.events import Evaluated, StepDone
from narrowboat.monitor.history import EVENTS_FILE, History, Session, read_history


def read_any(path: Path) -> tuple[History, list[str]]:
    """A run's folder or its ``events.jsonl``; else another tool's log or ``trainer_state.json``, with its lines.

    Raises:
        DataError: there is nothing, or it cannot be read.
    """
    if path.is_dir() and not (path / EVENTS_FILE).exists() and (path / "trainer_state.json").exists():
        path = path / "trainer_state.json"
    if path.is_dir() or path.suffix == ".jsonl":
        return read_history(path / EVENTS_FILE if path.is_dir() else path), []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Name a run folder or a log.") from None
    history = History(sessions=[Session(datetime.now(UTC), 0, datetime.now(UTC))])
    for number, entry in enumerate(_entries(path, text), 1):
        _take(history, entry, int(entry.get("step", number)))
    return history, text.splitlines()


def _entries(path: Path, text: str) -> Iterator[Mapping[str, Any]]:
    """What a trainer logged: dictionaries, each on a line of its own or in ``log_history``."""
    if path.suffix == ".json":
        with suppress(ValueError, AttributeError):
            yield from json.loads(text).get("log_history", [])
        return
    for line in text.splitlines():
        start, stop = line.find("{'"), line.rfind("}")
        if 0 <= start < stop:
            with suppress(ValueError, SyntaxError):
                entry = ast.literal_eval(line[start : stop + 1].replace(": nan", ": 'nan'").replace(": inf", ": 'inf'"))
                if isinstance(entry, dict):
                    yield entry


def _take(history: History, entry: Mapping[str, Any], step: int) -> None:
    with suppress(ValueError, TypeError):
        if "loss" in entry:
            rate, norm = float(entry.get("learning_rate", 1e-3)), float(entry.get("grad_norm", 0.0))
            history.steps[step] = StepDone(step, 0, float(entry["loss"]), rate, norm, 0, 0, 1, 0.0, 0, 0)
        if "eval_loss" in entry:
            seconds = float(entry.get("eval_runtime", 0.0))
            history.evaluations[step] = Evaluated(step, float(entry["eval_loss"]), 0, seconds)
