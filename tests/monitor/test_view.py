"""What is seen within a step: its bar, a line a minute, and Ctrl-C acknowledged while the step goes on."""

from __future__ import annotations

import io
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console
from tests.monitor.runs import GIB, step_done
from tests.monitor.test_progress import Terminal, terminal

from narrowboat.events import PlanChanged
from narrowboat.machine.vitals import CardVitals, Pulse, Vitals
from narrowboat.monitor import progress as display
from narrowboat.monitor.foot import Foot, sparkline
from narrowboat.monitor.progress import Progress
from narrowboat.monitor.view import View
from narrowboat.owner.meter import Reading
from narrowboat.training.signals import StopRequest
from narrowboat.underway import Underway


class StillPulse(Pulse):
    def take(self) -> Vitals:
        return Vitals(3 * GIB, 300 * 2**20, CardVitals(61, 310.4, 98, 2 * GIB))


def view_of(underway: Underway, heard: int = 0, patience: float = 30.0) -> View:
    reading = Reading(GIB, 0, GIB // 2, 0, {"base weights": GIB // 2, "layer inputs": GIB // 4})
    return View(underway, lambda: reading, StillPulse(torch.device("cpu")), lambda: heard, patience)


def in_a_step(share_of_layers: int = 5) -> Underway:
    underway = Underway(num_layers=10)
    underway.begin("step", 4)
    underway.next()
    underway.at(share_of_layers, 512, 1024, 4096)
    return underway


def words_of(foot: Foot, width: int = 140) -> str:
    console = Console(file=Terminal(), force_terminal=True, width=width, legacy_windows=False, color_system=None)
    console.print(foot)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_foot_shows_step_memory_by_cause_machine_and_the_last_change() -> None:
    foot = Foot()
    foot.view, foot.tokens_per_second, foot.budget_bytes = view_of(in_a_step()), 128.0, 2 * GIB
    foot.change = PlanChanged(2, "memory ran out", "keep", "stream")
    for step in (1, 2, 3):
        foot.pace.take(step_done(step))
    foot.view.look()
    text = words_of(foot)
    assert "step 4: micro-batch 2 of 4, layer 6 of 10 forwards, tile 2 of 8" in text
    assert "64 tokens/s (50 % of the forecast)" in text
    assert re.search(r"loss 2\.79\d\d █[▄▅]▁   64 tokens/s", text)
    assert "memory 1.00 GiB of 2.00 GiB now: base weights 512 MiB, layer inputs 256 MiB" in text
    assert "host 3.00 GiB   scratch 512 MiB   disk 300 MiB/s   card 61 °C, 310 W, 98 % used, bus 2.00 GiB/s" in text
    assert "plan since step 2: stream (memory ran out)" in text
    assert all(len(line) <= 60 for line in words_of(foot, 60).splitlines())


def test_memory_that_changes_while_it_is_read_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    now, view = 100.0, view_of(in_a_step())
    monkeypatch.setattr("time.monotonic", lambda: now)
    view.look()
    known = view.reading

    def changing() -> Reading:
        raise RuntimeError("dictionary changed size during iteration")

    view.now = changing
    now += 2.0
    view.look()
    assert known is not None and view.reading is known


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([1.0, 2.0, float("nan"), 8.0]) == "▁▂!█"
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"


@pytest.fixture
def plain() -> Iterator[tuple[Progress, io.StringIO]]:
    file = io.StringIO()
    progress = Progress(Console(file=file, width=200))
    yield progress, file
    progress.close()


def test_a_minute_without_a_step_is_told(plain: tuple[Progress, io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    progress, file = plain
    progress._foot.view = view_of(in_a_step())
    progress.look()
    assert file.getvalue() == ""
    monkeypatch.setattr(display, "LINE_SECONDS", 0.0)
    progress.look()
    assert file.getvalue().startswith("step 1: micro-batch 2 of 4, layer 6 of 10 forwards, tile 2 of 8 (28 %), ")
    assert "memory 1.00 GiB now: base weights 512 MiB" in file.getvalue()


def test_ctrl_c_is_acknowledged_while_python_cannot_look(plain: tuple[Progress, io.StringIO]) -> None:
    """The signal waits behind one long call; the display's thread has seen it all the same."""
    progress, file = plain
    with StopRequest() as stop, stop.patiently():
        view = view_of(in_a_step())
        view.heard = lambda: stop.heard
        progress._foot.view = view
        seen: list[str] = []

        def look() -> None:
            time.sleep(0.2)
            progress.look()
            seen.append(file.getvalue())

        other = threading.Thread(target=look)
        other.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, set())
        signal.raise_signal(signal.SIGINT)
        other.join()
        progress.look()
    assert seen[0].startswith("stopping    SIGINT heard: step 1 is finished")
    assert file.getvalue().count("SIGINT heard") == 1


def test_what_is_said_depends_on_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    underway = in_a_step()
    now += 28.125  # of 100 s
    assert view_of(underway).stopping_words(3) == ""
    words = view_of(underway, signal.SIGTERM).stopping_words(3)
    assert words == (
        "SIGTERM heard: step 3 would take 1 min 12 s more, so it is given up in 30 s at most, and the run is saved "
        "after step 2. Once more stops at once, and what was not saved is lost."
    )
    assert "is finished in about 1 min 12 s, or given up after 2 min 0 s; then the run is saved" in view_of(
        underway, signal.SIGINT, 120.0
    ).stopping_words(3)
    underway.begin("evaluation", 1)
    assert "the evaluation is given up at once" in view_of(underway, signal.SIGINT).stopping_words(3)
    underway.end()
    assert "no step is under way, and the run is saved now" in view_of(underway, signal.SIGINT).stopping_words(3)


def test_a_display_that_looks_on_leaves_no_thread() -> None:
    progress = Progress(terminal())
    progress.watch(view_of(in_a_step()))
    time.sleep(0.7)
    progress.close()
    assert not any(thread.name == "narrowboat display" for thread in threading.enumerate())


def test_this_machine_has_a_pulse() -> None:
    vitals = Pulse(torch.device("cpu")).take()
    assert vitals.host_bytes > 0 and vitals.disk_bytes >= 0 and vitals.card is None
