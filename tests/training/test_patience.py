"""Early stopping: a run ends when evaluations bring nothing any more, as a run that is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from narrowboat import api
from narrowboat.errors import OptionError
from narrowboat.monitor.history import EVENTS_FILE, read_history
from narrowboat.options.load import load
from narrowboat.options.schema import Options

RunOptions = Callable[..., Options]


def test_it_ends_when_evaluations_bring_no_lower_loss(run_options: RunOptions, tmp_path: Path) -> None:
    worse = {"optimizer.lr": 1.0, "optimizer.schedule": "constant", "train.keep_best": True}
    options = run_options(**{"train.steps": 30, "train.evaluate_every": 1, "train.patience": 2} | worse)
    ended = api.train(options, quiet=True)
    assert ended.outcome == "done"
    assert ended.step < 30
    history = read_history(tmp_path / "run" / EVENTS_FILE)
    assert ended.step == max(history.steps)
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert (tmp_path / "run" / "checkpoints").is_dir()
    again = api.train(options, resume=True, quiet=True)  # nothing is left to do
    assert again.step == ended.step


def test_without_evaluations_there_is_nothing_to_count() -> None:
    with pytest.raises(OptionError, match=r"train.patience: 3 counts evaluations; set train.evaluate_every as well"):
        load(None, {"train.patience": "3"})
