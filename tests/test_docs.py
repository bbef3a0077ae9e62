"""The documentation's site builds without a warning, and every link in it leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).parents[1]


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=TOP, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    assert {
        "index.html",
        "api/index.html",
        "models/index.html",
        "catalog/index.html",
        "events/index.html",
        "options/index.html",
    } <= pages
    for page in ("index.html", "benchmarks/index.html"):
        place = tmp_path / "site" / page
        for source in re.findall(r'<img[^>]* src="([^":]+)"', place.read_text(encoding="utf-8")):
            assert (place.parent / source).exists(), f"{page}: {source}"
