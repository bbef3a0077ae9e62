"""Asked to stop or to save: when it is served, what it costs, and with which exit code a run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.runs import RUNGS, Run

from narrowboat.errors import Interrupted
from narrowboat.events import CheckpointSaved, Evaluated
from narrowboat.training import signals
from narrowboat.training.checkpoint import newest_checkpoint
from narrowboat.training.signals import GivenUp, StoppedAtOnce, StopRequest


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_two_signals_within_a_second_are_one_and_a_later_one_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with StopRequest() as stop, stop.patiently():
        send(signal.SIGTERM)
        now += 0.9
        send(signal.SIGINT)
        assert stop.received == signal.SIGTERM
        now += 0.2
        send(signal.SIGINT)  # no work went on since: it may have come as early as the one before
        stop.check()
        with pytest.raises(StoppedAtOnce) as stopped:
            send(signal.SIGINT)
    assert stopped.value.exit_code == 143  # that of the first


@pytest.mark.parametrize("pair", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)])
def test_the_first_is_the_first_that_came_whatever_its_number(pair: tuple[int, int]) -> None:
    """Both wait while Python cannot look; it would take the lower number first."""
    with StopRequest() as stop, stop.patiently():
        signal.pthread_sigmask(signal.SIG_BLOCK, {pair[1]})
        send(pair[0])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {pair[1]})
        send(pair[1])
        assert stop.received == pair[0]
    script = f"""
import os, signal, time
from narrowboat.training.signals import StopRequest
with StopRequest() as stop, stop.patiently():
    if not (child := os.fork()):
        for number in {tuple(map(int, pair))}:
            os.kill(os.getppid(), number)
            time.sleep(0.1)
        os._exit(0)
    sum(range(10**8))  # one call, within which no handler runs
    print(int(stop.received))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{int(pair[0])}\n", done.stderr


def test_before_there_is_anything_to_save_one_signal_is_enough() -> None:
    with pytest.raises(StoppedAtOnce) as stopped, StopRequest():
        send(signal.SIGTERM)
    assert stopped.value.exit_code == 143


def test_the_time_that_is_up_is_a_sigterm() -> None:
    with StopRequest(max_seconds=0.0) as stop:
        assert stop.is_asked
        assert stop.received == signal.SIGTERM
        assert str(Interrupted(stop.received, "x")).startswith("Stopped by SIGTERM")
    with StopRequest(max_seconds=60.0) as stop:
        assert not stop.is_asked


def test_a_step_is_given_up_when_its_patience_is_over_an_evaluation_at_once() -> None:
    with StopRequest(patience_seconds=0.05) as stop, stop.patiently():
        stop.check()
        send(signal.SIGTERM)
        stop.check()
        with stop.losing_nothing(), pytest.raises(GivenUp):
            stop.check()
        time.sleep(0.06)
        with pytest.raises(GivenUp):
            stop.check()


def test_handlers_and_hooks_are_as_before_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with StopRequest() as stop, stop.checked_in([layer]):
        assert layer[0]._forward_pre_hooks
    assert not layer[0]._forward_pre_hooks
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


class SignalsAt(torch.overrides.TorchFunctionMode):
    """Sends a signal at the n-th call into torch."""

    def __init__(self, place: int, number: int) -> None:
        super().__init__()
        self.place, self.number = place, number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.place -= 1
        if self.place == 0:
            send(self.number)
        return func(*args, **(kwargs or {}))


MANY: dict[str, Any] = {"num_steps": 4, "save_every": 0, "evaluate_every": 2}


def num_calls(tmp_path: Path, **more: Any) -> int:
    counter = SignalsAt(-1, 0)
    Run(tmp_path / "count", **MANY, **more, modes=[counter]).go()
    return -1 - counter.place


@pytest.mark.parametrize(
    ("rung", "optimizer"), [(0, "adamw"), (1, "adalomo"), (2, "adamw"), (3, "adamw"), (2, "schedule_free")]
)
def test_given_up_anywhere_the_run_goes_on_as_if_it_had_not_been(
    rung: int, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without patience: the micro-batch under way is given up, under every plan, in steps and in evaluations."""
    more: dict[str, Any] = {"rungs": RUNGS[rung : rung + 1], "optimizer": optimizer}
    whole = Run(tmp_path / "whole", **MANY, **more)
    whole.go()
    calls = num_calls(tmp_path, **more)
    monkeypatch.setattr(signals.StopRequest.__init__, "__defaults__", (None, 0.0))
    for share in (0.02, 0.4, 0.75):
        part = Run(tmp_path / f"{share}", **MANY, **more, modes=[SignalsAt(int(share * calls), signal.SIGTERM)])
        with pytest.raises(Interrupted) as stopped:
            part.go()
        assert stopped.value.exit_code == 143
        found = newest_checkpoint(part.folder / "checkpoints", pytest.fail)
        assert found is not None
        rest = Run(part.folder, **MANY, **more)
        rest.go(found[1], resume=found[0])
        assert part.losses + rest.losses == whole.losses
        evaluated = [
            [e.loss for e in events if isinstance(e, Evaluated)] for events in (part.events + rest.events, whole.events)
        ]
        assert evaluated[0] == evaluated[1]


def test_sigusr1_saves_and_goes_on(tmp_path: Path) -> None:
    calls = num_calls(tmp_path)
    run = Run(tmp_path / "run", **MANY, modes=[SignalsAt(calls // 3, signal.SIGUSR1)])
    run.go()
    saved = [event.step for event in run.events if isinstance(event, CheckpointSaved)]
    assert len(run.steps) == 4
    assert len(saved) == 2 and 0 < saved[0] < 4 and saved[1] == 4
