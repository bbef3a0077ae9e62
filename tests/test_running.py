"""What a run's record says in the end, however it ended."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowboat import api
from narrowboat.errors import Interrupted, ModelError
from narrowboat.monitor.history import read_history
from narrowboat.options.schema import Options
from narrowboat.training import loop


def in_step(number: int, do: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    rate = loop.learning_rate

    def learning_rate(options: Any, step: int, num_steps: int) -> float:
        if step == number:
            do()
        return rate(options, step, num_steps)

    monkeypatch.setattr(loop, "learning_rate", learning_rate)


def test_a_run_that_is_stopped_says_how_far_it_came(
    run_options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = run_options()
    in_step(2, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    with pytest.raises(Interrupted):
        api.train(options)
    history = read_history(Path(options.train.folder) / "events.jsonl")
    end = history.sessions[-1].end
    assert end is not None and (end.outcome, end.step) == ("interrupted", 2)
    assert end.num_tokens == history.num_tokens > 0
    assert end.first_heldout_loss is not None
    assert sum(history.steps[2].by_cause.values()) == history.steps[2].peak_bytes
    told = capsys.readouterr().out
    assert "interrupted  after step 2" in " ".join(told.split("\n"))
    assert "  learnt  " in told and "num_" not in told


def test_a_run_that_fails_says_how_far_it_came(
    run_options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a cable was pulled")

    options = run_options()
    in_step(3, fail, monkeypatch)
    with pytest.raises(
        ModelError, match=r"failed with RuntimeError: a cable was pulled\. Try another memory\.plan"
    ) as failed:
        api.train(options, quiet=True)
    end = read_history(Path(options.train.folder) / "events.jsonl").sessions[-1].end
    assert end is not None and (end.outcome, end.step, end.error) == ("failed", 2, str(failed.value))
