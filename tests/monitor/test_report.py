from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.monitor.runs import GIB, Write, ended, started, step_done, strange_run, whole_run

from narrowboat.errors import DataError
from narrowboat.events import DataReady, Evaluated, PlanChanged, PlanChosen
from narrowboat.monitor.foreseen import beside
from narrowboat.monitor.history import History
from narrowboat.monitor.report import write_report
from narrowboat.plan import MemoryPlan

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DRIVER = """<script>
const seen = [], plot = document.querySelector("#chart-loss .plot");
const texts = (selector) => [...document.querySelectorAll(selector)].map((element) => element.textContent);
plot.focus();
for (const key of ["Home", "ArrowRight", "ArrowRight", "ArrowRight", "End"]) {
  plot.dispatchEvent(new KeyboardEvent("keydown", { key }));
  seen.push(texts("output").join(" | "));
}
seen.push(plot.getAttribute("role") + " " + plot.getAttribute("aria-valuenow"));
document.getElementById("values-table").open = true;
setTimeout(() => {
  const page = document.documentElement;
  seen.push(texts("#values-table tr:nth-child(2) td").join(" "));
  seen.push(`${innerWidth} wide, ${page.scrollWidth - page.clientWidth} too wide`);
  parent.postMessage(seen.join("\\n"), "*");
}, 50);
</script></body>"""
"""Goes through the page by key, and sends what it then reads to the page around it."""

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """A page's texts by tag, and whether its tags match."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.texts: dict[str, list[str]] = {}
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(self.source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.rawdata and tag == "path":
            return
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.texts.setdefault(self._open[-1], []).append(data.strip())

    @property
    def values(self) -> dict[str, list[float | None]]:
        """What the page's script reads."""
        found = re.search(r'<script id="values" type="application/json">(.*?)</script>', self.source)
        assert found
        return json.loads(found[1])


def page(path: Path) -> Page:
    return Page(write_report(path.parent))


def test_the_page_tells_the_run_in_exact_numbers(write: Write, tmp_path: Path) -> None:
    report = page(write(whole_run(tmp_path)))
    told = " ".join(text for texts in report.texts.values() for text in texts)
    for fact in (
        "smollm2-135m",
        "done",
        "6 steps",
        "2.0000",
        "from 2.5000, 20.0 % lower",
        "75 % of 8.00 GiB",
        "12,288 tokens",
        "stream layers in tiles of 512",
        f"{3 * GIB:,}",
        "1,234,567",
        "learnt tokens",
        "lengths: up to 2,048",
        "2 records were dropped",
        "q_proj × 30, v_proj × 30",
        "lora.rank",
        "2.13.0",
    ):
        assert fact in told, fact
    assert report.values["loss"] == [3.0 - 0.1 * step for step in range(1, 7)]
    assert report.values["peak"] == [5 * GIB + step for step in range(1, 7)]
    assert report.values["heldout"] == [2.5, 2.0]


def test_the_page_needs_nothing_from_anywhere(write: Write, tmp_path: Path) -> None:
    report = page(write(whole_run(tmp_path)))
    assert report.links == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", report.source)
    assert len(report.source) < 100_000


def test_a_run_of_many_steps_stays_below_a_megabyte(write: Write, tmp_path: Path) -> None:
    steps = (
        step_done(n, 5000, 2 + math.sin(n * n), gradient_norm=math.cos(n * n), seconds=30 + math.sin(n))
        for n in range(1, 5001)
    )
    report = page(write([started(tmp_path), *steps]))
    assert len(report.source) < 1_000_000
    assert re.search(r"[\d,]+ of 5,000 steps are drawn", report.source)


def test_a_resumed_run_says_what_was_taken_back_and_what_could_not_be_read(write: Write, tmp_path: Path) -> None:
    path = write([started(tmp_path), *(step_done(step, loss=9.0) for step in (1, 2, 3, 4))])
    with path.open("ab") as file:
        file.write(b'{"event":"St')
    changed = PlanChanged(4, "near the budget", "keep all", "recompute layers")
    report = page(write([started(tmp_path, 2), step_done(3), step_done(4), changed]))
    assert report.values["loss"] == [9.0, 9.0, 3.0 - 0.1 * 3, 3.0 - 0.1 * 4]
    assert "took back 2 recorded steps" in report.source
    assert "1 line of events.jsonl could not be read and is left out: line 6" in report.source
    assert "in 2 sessions" in report.source
    assert "cut short" in report.source
    assert "near the budget" in report.source


def test_names_are_text_and_losses_may_be_no_numbers(write: Write, tmp_path: Path) -> None:
    report = page(write(strange_run(tmp_path)))
    assert "<script>alert" not in report.source
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in report.source
    assert report.values["loss"] == [None, None]
    assert "not a finite number at 2 steps: 1, 2" in report.source


def test_a_run_that_has_only_begun_has_a_page(write: Write, tmp_path: Path) -> None:
    report = page(write([started(tmp_path)]))
    assert "not ended" in report.source
    assert "no step yet" in report.source


