from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from tests.monitor.runs import GIB, Write, ended, started, step_done, whole_run

from narrowboat.errors import DataError
from narrowboat.events import Evaluated, Notice, PlanChanged
from narrowboat.monitor.history import read_history


def test_a_plain_run(write: Write, tmp_path: Path) -> None:
    history = read_history(write(whole_run(tmp_path)))
    assert history.summary() == {
        "outcome": "done",
        "steps": 6,
        "tokens": 6 * 2048,
        "seconds": 250.0,
        "tokens_per_second": 2048 / 32,
        "first_heldout_loss": 2.5,
        "last_heldout_loss": 2.0,
        "peak_bytes": 6 * GIB,
        "budget_bytes": 8 * GIB,
    }
    assert history.unreadable_lines == []


def test_after_a_crash_the_later_record_of_a_step_counts(write: Write, tmp_path: Path) -> None:
    """Killed in step 5, resumed from step 2: steps 3 and 4 are run again, and end otherwise than before."""
    path = write([started(tmp_path), *(step_done(step, loss=9.0) for step in (1, 2, 3, 4))])
    with path.open("ab") as file:
        file.write(b'{"event":"StepDone","step":5,"num_st')
    write([started(tmp_path, 2), *(step_done(step, loss=1.0) for step in (3, 4, 5, 6)), ended(tmp_path)])
    history = read_history(path)
    assert {number: step.loss for number, step in history.steps.items()} == {1: 9.0, 2: 9.0, 3: 1, 4: 1, 5: 1, 6: 1}
    assert history.num_steps_taken_back == 2
    assert history.num_tokens == 6 * 2048
    assert history.unreadable_lines == [6]
    assert [session.outcome for session in history.sessions] == ["cut short", "done"]


def test_what_the_run_was_taken_back_from_is_gone_until_it_is_run_again(write: Write, tmp_path: Path) -> None:
    write(
        [
            started(tmp_path),
            Evaluated(0, 2.5, 9, 1.0),
            *map(step_done, (1, 2, 3, 4)),
            PlanChanged(4, "near the budget", "keep", "recompute"),
            Evaluated(4, 1.0, 9, 1.0),
        ]
    )
    history = read_history(write([started(tmp_path, 2), step_done(3)]))
    assert list(history.steps) == [1, 2, 3]
    assert history.heldout_losses == (2.5, None)
    assert history.plan_changes == []
    assert history.summary()["outcome"] == "not ended"


def test_a_step_told_twice_in_one_session_counts_once(write: Write, tmp_path: Path) -> None:
    history = read_history(write([started(tmp_path), step_done(1, loss=9.0), step_done(1, loss=1.0)]))
    assert [step.loss for step in history.steps.values()] == [1.0]


def test_a_notice_of_every_session_is_kept_once_with_its_count(write: Write, tmp_path: Path) -> None:
    write([started(tmp_path), Notice("2 records dropped")])
    history = read_history(write([started(tmp_path), Notice("2 records dropped"), Notice("another")]))
    assert history.notices == {"2 records dropped": 2, "another": 1}


def test_losses_that_are_no_numbers_are_named(write: Write, tmp_path: Path) -> None:
    history = read_history(write(whole_run(tmp_path, losses={2: math.nan, 5: math.inf})))
    assert history.strange_losses == [2, 5]


def unchecked(lines: bytes) -> bytes:
    """Without the check sums, as other tools write them."""
    return re.sub(rb', "check": "[0-9a-f]{8}"', b"", lines)


@pytest.mark.parametrize("constant", ["NaN", '"NaN"'])
def test_not_a_number_is_read_as_a_constant_and_as_a_text(write: Write, tmp_path: Path, constant: str) -> None:
    path = write([started(tmp_path), step_done(1, loss=7.25)])
    path.write_bytes(unchecked(path.read_bytes()).replace(b"7.25", constant.encode()))
    assert math.isnan(read_history(path).steps[1].loss)


def test_a_line_of_which_a_byte_was_flipped_is_counted_and_passed_over(write: Write, tmp_path: Path) -> None:
    path = write([started(tmp_path), step_done(1, loss=7.25), step_done(2)])
    path.write_bytes(path.read_bytes().replace(b"7.25", b"7.35"))
    history = read_history(path)
    assert (history.unreadable_lines, list(history.steps)) == ([2], [2])


def test_lines_that_are_no_events_are_counted_and_passed_over(write: Write, tmp_path: Path) -> None:
    path = write(whole_run(tmp_path))
    num_lines = len(path.read_bytes().splitlines())
    strange = [b"\xff\xfe", b"[]", b"null", b'{"event":"Later","time":"2026-01-01T00:00:00+00:00"}']
    step = {"event": "StepDone", "time": "2026-01-01T00:00:00+00:00", "step": "x"}
    with path.open("ab") as file:
        file.write(b"\n".join([*strange, json.dumps(step).encode(), b""]))
    history = read_history(path)
    assert history.unreadable_lines == [num_lines + extra for extra in (1, 2, 3, 4, 5)]
    assert history.summary()["steps"] == 6


def test_a_later_version_s_extra_field_does_no_harm(write: Write, tmp_path: Path) -> None:
    path = write([started(tmp_path), step_done(1)])
    plain = unchecked(path.read_bytes())
    later = plain.replace(b'"step": 1', b'"step": 1, "news": true')
    assert later != plain
    path.write_bytes(later)
    assert list(read_history(path).steps) == [1]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"events\.jsonl: there is no such file"):
        read_history(tmp_path / "events.jsonl")
    (tmp_path / "events.jsonl").write_bytes(b"half\n")
    with pytest.raises(DataError, match="none of its 1 lines is an event"):
        read_history(tmp_path / "events.jsonl")


@pytest.mark.parametrize("place", [-4, -15], ids=["in the sum", "in its name"])
def test_a_line_whose_check_sum_is_no_longer_one_is_damaged(place: int, write: Write, tmp_path: Path) -> None:
    path = write([started(tmp_path), step_done(1), step_done(2)])
    first, second, third, end = path.read_bytes().split(b"\n")
    damaged = bytearray(second)
    damaged[place] ^= 0x10
    path.write_bytes(b"\n".join([first, bytes(damaged), third, end]))
    history = read_history(path)
    assert (history.unreadable_lines, list(history.steps)) == ([2], [2])
