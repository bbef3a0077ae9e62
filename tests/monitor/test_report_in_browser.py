"""The report in a real browser: no error, hover, zoom by mouse, every width, light and dark, many steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.monitor.runs import GIB, started, step_done, whole_run
from tests.planner.browser import PATH, Page

from narrowboat.events import DataReady
from narrowboat.monitor.history import EVENTS_FILE
from narrowboat.monitor.recorders import JsonLines
from narrowboat.monitor.report import write_report

pytestmark = pytest.mark.skipif(PATH is None, reason="no chromium or chrome found to open the page with")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    recorder = JsonLines(folder / EVENTS_FILE)
    run = whole_run(folder, 40)
    parts = [{"text": "Question? " * 30, "kind": "masked"}, {"text": "Answer. " * 30, "kind": "learnt"}]
    for event in run:
        recorder.record(
            DataReady(event.account, [{"source": "a", "parts": parts}]) if isinstance(event, DataReady) else event
        )
    recorder.close()
    score = {"base": 0.1, "adapter": 0.4, "difference": 0.3, "interval": None, "num": 3}
    answers = [{"expected": "word " * 60, "base": "x" * 200, "adapter": "word"}]
    (folder / "evaluation.json").write_text(json.dumps({"scores": {"ROUGE-L": score}, "answers": answers}))
    return write_report(folder)


def mouse(page: Page, kind: str, x: float, y: float, buttons: int = 0) -> None:
    button = "left" if kind != "mouseMoved" or buttons else "none"
    page._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=buttons, clickCount=1)


def test_hover_and_zoom_by_mouse(report: Path, tmp_path: Path) -> None:
    with Page(report.as_uri(), 1200, tmp_path) as page:
        page.value("document.querySelector('#chart-loss .plot').scrollIntoView({block: 'center'})")
        box = json.loads(
            page.value("JSON.stringify(document.querySelector('#chart-loss .plot').getBoundingClientRect())")
        )
        middle = box["y"] + box["height"] / 2
        at = lambda share: box["x"] + share * box["width"]  # noqa: E731
        mouse(page, "mouseMoved", at(0.5), middle)
        assert page.value("document.querySelector('#chart-loss output').textContent").startswith("step 20 · 1.0000")
        mouse(page, "mousePressed", at(0.25), middle, 1)
        mouse(page, "mouseMoved", at(0.4), middle, 1)
        mouse(page, "mouseMoved", at(0.5), middle, 1)
        assert page.value("document.querySelector('#chart-loss .chosen').hidden") is False
        mouse(page, "mouseReleased", at(0.5), middle)
        assert page.value("document.querySelector('#chart-peak svg').getAttribute('viewBox')") == "250 0 250 1000"
        assert page.value(
            "[...document.querySelectorAll('#chart-loss .x span')].map(s => s.textContent).join()"
        ).startswith("10,")
        mouse(page, "mouseMoved", at(0.5), middle)
        assert page.value("document.querySelector('#chart-loss output').textContent").startswith("step 15 ·")
        page.value(
            "document.querySelector('#chart-loss .plot').dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))"
        )
        assert page.value("document.querySelector('#chart-peak svg').getAttribute('viewBox')") == "0 0 1000 1000"


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_every_width_needs_no_sideways_scrolling_and_says_no_error(report: Path, tmp_path: Path, width: int) -> None:
    watched = tmp_path / "watched.html"
    listen = "<head><script>window.errors = []; addEventListener('error', (e) => errors.push(e.message));</script>"
    watched.write_text(report.read_text(encoding="utf-8").replace("<head>", listen, 1), encoding="utf-8")
    with Page(watched.as_uri(), width, tmp_path) as page:
        for scheme in ("light", "dark"):
            page._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            assert page.value("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.value("errors.length") == 0
        assert page.value("document.querySelectorAll('mark.learnt').length") == 2
        cells = "[...document.querySelectorAll('#account td')].every((td) => td.getClientRects().length === 1)"
        assert page.value(cells), "no number is broken over two lines"


def test_many_thousand_events_open(tmp_path: Path) -> None:
    recorder = JsonLines(tmp_path / EVENTS_FILE)
    recorder.record(started(tmp_path))
    for step in range(1, 20_001):
        recorder.record(step_done(step, 20_000, 2 + math.sin(step * step), peak_bytes=GIB))
    recorder.close()
    report = write_report(tmp_path)
    assert report.stat().st_size < 1_000_000
    with Page(report.as_uri(), 1200, tmp_path / "profile") as page:
        assert page.value("document.querySelectorAll('.chart').length") == 5
