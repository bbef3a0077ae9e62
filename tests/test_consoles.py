"""Consoles that have few letters, and file names that are no text: escapes, and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from narrowboat.options.load import dump
from narrowboat.options.schema import Options

RunOptions = Callable[..., Options]
NO_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def said(*words: str | bytes | Path, **environment: str) -> tuple[int, bytes, bytes]:
    command = [sys.executable, "-m", "narrowboat", *words]
    done = subprocess.run(
        command, capture_output=True, timeout=200, env=os.environ | {"PYTHONPATH": "src"} | environment
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def odd_file(tmp_path: Path) -> bytes:
    """A file whose name is Latin-1, with a text that no narrow console can show, and a broken line."""
    path = os.fsencode(tmp_path) + b"/caf\xe9.jsonl"
    text = "".join(json.dumps({"text": f"Größe {i}: 好, and on it goes."}, ensure_ascii=False) + "\n" for i in range(4))
    with open(path, "wb") as file:
        file.write(text.encode() + b"{broken\n")
    return path


@pytest.mark.parametrize(
    ("environment", "letters"),
    [
        ({"PYTHONIOENCODING": "ascii"}, rb"[[\xf6\xdfe 0: \u597d, and"),
        ({"PYTHONIOENCODING": "cp1252"}, "[[öße".encode("cp1252") + rb" 0: \u597d, and"),
        (NO_UTF8, rb"\u597d, and"),
    ],
    ids=["ascii", "cp1252", "LC_ALL=C"],
)
def test_what_a_console_has_no_letters_for_is_escaped(
    environment: dict[str, str], letters: bytes, odd_file: bytes, run_options: RunOptions, tmp_path: Path
) -> None:
    dump(run_options(), tmp_path / "run.yaml")
    words = [tmp_path / "run.yaml", "--data.train", odd_file, "--show", "1"]
    code, out, err = said("prepare", *words, **environment)
    assert code == 0, err
    assert letters in out
    assert b"####" in out
    assert rb"caf\xe9.jsonl, line 5: it is not valid JSON" in err
    assert b"Traceback" not in err


def test_a_run_over_such_a_file_is_written_down_and_can_be_measured(
    odd_file: bytes, run_options: RunOptions, tmp_path: Path
) -> None:
    dump(run_options(**{"train.steps": 1}), tmp_path / "run.yaml")
    code, _, err = said("train", tmp_path / "run.yaml", "--data.train", odd_file, **NO_UTF8)
    assert code == 0, err
    events = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8")
    assert r"caf\\xe9.jsonl, line 5" in events
    code, out, err = said("eval", tmp_path / "run", "--json", **NO_UTF8)
    assert code == 0, err
    assert json.loads(out)


def test_one_of_several_processes_without_the_others_is_an_error_in_a_sentence(
    run_options: RunOptions, tmp_path: Path
) -> None:
    dump(run_options(), tmp_path / "run.yaml")
    code, _, err = said("train", tmp_path / "run.yaml", WORLD_SIZE="2", RANK="1")
    assert code == 1
    assert b"narrowboat: Process 1 of 2 did not find the others" in err
    assert b"Traceback" not in err
    assert not (tmp_path / "run").exists()
