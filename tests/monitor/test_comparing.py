"""Several runs on one page, and a page that follows a run."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.monitor.runs import step_done, whole_run
from tests.monitor.test_report import Page

from narrowboat.errors import DataError
from narrowboat.monitor.comparing import write_comparison
from narrowboat.monitor.history import EVENTS_FILE
from narrowboat.monitor.recorders import JsonLines
from narrowboat.monitor.report import page_of
from narrowboat.monitor.watching import Watched


def run_in(folder: Path, num_steps: int) -> Path:
    recorder = JsonLines(folder / EVENTS_FILE)
    for event in whole_run(folder, num_steps):
        recorder.record(event)
    recorder.close()
    return folder


def test_runs_are_compared(tmp_path: Path) -> None:
    folders = [run_in(tmp_path / "one", 6), run_in(tmp_path / "two", 12)]
    page = Page(write_comparison(folders, tmp_path / "comparison.html"))
    told = " ".join(text for texts in page.texts.values() for text in texts)
    for fact in ("2 runs", "one", "two", "2.0000", "20.0 % lower", "Held-out loss", "Pace"):
        assert fact in told, fact
    assert page.source.count('class="chart"') == 4
    with pytest.raises(DataError, match="there is no such file"):
        write_comparison([*folders, tmp_path / "three"], tmp_path / "comparison.html")


def test_a_page_that_follows_its_run_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run", 6)
    with Watched(lambda: page_of(folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with urllib.request.urlopen(server.address, timeout=10) as answer:
                assert answer.headers["Refresh"] == "5"
                assert "6 steps" in answer.read().decode()
            recorder = JsonLines(folder / EVENTS_FILE)
            recorder.record(step_done(7, 7))
            recorder.close()
            assert "7 steps" in urllib.request.urlopen(server.address, timeout=10).read().decode()
            port = server.server_address[1]
            for address, host in ((f"http://127.0.0.1:{port}/?token=x", None), (server.address, "evil.example:80")):
                request = urllib.request.Request(address, headers={"Host": host} if host else {})
                with pytest.raises(urllib.error.HTTPError, match="403") as refused:
                    urllib.request.urlopen(request, timeout=10)
                refused.value.close()
        finally:
            server.shutdown()
