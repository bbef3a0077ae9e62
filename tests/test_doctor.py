"""The doctor of a machine: what it says is true here, and a technique that is not exact is named."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from narrowboat import proving
from narrowboat.cli import app
from narrowboat.memory import linear_loss

CPU = torch.device("cpu")


def test_every_technique_is_exact_here() -> None:
    proofs = proving.prove(CPU)
    assert [proof.technique for proof in proofs] == list(proving.TECHNIQUES)
    assert all(proof.is_exact for proof in proofs), [proof.line() for proof in proofs]


def test_what_is_not_exact_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shift = linear_loss.shift
    monkeypatch.setattr("narrowboat.memory.causal.shift", lambda labels: shift(labels).roll(1, 1))
    wrong = proving.prove(CPU)
    assert not any(proof.is_exact for proof in wrong)
    assert "NOT exact" in wrong[0].line()


def test_what_a_machine_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("narrowboat.owner.places.Disk.room", full, raising=False)
    monkeypatch.setattr(proving, "install", full)
    assert proving.prove(CPU)[0].line().startswith("recompute layers           failed: No space left on device")


def test_the_command_tells_all() -> None:
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert {"driver", "others_bytes", "pinned_limit_bytes", "formats", "attention", "proofs", "rates"} <= found.keys()
    assert all(proof["is_exact"] for proof in found["proofs"])
    assert 0 <= found["others_bytes"] < found["device_total_bytes"]
