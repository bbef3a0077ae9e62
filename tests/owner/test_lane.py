"""The lane's waits, on a device whose work is done later than it is asked for: all of them are there, none is idle."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from narrowboat.owner.lane import Lane


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """By the wait that was left out, what went wrong; "" is none. In a process of its own: PyTorch keeps the device."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.owner.late.trial"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    results: dict[str, list[str]] = json.loads(done.stdout)
    return results


def test_with_all_waits_gradients_and_copies_are_right_in_every_order(found: dict[str, list[str]]) -> None:
    assert found[""] == []


def test_without_any_one_of_its_waits_something_is_wrong(found: dict[str, list[str]]) -> None:
    left_out = {wait: wrong for wait, wrong in found.items() if wait}
    assert len(left_out) >= 10
    assert [wait for wait, wrong in left_out.items() if not wrong] == []


def test_a_forecast_holds_what_is_sent_for_as_long_as_a_card_does() -> None:
    lane, part, room = Lane(torch.device("cpu")), torch.ones(3), torch.zeros(3)
    before = sys.getrefcount(part)
    lane.send(part, room)
    assert torch.equal(room, part)
    assert sys.getrefcount(part) == before + 1
    lane.fetch([room])
    assert sys.getrefcount(part) == before