def test_an_older_page_stays_whole_where_there_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("older", encoding="utf-8")
    with pytest.raises(DataError, match="there is no such file"):
        write_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == "older"


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome found to open the page with")
def test_in_a_browser_the_arrow_keys_read_every_chart_and_a_phone_needs_no_sideways_scrolling(
    write: Write, tmp_path: Path
) -> None:
    path = write_report(write(whole_run(tmp_path, losses={4: math.nan})).parent)
    page_source = path.read_text(encoding="utf-8").replace("</body>", DRIVER)
    frame = tmp_path / "frame.html"
    escaped = page_source.replace("&", "&amp;").replace('"', "&quot;")
    listener = 'addEventListener("message", (m) => document.getElementById("seen").textContent = m.data)'
    frame.write_text(
        f'<!doctype html><meta charset="utf-8"><pre id="seen"></pre><script>{listener}</script>'
        f'<iframe width="360" height="2000" srcdoc="{escaped}"></iframe>',
        encoding="utf-8",
    )
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    quiet = "--disable-component-update --virtual-time-budget=2000 --dump-dom"
    command = [str(BROWSER), *flags.split(), *quiet.split(), f"--user-data-dir={tmp_path / 'profile'}", frame.as_uri()]
    seen = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = seen.partition('<pre id="seen">')[2].partition("</pre>")[0].split("\n")
    assert (
        lines[0]
        == "step 1 · 2.9000 · held out 2.5000 | step 1 · 5.00 GiB | step 1 · 64.0 | step 1 · 3.333e-5 | step 1 · 0.5000"
    )
    assert lines[1].startswith("step 2 · 2.8000")
    assert lines[3].startswith("step 4 · not a number")
    assert lines[4].startswith("step 6 · 2.4000 · held out 2.0000")
    assert lines[5] == "slider 6"
    assert lines[6].startswith("2 2.8 2.847368421052631")
    assert lines[6].endswith(f" 64 {5 * GIB + 2} {8 * GIB} 0.00006666666666666667 0.5 64")
    assert lines[7] == "360 wide, 0 too wide"


def test_the_page_shows_what_is_learnt_what_was_found_and_answers_before_and_after(
    write: Write, tmp_path: Path
) -> None:
    run = whole_run(tmp_path, 20, losses=dict.fromkeys(range(1, 21), 2.0))
    data = next(event for event in run if isinstance(event, DataReady))
    texts = {"masked": "What is <b>it</b>?", "learnt": "It is a barge.", "context": "Before."}
    sample = {"source": "train.jsonl, line 3", "parts": [{"text": t, "kind": k} for k, t in texts.items()]}
    run[run.index(data)] = DataReady(data.account, [sample])
    run[run.index(run[-1])] = ended(
        tmp_path, 20, last_heldout_loss=2.5, peak_by_phase={"loading": GIB, "step": 2 * GIB}
    )
    run = [event for event in run if not isinstance(event, Evaluated)]
    path = write(run)
    score = {"base": 0.1, "adapter": 0.4, "difference": 0.3, "interval": [0.1, 0.5], "num": 9}
    answers = [{"expected": "a barge", "base": "a <i>car</i>", "adapter": "a barge"}]
    (tmp_path / "evaluation.json").write_text(json.dumps({"scores": {"ROUGE-L": score}, "answers": answers}))
    report = page(path)
    assert {"It is a barge."} <= set(report.texts["mark"])
    assert "&lt;b&gt;it&lt;/b&gt;" in report.source and "a &lt;i&gt;car&lt;/i&gt;" in report.source
    assert "+0.3000" in report.source and "+0.1000 to +0.5000" in report.source
    assert "The loss does not fall" in report.source and "training loss 2.0000 at first" in report.source
    assert [text for text in report.texts["th"] if text in ("loading", "step")][:2] == ["loading", "step"]
    assert "narrowboat train options.yaml" in report.source


def test_forecast_and_reading_stand_beside_each_other_with_a_reason(tmp_path: Path) -> None:
    plan = PlanChosen(
        MemoryPlan(layers="keep", micro_batch_tokens=4096).model_dump(), "keep", 8 * GIB,
        {"base weights": 3 * GIB, "working set": 3 * GIB}, 2048,
    )  # fmt: skip
    causes = {"base weights": 3 * GIB, "working set": GIB}
    step = step_done(1, num_tokens=2048, peak_bytes=4 * GIB)
    history = History(plan=plan, steps={1: replace(step, by_cause=causes)})
    found = beside(history)
    assert found.rows == [
        ("of the step: base weights", 3 * GIB, 3 * GIB),
        ("of the step: working set", 3 * GIB, GIB),
    ]
    assert found.reason == (
        "The highest step read 33% less than the forecast, most of it as working set (-2.00 GiB): it was made for "
        "4,096 tokens together, and the step had 2,048 in 2 micro-batches."
    )
    alike = replace(step, by_cause={"base weights": 3 * GIB, "working set": 3 * GIB}, peak_bytes=6 * GIB)
    assert beside(History(plan=plan, steps={1: alike})).reason == ""
