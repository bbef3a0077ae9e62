"""Tests that run on a double of a card, where ``make test-card`` puts them; anywhere else there is nothing to collect.

The double's kernels compute nothing: sizes, places, copies and waits are a card's, numbers are not. So whoever asks
numbers whether all is well is told that it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch

from narrowboat.engine import engine, gradients
from narrowboat.machine.card import let_blocks_grow

if "CARD_DOUBLE" in os.environ:
    let_blocks_grow()  # as every run does; else the allocator leaves up to 1 MiB beside each tensor
    with warnings.catch_warnings(action="ignore"):  # of NVML, which knows no fabric here
        torch.zeros(1, device="cuda")
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def numbers_are_well(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No gradient is NaN, no projection's value is missed, and the machine is measured once."""
    for module in (engine, gradients):
        monkeypatch.setattr(module, "is_true", lambda value: True)
    monkeypatch.setattr(torch, "allclose", lambda *given, **further: True)
    monkeypatch.setenv("NARROWBOAT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def in_a_process() -> Callable[..., str]:
    """Runs a program in a process that has not touched the card yet, and gives what it prints."""

    def run(program: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert not done.returncode, done.stderr
        return done.stdout

    return run
