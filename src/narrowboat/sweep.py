"""The sweep: short runs over a grid of option values, ranked by held-out loss.

Every run is a process of its own, so that a failing one does not end the others, and sees the same steps of the same
data (``train.steps`` and ``train.seed`` are the configuration's). optuna hands out the settings and keeps them in a
journal: a sweep that was stopped continues where it was, also in the middle of a run. The folder holds ``trials/``,
``report.html`` with the ranked table and its plot, and ``best.yaml``, the configuration with the best setting.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from narrowboat.errors import Mistake, NarrowboatError, OptionError
from narrowboat.machine.extras import quiet, require
from narrowboat.monitor import report
from narrowboat.monitor.history import EVENTS_FILE, read_history
from narrowboat.options import load as options
from narrowboat.units import format_bytes, format_seconds

BEST, JOURNAL, SETTINGS = "best.yaml", "journal.log", "sweep.json"


@dataclass(frozen=True)
class Trial:
    """One setting and the result of its run; a trial without a loss failed."""

    values: dict[str, str]
    loss: float | None = None
    seconds: float = 0.0
    peak_bytes: int = 0
    error: str | None = None


Run = Callable[[Path, Path, str | None], Trial]
"""Runs the configuration of a file in a folder on a device, and returns the trial without its values."""


def sweep(
    config: Path | None,
    flags: Mapping[str, Any],
    over: Mapping[str, Sequence[str]],
    folder: Path,
    devices: Sequence[str] = (),
    say: Callable[[str], None] = print,
    run: Run | None = None,
) -> list[Trial]:
    """Run every combination of ``over`` (``{"optimizer.lr": ["1e-4", "2e-4"]}``), best first.

    Args:
        config: the file of options, as for ``train``.
        flags: option values that win over the file.
        over: the values of each option that is swept.
        folder: the sweep's folder; a stopped sweep in it continues.
        devices: numbers of CUDA devices, each of which runs one trial at a time; empty runs one trial after another.
        say: receives a line about each trial.
        run: trains one trial; a process of its own, except in tests.

    Raises:
        OptionError: with every mistake of every combination, before anything runs.
        MachineError: optuna is not installed.
        NarrowboatError: no trial has a held-out loss.
    """
    optuna = require("optuna", "narrowboat sweep")
    combinations = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    _check(config, flags, over, combinations, folder)
    study = _study(optuna, folder)
    num_left = _deal_out(study, combinations)
    free: SimpleQueue[str | None] = SimpleQueue()
    for device in [*devices] or [None]:  # type: ignore[list-item]
        free.put(device)

    def objective(trial: Any) -> float:
        values = {key: trial.suggest_categorical(key, list(choices)) for key, choices in over.items()}
        place = folder / "trials" / _slug(values)
        chosen = options.load(config, {**flags, **values, "train.folder": str(place)})
        place.parent.mkdir(parents=True, exist_ok=True)
        file = place.with_suffix(".yaml")
        options.dump(chosen, file)
        device = free.get()
        try:
            done = (run or run_process)(file, place, device)
        finally:
            free.put(device)
        trial.set_user_attr("done", {"seconds": done.seconds, "peak_bytes": done.peak_bytes, "error": done.error})
        say(f"{_slug(values)}: " + (f"held-out loss {done.loss:.4f}" if done.loss is not None else f"{done.error}"))
        if done.loss is None:
            raise optuna.TrialPruned  # told above; the others go on
        return done.loss

    with quiet():
        study.optimize(objective, n_trials=num_left, n_jobs=max(1, len(devices)))
    ranked = _ranked(study)
    if ranked[0].loss is None:
        raise NarrowboatError(
            f"None of {len(ranked)} trials has a held-out loss; the first one failed with: {ranked[0].error}"
        )
    options.dump(options.load(config, {**flags, **ranked[0].values}), folder / BEST)
    _write_report(ranked, folder)
    return ranked


def parse_over(entries: Sequence[str]) -> dict[str, list[str]]:
    """``["lora.rank=8,16"]`` to ``{"lora.rank": ["8", "16"]}``.

    Raises:
        OptionError: an entry has another form, or there is no such option.
    """
    known = dict(options.fields())
    over: dict[str, list[str]] = {}
    mistakes = []
    for entry in entries:
        key, _, values = entry.partition("=")
        over[key] = [value.strip() for value in values.split(",") if value.strip()]
        if key not in known:
            mistakes.append(options.unknown_key("--over", key, entry))
        elif not over[key]:
            mistakes.append(Mistake("--over", key, entry, "expected values, such as optimizer.lr=1e-4,2e-4"))
    if mistakes or not over:
        raise OptionError(mistakes or "--over is missing: what to sweep, such as --over optimizer.lr=1e-4,2e-4")
    return over


def run_process(file: Path, folder: Path, device: str | None) -> Trial:
    """Train in a process of its own, or continue what an earlier one left in the folder."""
    if (folder / EVENTS_FILE).exists() and (done := _result(folder)).loss is not None:
        return done
    command = [sys.executable, "-m", "narrowboat.cli", "train", str(file), "--quiet"]
    if (folder / "checkpoints").is_dir():
        command.append("--resume")
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device is not None else {})
    with file.with_suffix(".log").open("a", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env=environment).returncode
    if code in (130, 143):
        raise KeyboardInterrupt
    if not (folder / EVENTS_FILE).exists():
        lines = file.with_suffix(".log").read_text(encoding="utf-8").splitlines()
        return Trial({}, error=lines[-1] if lines else f"exit code {code}")
    return _result(folder)


def _result(folder: Path) -> Trial:
    """The trial's result, from the events of its run."""
    history = read_history(folder / EVENTS_FILE)
    end = history.sittings[-1].end
    if end is None or end.outcome != "done" or end.last_heldout_loss is None:
        return Trial({}, error=(end.error if end else None) or "it has no held-out loss; see data.heldout")
    loss = end.last_heldout_loss if math.isfinite(end.last_heldout_loss) else None
    return Trial({}, loss, end.seconds, end.peak_bytes, None if loss else "its held-out loss is not a number")


