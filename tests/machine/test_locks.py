"""A folder is one process's; a killed one leaves it free."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from narrowboat.machine.locks import HOLDER, HeldError, alone_in

HOLD = """
import sys, time
from pathlib import Path
from narrowboat.machine.locks import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_at_once_and_told_who_has_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(HeldError, match=rf"process {other.pid} on .* since \d{{4}}-\d\d-\d\dT"), alone_in(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
    with alone_in(tmp_path):
        assert json.loads((tmp_path / HOLDER).read_text())["process"] == os.getpid()
    assert not (tmp_path / HOLDER).exists()


def test_a_damaged_note_of_who_has_it_is_no_matter(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        (tmp_path / HOLDER).write_bytes(b"\xff")
        script = "import sys\nfrom pathlib import Path\nfrom narrowboat.machine.locks import alone_in, HeldError\n"
        script += "try:\n    with alone_in(Path(sys.argv[1])): pass\nexcept HeldError as error: print(error)"
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "another process\n", done.stderr
