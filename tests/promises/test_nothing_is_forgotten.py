"""Promise: under ``carry.policy: fetch`` a whole run bounds the bytes of the device, and loses no token."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from narrowboat import api, choosing
from narrowboat.errors import BudgetError, Interrupted
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.optimizers.schedule import learning_rate
from narrowboat.options.schema import CarryOptions, Options
from narrowboat.training import loop

RunOptions = Callable[..., Options]
FETCH = {
    "carry.policy": "fetch", "carry.budget": "48", "carry.block_tokens": 8, "segments.max_tokens": 24,
    "train.batch_tokens": 48, "train.steps": 6, "train.save_every": 0,
}  # fmt: skip


def events(options: Options, kind: str) -> list[dict[str, Any]]:
    lines = (Path(options.train.folder) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def adapter(options: Options) -> dict[str, Any]:
    return load_file(Path(options.train.folder) / "adapter" / "adapter_model.safetensors")


def rooms(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    """Let the machine have only so much room."""
    own = choosing.limits_here
    monkeypatch.setattr(choosing, "limits_here", lambda *args: replace(own(*args), **changes))


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_document_waits_from_the_command_to_the_answer(
    place: str, run_options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained, stopped with a document open, resumed, measured and asked; all tokens are learnt, whatever is seen."""
    whole, part = (run_options(**FETCH, **{"train.folder": str(tmp_path / name)}) for name in ("whole", "part"))
    if place == "disk":
        rooms(monkeypatch, device_bytes=20 * 2**20)
    api.train(whole, quiet=True)
    plan = json.loads((tmp_path / "whole" / "plan.json").read_text())
    assert plan["documents"] == place

    def interrupted(options: Any, step: int, num_steps: int) -> float:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return learning_rate(options, step, num_steps)

    monkeypatch.setattr(loop, "learning_rate", interrupted)
    with pytest.raises(Interrupted):
        api.train(part, quiet=True)
    monkeypatch.setattr(loop, "learning_rate", learning_rate)
    api.train(part, resume=True, quiet=True)
    assert all(tensor.equal(adapter(part)[name]) for name, tensor in adapter(whole).items())
    found = api.evaluate(Path(part.train.folder))
    assert found.adapter.perplexity.loss == pytest.approx(events(whole, "RunEnded")[-1]["last_heldout_loss"], rel=1e-4)
    shutil.copytree(tmp_path / "part" / "adapter", tmp_path / "alone")
    seen: list[CarryOptions] = []
    started = Carrier.start
    monkeypatch.setattr(Carrier, "start", lambda carrier: seen.append(carrier.options) or started(carrier))  # type: ignore[func-returns-value]
    answers = [api.generate(folder, "What is it? " * 30, most_tokens=5, base=part.model.name)
               for folder in (tmp_path / "part", tmp_path / "alone")]  # fmt: skip
    assert answers[0] == answers[1]
    assert seen == [part.carry, part.carry]


def test_a_document_that_has_no_room_anywhere_is_refused_before_the_run(
    run_options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = run_options(**FETCH)
    rooms(monkeypatch, device_bytes=2**20, disk_bytes=2**20)
    with pytest.raises(BudgetError, match=r"tokens of the longest documents take [\d.]+ MiB beside the device; host"):
        api.train(options, quiet=True)
    assert not (Path(options.train.folder) / "adapter").exists()
