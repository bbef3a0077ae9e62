"""Promise: processes that share step batches learn what one process learns, and fail together or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from narrowboat import api
from narrowboat.errors import OptionError
from narrowboat.options.load import dump, load
from narrowboat.options.schema import Options
from tests.distributed import jobs
from tests.distributed.together import together

RunOptions = Callable[..., Options]
CASES: dict[str, dict[str, Any]] = {
    "recompute": {"memory.plan": "recompute"},
    "stream": {"memory.plan": "stream"},
    "dropout, one row at a time": {"lora.dropout": 0.2, "packing.enabled": False, "train.batch_tokens": 500},
    "8-bit states": {"optimizer.name": "adamw8bit", "lora.rank": 64},
}


@pytest.fixture
def flags(run_options: RunOptions) -> dict[str, Any]:
    made = run_options(**{"train.steps": 5, "train.batch_tokens": 400, "train.monitor": ()}).model_dump()
    return {f"{group}.{name}": value for group, values in made.items() for name, value in values.items()}


def adapter(folder: Path) -> torch.Tensor:
    found = load_file(folder / "adapter" / "adapter_model.safetensors")
    return torch.cat([found[name].double().flatten() for name in sorted(found)])


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def off(one: Path, other: Path) -> float:
    """How far the second adapter is from the first."""
    first, second = adapter(one), adapter(other)
    return float((first - second).norm() / first.norm())


def test_two_processes_learn_what_one_learns(flags: dict[str, Any], tmp_path: Path) -> None:
    wanted = [flags | case | {"train.folder": str(tmp_path / name)} for name, case in CASES.items()]
    shared = [case | {"train.folder": f"{case['train.folder']}, two"} for case in wanted]
    for case in wanted:
        api.train(load(None, case), quiet=True)
    assert together(2, jobs.runs, shared, folder=tmp_path) == [["done"] * len(CASES)] * 2
    for name in CASES:
        one, two = tmp_path / name, tmp_path / f"{name}, two"
        assert off(one, two) < (1e-5 if name != "8-bit states" else 1e-3)  # what is rounded to 8 bits may jump
        told = [[(e["loss"], e["num_tokens"]) for e in events(folder, "StepDone")] for folder in (one, two)]
        for (loss, num), (shared_loss, shared_num) in zip(*told, strict=True):
            assert shared_loss == pytest.approx(loss, rel=1e-5)
            assert shared_num == num
        assert events(two, "RunEnded")[0]["last_heldout_loss"] == pytest.approx(
            events(one, "RunEnded")[0]["last_heldout_loss"], rel=1e-4
        )


def test_what_fails_on_one_fails_together(flags: dict[str, Any], tmp_path: Path) -> None:
    flags |= {"packing.enabled": False, "memory.plan": "auto"}
    api.train(load(None, flags | {"train.folder": str(tmp_path / "alone")}), quiet=True)
    failures = [("memory", 1, 2), ("nan", 0, 3), ("error", 1, 2), ("signal", 1, 2), ("killed", 1, 2)]
    first, second = together(2, jobs.several, flags, failures, folder=tmp_path)
    assert second is None  # it was killed in the end
    (memory, nan, error, stopped, killed) = (outcome for outcome, _ in first)
    assert all(seconds < 60 for _, seconds in first)
    assert memory == "done"
    assert off(tmp_path / "alone", Path(flags["train.folder"] + "-memory")) < 1e-5
    assert "device memory ran out" in events(Path(flags["train.folder"] + "-memory"), "PlanChanged")[0]["reason"]
    assert nan == "done"
    assert events(Path(flags["train.folder"] + "-nan"), "StepDone")[-1]["num_skipped"] == 1
    assert error == "RankError: Process 1 of 2 failed: a test's"
    assert stopped.startswith("Interrupted: Stopped by SIGTERM; the run is saved in")
    assert killed.startswith("RankError: Process 0 waited for another process of the run, which is gone")


def test_the_command_starts_them_and_another_number_goes_on(run_options: RunOptions, tmp_path: Path) -> None:
    changes = {"train.steps": 40, "train.batch_tokens": 400, "optimizer.lr": 1e-3}
    api.train(run_options(**changes, **{"train.folder": str(tmp_path / "whole")}), quiet=True)
    dump(run_options(**changes), tmp_path / "run.yaml")
    command = [sys.executable, "-m", "narrowboat", "train", tmp_path / "run.yaml", "--parallel.data", "2"]
    environment = os.environ | {"PYTHONPATH": "src"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        _wait_for_step(tmp_path / "run" / "events.jsonl", 2)
        process.send_signal(signal.SIGTERM)
        assert b"Stopped by SIGTERM; the run is saved in" in process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert api.train(run_options(**changes), resume=True, quiet=True).outcome == "done"
    steps = [event["step"] for event in events(tmp_path / "run", "StepDone")]
    assert steps == list(range(1, 41))
    assert off(tmp_path / "whole", tmp_path / "run") < 1e-5


def test_torchrun_starts_a_killed_one_again_and_the_run_goes_on(run_options: RunOptions, tmp_path: Path) -> None:
    changes = {"train.steps": 120, "train.batch_tokens": 400, "train.save_every": 5, "optimizer.lr": 1e-3}
    api.train(run_options(**changes, **{"train.folder": str(tmp_path / "whole")}), quiet=True)
    dump(run_options(**changes), tmp_path / "run.yaml")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2",
        "-m", "narrowboat", "train", tmp_path / "run.yaml", "--resume",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as launcher:
        _wait_for_step(tmp_path / "run" / "events.jsonl", 10)
        second = next(p for p in psutil.Process(launcher.pid).children() if p.environ().get("RANK") == "1")
        second.kill()
        assert launcher.wait(120) == 0
    ended = [event["outcome"] for event in events(tmp_path / "run", "RunEnded")]
    assert ended == ["failed", "done"]
    assert off(tmp_path / "whole", tmp_path / "run") < 1e-5


def _wait_for_step(path: Path, step: int) -> None:
    for _ in range(600):
        if path.exists() and sum(b'"StepDone"' in line for line in path.read_bytes().splitlines()) >= step:
            return
        time.sleep(0.1)
    raise AssertionError("no steps")


@pytest.mark.parametrize(
    ("flags_of_run", "environment", "words"),
    [
        ({"parallel.data": 3}, {"WORLD_SIZE": "2", "RANK": "0"}, "parallel.data is 3, and 2 processes were started"),
        ({"parallel.data": 2}, {}, "parallel.data is 2, and 1 process was started"),
    ],
)
def test_another_number_than_was_started_is_refused(
    flags_of_run: dict[str, Any], environment: dict[str, str], words: str, run_options: RunOptions, monkeypatch: Any
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=words):
        api.train(run_options(**flags_of_run), quiet=True)


@pytest.mark.parametrize("flag", [{"carry.policy": "window"}, {"optimizer.name": "adalomo"}])
def test_what_processes_cannot_share_is_refused(flag: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="process"):
        load(None, flag | {"parallel.data": 2})
