"""Promise: with ``train.keep_best`` the adapter with the lowest held-out loss is kept apart from the last."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from narrowboat import api
from narrowboat.errors import CheckpointError
from narrowboat.options.schema import Options
from narrowboat.training import saver

RunOptions = Callable[..., Options]
KEPT = {"train.evaluate_every": 1, "train.keep_best": True, "train.save_every": 1, "train.keep_checkpoints": 9}


def weights(adapter: Path) -> dict[str, torch.Tensor]:
    return load_file(adapter / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def with_losses(losses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowboat.training.loop._evaluate", lambda recovery, course, step, tell: losses[step])


@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free"])
def test_the_best_by_held_out_loss_is_kept_apart(
    optimizer: str, run_options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_losses([3.0, 2.0, 1.0, 1.5, 1.2], monkeypatch)
    api.train(run_options(**KEPT, **{"optimizer.name": optimizer}), quiet=True)
    best = tmp_path / "run" / "best"
    manifest = json.loads((best / "manifest.json").read_text())
    assert (manifest["step"], manifest["heldout_loss"]) == (2, 1.0)
    then = weights(tmp_path / "run" / "checkpoints" / "step-000002" / "adapter")
    assert same(weights(best), then) == (optimizer == "adamw")  # the other trains on other weights than it hands out
    assert not same(weights(best), weights(tmp_path / "run" / "adapter"))
    done = api.export(best, tmp_path / "out", say=lambda text: None)
    assert done["verified"]["max_difference"] <= 1e-4


def test_one_that_could_not_be_kept_is_not_the_one_to_beat(
    run_options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_losses([3.0, 2.0, 1.0, 1.5, 1.2], monkeypatch)
    own = saver.save_adapter

    def fails_at_step_2(model: Any, folder: Path, note: dict[str, Any]) -> None:
        if note["step"] == 2:
            raise CheckpointError("best: the adapter was not saved: No space left on device")
        own(model, folder, note)

    monkeypatch.setattr(saver, "save_adapter", fails_at_step_2)
    with pytest.raises(CheckpointError, match="1 checkpoint was not saved; the first: best: the adapter was not saved"):
        api.train(run_options(**KEPT), quiet=True)
    manifest = json.loads((tmp_path / "run" / "best" / "manifest.json").read_text())
    assert (manifest["step"], manifest["heldout_loss"]) == (4, 1.2)
