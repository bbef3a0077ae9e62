from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.monitor.runs import Write, started, step_done, strange_run, whole_run

from narrowboat.events import Event, Notice
from narrowboat.monitor.history import read_history
from narrowboat.monitor.recorders import Fanout, JsonLines
from narrowboat.monitor.report import write_report


class Memory:
    """Keeps what it hears, and fails when told to."""

    def __init__(self, fails_at: int | None = None, fails_to_close: bool = False) -> None:
        self.heard: list[Event] = []
        self.num_closed = 0
        self._fails_at = fails_at
        self._fails_to_close = fails_to_close

    def record(self, event: Event) -> None:
        if self._fails_at == len(self.heard):
            raise OSError(28, "No space left on device")
        self.heard.append(event)

    def close(self) -> None:
        self.num_closed += 1
        if self._fails_to_close:
            raise RuntimeError("stuck")


def test_each_event_is_on_disk_as_soon_as_it_was_told(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    recorder = JsonLines(path)
    for number, event in enumerate(whole_run(tmp_path), start=1):
        recorder.record(event)
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) == number
        last = json.loads(lines[-1])
        assert last["event"] == type(event).__name__
        assert abs(datetime.now(UTC) - datetime.fromisoformat(last["time"])) < timedelta(seconds=60)
    recorder.close()


def test_a_resumed_run_appends_and_leaves_a_torn_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event":"StepDone","st')
    recorder = JsonLines(path)
    recorder.record(Notice("going on"))
    recorder.close()
    torn, whole = path.read_text(encoding="utf-8").splitlines()
    assert torn == '{"event":"StepDone","st'
    assert json.loads(whole)["text"] == "going on"


@given(loss=st.floats(), text=st.text())
def test_every_number_and_text_comes_back_from_plain_json(
    tmp_path_factory: pytest.TempPathFactory, loss: float, text: str
) -> None:
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    recorder = JsonLines(path)
    recorder.record(step_done(1, loss=loss))
    recorder.record(Notice(text))
    recorder.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        json.loads(line, parse_constant=refuse)
    history = read_history(path)
    assert repr(history.steps[1].loss) == repr(loss)
    assert list(history.notices) == [text]


def test_who_fails_is_left_out_and_the_others_hear_of_it_once() -> None:
    sound, failing, late = Memory(), Memory(fails_at=1), Memory()
    fanout = Fanout([sound, failing, late])
    events = [Notice(f"event {number}") for number in range(4)]
    for event in events:
        fanout.record(event)
    fanout.close()
    for recorder in (sound, late):
        told = [event for event in recorder.heard if event not in events]
        assert [event for event in recorder.heard if event in events] == events
        assert len(told) == 1
        assert isinstance(told[0], Notice)
        assert "Memory failed" in told[0].text
        assert "No space left on device" in told[0].text
    assert [recorder.num_closed for recorder in (sound, failing, late)] == [1, 1, 1]


def test_all_are_closed_although_one_fails_to_close() -> None:
    first, last = Memory(fails_to_close=True), Memory()
    Fanout([first, last]).close()
    assert last.num_closed == 1
    assert "stuck" in last.heard[0].text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_does_not_end_the_run_and_is_told_even_when_nobody_listens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fanout = Fanout([JsonLines(Path("/dev/full"))])
    fanout.record(Notice("first"))
    fanout.record(Notice("second"))
    fanout.close()
    told = capsys.readouterr().err
    assert "JsonLines failed" in told
    assert "No space left" in told
    assert told.count("\n") == 1


def test_a_whole_run_without_torch_and_without_warnings(tmp_path: Path) -> None:
    """In a process of its own: what is imported when, and what the libraries say while they are."""
    script = """
import sys
from pathlib import Path
from narrowboat.monitor import recorders
assert not {"tensorboard", "rich", "jinja2"} & set(sys.modules), "imported before it is needed"
sys.path.insert(0, sys.argv[2])
from tests.monitor.runs import whole_run
folder = Path(sys.argv[1])
record = recorders.Record(folder)
first, *others = whole_run(folder)
record.record(first)
assert not list(folder.iterdir()), "written before all checks have passed"
record.begin()
for event in others:
    record.record(event)
record.close()
assert "torch" not in sys.modules and "tensorflow" not in sys.modules
"""
    command = [sys.executable, "-W", "error", "-c", script, str(tmp_path), str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "step 6/6" in done.stdout
    assert (tmp_path / "report.html").exists()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert read_history(tmp_path / "events.jsonl").summary()["steps"] == 6


def test_the_strangest_run_is_written_down(write: Write, tmp_path: Path) -> None:
    assert read_history(write(strange_run(tmp_path))).unreadable_lines == []


def test_paths_and_other_objects_in_options_are_written_as_text(tmp_path: Path) -> None:
    recorder = JsonLines(tmp_path / "events.jsonl")
    event = started(tmp_path)
    recorder.record(type(event)("run", {"train": {"folder": Path("a/b"), "names": ("x", "y")}}, {}))
    recorder.close()
    start = read_history(tmp_path / "events.jsonl").start
    assert start is not None
    assert start.options == {"train": {"folder": str(Path("a/b")), "names": ["x", "y"]}}


def test_a_file_s_name_that_is_not_utf8_does_not_end_the_record(tmp_path: Path) -> None:
    name = b"caf\xe9.txt".decode("utf-8", "surrogateescape")
    recorder = JsonLines(tmp_path / "events.jsonl")
    recorder.record(started(tmp_path))
    recorder.record(Notice(f"{name} is not UTF-8"))
    recorder.close()
    assert list(read_history(tmp_path / "events.jsonl").notices) == ["caf?.txt is not UTF-8"]
    assert write_report(tmp_path).exists()


def _environment() -> dict[str, str]:
    source = str(Path(__file__).parents[2] / "src")
    return {**os.environ, "PYTHONPATH": source, "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
