"""The short form of ``tests/torture.py``: some kills, some faults and every limit, in a process that may fork."""

from __future__ import annotations

import subprocess
import sys


def test_what_a_run_has_to_survive() -> None:
    command = [sys.executable, "-m", "tests.torture", "--kills", "2", "--faults", "6", "--limits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "\nwell after " in done.stdout
