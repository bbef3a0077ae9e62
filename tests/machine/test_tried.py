"""A library that is newer than what was tried is told, with the way back."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from narrowboat.machine.tried import TRIED, newer_than_tried


def test_what_was_tried_is_what_is_pinned() -> None:
    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    for name, (major, minor) in TRIED.items():
        assert re.search(rf"^{name}=={major}\.{minor}\.", pinned, flags=re.MULTILINE), name


def test_a_newer_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert newer_than_tried() == []
    given = {"torch": "3.0.0a1+cu130", "transformers": "5.24.9", "peft": "0.22rc1"}
    monkeypatch.setattr(importlib.metadata, "version", given.__getitem__)
    assert newer_than_tried() == [
        "torch 3.0.0a1+cu130 is newer than 2.13, the newest that Narrowboat was tried with. If something fails: "
        "pip install 'torch<2.14'",
        "peft 0.22rc1 is newer than 0.21, the newest that Narrowboat was tried with. If something fails: "
        "pip install 'peft<0.22'",
    ]
