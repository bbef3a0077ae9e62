"""Tests that run on a double of a card, where ``make test-card`` puts them; anywhere else there is nothing to collect.

The double's kernels compute nothing: sizes, places, copies and waits are a card's, numbers are not. So whoever asks
numbers whether all is well is told that it is.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from narrowboat.engine import engine, gradients

if "CARD_DOUBLE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def numbers_are_well(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No gradient is NaN, no projection's value is missed, and the machine is measured once."""
    for module in (engine, gradients):
        monkeypatch.setattr(module, "is_true", lambda value: True)
    monkeypatch.setattr(torch, "allclose", lambda *given, **further: True)
    monkeypatch.setenv("NARROWBOAT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a small model with a tokenizer, as users have theirs."""
    from tests.promises.test_forecast_of_every_phase import write_model

    return write_model(tmp_path / "model", hidden_size=256, intermediate_size=512)
