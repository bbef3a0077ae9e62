"""The pictures of the documentation, made anew from a real run: ``python -m docs.screenshots``, after ``make demo``.

``live.svg`` is the foot of the terminal in the middle of a step of the demo's, ``report.png`` the demo's report, and
``plan.png`` the page of ``narrowboat plan --html``, as a browser shows them.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from rich.console import Console
from tests.planner.browser import PATH, Page

from narrowboat import api
from narrowboat.monitor.foot import Foot
from narrowboat.monitor.progress import Progress
from narrowboat.options.load import load

DEMO, IMAGES = Path("build/demo"), Path("docs/images")
PLAN = "plan --model llama-3.1-8b --quantize nf4 --rank 32 --tokens 32768 --budget 24GiB"
WIDTH, COLUMNS, STEPS = 1100, 118, 4


def main() -> None:
    """All pictures, or those that are named: live, report, plan."""
    wanted = sys.argv[1:] or ["live", "report", "plan"]
    report = DEMO / "run" / "report.html"
    if not report.exists():
        sys.exit(f"{report} is not there; run make demo first.")
    if "live" in wanted:
        live(IMAGES / "live.svg")
    if PATH is None:
        sys.exit("No chromium or chrome was found to open the pages with.")
    with tempfile.TemporaryDirectory() as folder:
        if "report" in wanted:
            picture(report, IMAGES / "report.png", Path(folder) / "report")
        if "plan" in wanted:
            found = Path(folder) / "plan.html"
            subprocess.run([sys.executable, "-m", "narrowboat", *PLAN.split(), "--html", str(found)], check=True)
            picture(found, IMAGES / "plan.png", Path(folder) / "plan")


def live(path: Path) -> None:
    """Train some steps of the demo, and keep the foot as it was drawn last before the end."""
    drawn: list[str] = []
    look = Progress.look

    def watched(self: Progress) -> None:
        look(self)
        if self._foot.step == STEPS and self._foot.view is not None and self._foot.view.underway.share > 0.5:
            drawn.append(svg_of(self._foot))

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Progress, "look", watched):
        flags = {"train.folder": folder, "train.steps": STEPS, "data.heldout_share": 0, "data.heldout": ()}
        api.train(load(Path("examples/demo.yaml"), flags))
    path.write_text(drawn[0], encoding="utf-8")


def picture(page: Path, path: Path, profile: Path) -> None:
    """What a window of ``WIDTH`` shows of ``page`` at first."""
    with Page(page.resolve().as_uri(), WIDTH, profile) as opened:
        opened.picture(path)


def svg_of(foot: Foot) -> str:
    """The foot as rich draws a terminal."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(foot)
    return console.export_svg(title="narrowboat train examples/demo.yaml")


if __name__ == "__main__":
    main()
