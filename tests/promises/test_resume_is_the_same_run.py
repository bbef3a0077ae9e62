"""Promise: a run that was stopped and resumed is the run that was not, to the last bit on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from narrowboat import api
from narrowboat.errors import Interrupted, OptionError
from narrowboat.optimizers.schedule import learning_rate
from narrowboat.options.load import dump
from narrowboat.options.schema import Options

RunOptions = Callable[..., Options]


def losses(folder: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "StepDone"}


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def test_r21_a_resumed_run_is_the_same_to_the_last_bit(run_options: RunOptions, tmp_path: Path) -> None:
    changes = {"train.save_every": 1, "train.keep_checkpoints": 10, "lora.dropout": 0.2, "train.steps": 5}
    whole = run_options(**changes, **{"train.folder": str(tmp_path / "whole")})
    api.train(whole, quiet=True)
    part = run_options(**changes, **{"train.folder": str(tmp_path / "part")})
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for step in (4, 5):
        shutil.rmtree(tmp_path / "part" / "checkpoints" / f"step-{step:06d}")
    shutil.rmtree(tmp_path / "part" / "adapter")
    (tmp_path / "part" / "events.jsonl").unlink()
    ended = api.train(part, resume=True, quiet=True)
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "part") == {4: expected[4], 5: expected[5]}
    assert same(weights(tmp_path / "part"), weights(tmp_path / "whole"))
    assert ended.first_heldout_loss is not None
    assert ended.last_heldout_loss is not None
    assert ended.num_tokens > 0


def test_a_signal_saves_and_resuming_goes_on(run_options: RunOptions, tmp_path: Path) -> None:
    """A real process, a real SIGTERM in the middle, then the same command with --resume."""
    options = run_options(**{"train.steps": 400, "train.save_every": 0})
    path = tmp_path / "run.yaml"
    dump(options, path)
    command = [sys.executable, "-m", "narrowboat.cli", "train", str(path), "--quiet"]
    folder = Path(options.train.folder)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": "src"})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not (folder / "events.jsonl").exists() or len(losses(folder)) < 3):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert "Continue it with --resume" in said
    done = max(losses(folder))
    assert 3 <= done < 400
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    with pytest.raises(OptionError, match="holds the checkpoints of another run"):
        api.train(options, quiet=True)
    ended = api.train(run_options(**{"train.steps": done + 1, "train.save_every": 0}), resume=True, quiet=True)
    assert ended.step == done + 1


def test_an_interrupt_in_the_middle_of_a_step_waits_for_its_end(
    run_options: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return learning_rate(*args)

    monkeypatch.setattr("narrowboat.training.loop.learning_rate", interrupted)
    options = run_options()
    with pytest.raises(Interrupted) as stopped:
        api.train(options, quiet=True)
    assert stopped.value.exit_code == 130
    assert Path(options.train.folder, "checkpoints", "step-000001", "run.json").exists()