def _check(
    config: Path | None,
    flags: Mapping[str, Any],
    over: Mapping[str, Sequence[str]],
    combinations: Sequence[Mapping[str, str]],
    folder: Path,
) -> None:
    mistakes: dict[str, Mistake] = {}
    for values in combinations:
        try:
            base = options.load(config, {**flags, **values})
        except OptionError as error:
            if not error.mistakes:
                raise
            mistakes |= {str(mistake): mistake for mistake in error.mistakes}
    if mistakes:
        raise OptionError(mistakes.values())
    settings = {
        "options": base.model_dump(mode="json", exclude={key.split(".")[0]: {key.split(".")[1]} for key in over})
    }
    settings["over"] = {key: list(values) for key, values in over.items()}
    file = folder / SETTINGS
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) != json.loads(json.dumps(settings)):
        raise OptionError(f"{folder} holds another sweep, of other options or values; name another folder with --into.")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _study(optuna: Any, folder: Path) -> Any:
    """The study in the folder's journal."""
    journal = require("optuna.storages.journal", "narrowboat sweep")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with quiet():
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(journal.JournalFileBackend(str(folder / JOURNAL))),
            study_name="sweep",
            load_if_exists=True,
        )


def _deal_out(study: Any, combinations: Sequence[dict[str, str]]) -> int:
    """Queue every setting without a result, also those that a killed sweep was running. Return how many."""
    trials = study.get_trials(deepcopy=False)
    waiting = [trial for trial in trials if trial.state.name == "WAITING"]
    settled = {_slug(trial.params) for trial in trials if "done" in trial.user_attrs}
    settled |= {_slug(trial.system_attrs["fixed_params"]) for trial in waiting}
    left = [values for values in combinations if _slug(values) not in settled]
    for values in left:
        study.enqueue_trial(values)
    return len(waiting) + len(left)


def _ranked(study: Any) -> list[Trial]:
    """The last trial of each setting, lowest loss first; failed trials come last."""
    found: dict[str, Trial] = {}
    for trial in study.get_trials(deepcopy=False):
        if "done" in trial.user_attrs:
            found[_slug(trial.params)] = Trial(dict(trial.params), trial.value, **trial.user_attrs["done"])
    return sorted(found.values(), key=lambda trial: math.inf if trial.loss is None else trial.loss)


def _slug(values: Mapping[str, str]) -> str:
    """A file name that tells the setting: ``lr=1e-4,rank=8``."""
    named = ",".join(f"{key.partition('.')[2]}={value}" for key, value in values.items())
    return "".join(letter if letter.isalnum() or letter in "=,.-_" else "_" for letter in named)


def _write_report(ranked: Sequence[Trial], folder: Path) -> None:
    room = Path(report.__file__).parent  # its style is the report's
    environment = Environment(loader=FileSystemLoader(room), autoescape=True, undefined=StrictUndefined)
    environment.filters.update(bytes=format_bytes, seconds=format_seconds)
    losses = [trial.loss for trial in ranked if trial.loss is not None]
    spread = (max(losses) - min(losses)) or 1.0
    rows = [(trial, None if trial.loss is None else 100 * (trial.loss - min(losses)) / spread) for trial in ranked]
    page = environment.get_template("sweep.html.j2").render(rows=rows, keys=list(ranked[0].values), name=folder.name)
    (folder / report.REPORT_FILE).write_text(page, encoding="utf-8")
