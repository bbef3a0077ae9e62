"""Saving beside the next steps: a copy, a thread, and failures that are told and end the run with an error."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.runs import Run
from tests.training.test_checkpoint import at, stepped

from narrowboat.errors import CheckpointError
from narrowboat.events import CheckpointSaved, Event, Notice
from narrowboat.owner.gauge import Gauge
from narrowboat.training import checkpoint
from narrowboat.training.checkpoint import newest_checkpoint, snapshot
from narrowboat.training.saver import Saver


def saver(folder: Path, told: list[Event], budget_bytes: int = 2**40) -> Saver:
    return Saver(folder, 2, Gauge(torch.device("cpu"), budget_bytes), 0.9, told.append)


def slowly(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written until the event is set."""
    may_go, write = threading.Event(), checkpoint.write

    def waits(*args: Any) -> CheckpointSaved:
        assert may_go.wait(20)
        return write(*args)

    monkeypatch.setattr(checkpoint, "write", waits)
    return may_go


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, told = slowly(monkeypatch), []  # type: ignore[var-annotated]
    model, optimizer = stepped()
    saving = saver(tmp_path, told)
    saving.save(lambda: snapshot(at(1), model, optimizer), at(1))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.requires_grad)
    saving.look()
    assert told == []
    may_go.set()
    saving.settle()
    assert [type(event) for event in told] == [CheckpointSaved]
    assert saving.newest() == tmp_path / "checkpoints" / "step-000001"
    fresh, other = stepped()
    checkpoint.restore(tmp_path / "checkpoints" / "step-000001", model, optimizer)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), fresh.parameters(), strict=True))
    assert len(other.state_dict()["state"]) > 0


def test_without_room_for_a_copy_the_step_waits_and_that_is_told_once(tmp_path: Path) -> None:
    told: list[Event] = []
    model, optimizer = stepped()
    saving = saver(tmp_path, told, budget_bytes=1000)
    for step in (1, 2):
        saving.save(lambda step=step: snapshot(at(step), model, optimizer), at(step))  # type: ignore[misc]
        assert newest_checkpoint(tmp_path / "checkpoints", pytest.fail)[1].step == step  # type: ignore[index]
    assert [type(event) for event in told] == [Notice, CheckpointSaved, CheckpointSaved]
    assert "No room to copy the" in told[0].text  # type: ignore[attr-defined]


def test_the_copy_is_counted_and_gone_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go = slowly(monkeypatch)
    model, optimizer = stepped()
    with Gauge(torch.device("cpu"), 2**40) as gauge:
        saving = Saver(tmp_path, 2, gauge, 0.9, lambda event: None)
        taken = snapshot(at(1), model, optimizer)
        gauge.read()
        before = gauge.read()
        saving.save(lambda: taken, at(1))
        assert gauge.by_cause()["optimizer states"] >= taken.num_bytes
        may_go.set()
        saving.settle()
        gauge.read()
        assert gauge.read() == before


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_failure_is_told_at_once_or_at_the_next_save_and_ends_the_run_with_an_error(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Event] = []
    model, optimizer = stepped()
    saving = saver(tmp_path, told)
    saving.save(lambda: snapshot(at(1), model, optimizer), at(1))
    saving.settle()
    if when == "before":
        monkeypatch.setattr("narrowboat.training.checkpoint.free_disk_bytes", lambda path: 0)
    else:

        def fails(*args: Any) -> None:
            raise CheckpointError("step-000002: not saved: Input/output error")

        monkeypatch.setattr(checkpoint, "write", fails)
    saving.save(lambda: snapshot(at(2), model, optimizer), at(2))
    saving.settle()
    monkeypatch.undo()
    saving.save(lambda: snapshot(at(3), model, optimizer), at(3), at_once=True)
    assert [type(event) for event in told] == [CheckpointSaved, Notice, CheckpointSaved]
    assert "not saved" in told[1].text and "The run goes on, and will end with an error" in told[1].text  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="1 checkpoint was not saved; the first: "):
        saving.raise_failures()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000001", "step-000003"]


def test_a_run_that_saves_after_every_step_is_the_run_that_does_not(tmp_path: Path) -> None:
    runs = [Run(tmp_path / name, num_steps=5, save_every=every) for name, every in (("often", 1), ("never", 0))]
    often, never = runs
    for run in runs:
        run.go()
    assert often.losses == never.losses
    assert [event.step for event in often.events if isinstance(event, CheckpointSaved)] == [1, 2, 3, 4, 5]


def test_a_thread_ends_with_its_checkpoint(tmp_path: Path) -> None:
    before = threading.active_count()
    Run(tmp_path, num_steps=3, save_every=1).go()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
