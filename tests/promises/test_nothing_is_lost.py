"""Promise: what a run has learnt is lost by no damage, no refusal, no second process and no full disk."""

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
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import is_fake

from narrowboat import api
from narrowboat.engine.engine import Engine
from narrowboat.errors import CheckpointError, OptionError
from narrowboat.events import CheckpointSaved, Event, Notice, StepDone
from narrowboat.options.load import dump
from narrowboat.options.schema import Options
from narrowboat.training import checkpoint

RunOptions = Callable[..., Options]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run, but the lock."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def notices(folder: Path) -> str:
    return "\n".join(event["text"] for event in events(folder) if event["event"] == "Notice")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def started(options: Options, path: Path, *words: str) -> subprocess.Popen[str]:
    dump(options, path)
    command = [sys.executable, "-m", "narrowboat.cli", "train", str(path), "--quiet", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": "src"})


def wait_for(done: Callable[[], bool], seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if done():
            return
        time.sleep(0.02)
    pytest.fail("it did not come so far")


@pytest.fixture(params=["a flipped byte", "a cut file", "a missing file"])
def damage(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        content = bytearray(path.read_bytes())
        if request.param == "a missing file":
            path.unlink()
        elif request.param == "a cut file":
            path.write_bytes(content[: len(content) // 2])
        else:
            content[len(content) // 3] ^= 0x10
            path.write_bytes(content)

    return do


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_goes_on(
    damage: Callable[[Path], None], run_options: RunOptions, tmp_path: Path
) -> None:
    changes = {"train.save_every": 1, "train.keep_checkpoints": 10}
    api.train(run_options(**changes), quiet=True)
    whole = weights(tmp_path / "run")
    for name in ("adapter/adapter_model.safetensors", "states.safetensors"):
        shutil.copytree(tmp_path / "run", part := tmp_path / f"part of {Path(name).parent.name}")
        damage(part / "checkpoints" / "step-000004" / name)
        api.train(run_options(**changes, **{"train.folder": str(part)}), resume=True, quiet=True)
        assert same(weights(part), whole)
        assert "step-000004 is not whole and is passed over" in notices(part)
        assert name.rpartition("/")[2] in notices(part)


REFUSED = [
    {"lora.rank": 8},
    {"lora.alpha": 64},
    {"train.seed": 1},
    {"train.batch_tokens": 400},
    {"optimizer.weight_decay": 0.1},
    {"lora.targets": "q_prj"},
    {"data.train": "/nowhere.jsonl"},
    {"memory.budget": "1MiB"},
]


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_what_is_refused_changes_nothing(change: dict[str, Any], run_options: RunOptions, tmp_path: Path) -> None:
    """The options of a finished run were rewritten before its checkpoint was looked at, and then nothing fitted."""
    options = run_options(**{"train.steps": 2})
    api.train(options, quiet=True)
    before = contents(tmp_path / "run")
    with pytest.raises(Exception, match=r".") as refused:
        api.train(run_options(**{"train.steps": 2} | change), resume=True, quiet=True)
    assert type(refused.value).__module__ == "narrowboat.errors"
    assert contents(tmp_path / "run") == before


def test_other_text_of_equal_length_is_other_data_and_can_be_accepted(
    run_options: RunOptions, dialogues: Path, tmp_path: Path
) -> None:
    options = run_options(**{"train.steps": 2})
    api.train(options, quiet=True)
    text = dialogues.read_text()
    dialogues.write_text(text.replace("Think well.", "Think hard."))
    longer = run_options(**{"train.steps": 3})
    with pytest.raises(OptionError, match=r"the rows hold other tokens or labels.*--resume-anyway data"):
        api.train(longer, resume=True, quiet=True)
    dialogues.rename(moved := tmp_path / "moved.jsonl")
    moved.write_text(text)
    api.train(run_options(**{"train.steps": 3, "data.train": str(moved)}), resume=True, quiet=True)
    moved.write_text(text.replace("Think well.", "Think hard."))
    final = run_options(**{"train.steps": 4, "data.train": str(moved)})
    assert api.train(final, quiet=True, resume_anyway=["data"]).step == 4
    assert "Resumed with a change that makes it another run: the rows hold other tokens" in notices(tmp_path / "run")
    assert "Resumed with a change: train.steps was 2, is 3." in notices(tmp_path / "run")


def test_other_weights_of_the_same_shape_are_another_run(
    run_options: RunOptions, tiny_model: Path, tmp_path: Path
) -> None:

    for name in ("model", "moved"):
        shutil.copytree(tiny_model, tmp_path / name)
    api.train(run_options(**{"train.steps": 1, "model.name": str(tmp_path / "model")}), quiet=True)
    there = {"train.steps": 2, "model.name": str(tmp_path / "moved")}
    assert api.train(run_options(**there), resume=True, quiet=True).step == 2  # the same weights elsewhere
    path = tmp_path / "moved" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(OptionError, match=r"the base has other weights.*--resume-anyway weights"):
        api.train(run_options(**there | {"train.steps": 3}), resume=True, quiet=True)


def test_an_accepted_option_is_the_one_that_counts(run_options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint holds the optimizer's settings as well; they were what counted, whatever the options said."""
    api.train(run_options(**{"train.steps": 1}), quiet=True)
    seen: list[tuple[float, float]] = []
    own = Engine.step

    def step(self: Engine, *args: Any, **kwargs: Any) -> Any:
        if not is_fake(next(self.model.parameters())):  # a forecast's
            group = self.optimizer.param_groups[0]  # type: ignore[union-attr]
            seen.append((group["weight_decay"], group["betas"][0]))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "step", step)
    changed = {"optimizer.weight_decay": 0.25, "optimizer.beta1": 0.5}
    api.train(run_options(**{"train.steps": 2}, **changed), quiet=True, resume_anyway=list(changed))
    assert seen == [(0.25, 0.5)]


def test_a_second_process_is_refused_at_once_and_the_first_goes_on(run_options: RunOptions, tmp_path: Path) -> None:
    options = run_options(**{"train.steps": 20, "train.save_every": 0})
    with started(options, tmp_path / "run.yaml") as first:
        wait_for(lambda: (tmp_path / "run" / ".lock.json").exists())
        first.send_signal(signal.SIGSTOP)
        with started(options, tmp_path / "again.yaml") as second:
            _, said = second.communicate(timeout=100)
        assert second.returncode == 2
        assert f"is in use by process {first.pid} on " in said
        first.send_signal(signal.SIGCONT)
        _, said = first.communicate(timeout=100)
    assert first.returncode == 0, said
    assert [event["event"] for event in events(tmp_path / "run")].count("RunStarted") == 1
    assert [event["step"] for event in events(tmp_path / "run") if event["event"] == "StepDone"] == list(range(1, 21))


def test_a_kill_while_saving_leaves_nothing_behind(run_options: RunOptions, tmp_path: Path) -> None:
    options = run_options(**{"train.steps": 4000, "train.save_every": 1, "lora.rank": 64})
    folder = tmp_path / "run" / "checkpoints"
    with started(options, tmp_path / "run.yaml") as process:
        wait_for(lambda: folder.is_dir() and any(path.name.startswith(".draft-") for path in folder.iterdir()))
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    left = [path.name for path in folder.iterdir()]
    assert any(name.startswith(".draft-") for name in left) or left  # the draft may have got its name meanwhile
    step = max((int(name[5:]) for name in left if name.startswith("step-")), default=0)
    last = run_options(**{"train.steps": step + 2, "train.save_every": 1, "lora.rank": 64})
    api.train(last, resume=True, quiet=True)
    assert all(path.name.startswith("step-") for path in folder.iterdir())
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith((".draft", ".old"))]


def test_a_save_that_fails_is_told_and_the_run_ends_with_an_error_and_its_adapter(
    run_options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, num_tries = checkpoint.write, 0

    def fails_once(*args: Any) -> CheckpointSaved:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 2:
            raise CheckpointError("step-000002: not saved: No space left on device")
        return write(*args)

    monkeypatch.setattr(checkpoint, "write", fails_once)
    with pytest.raises(CheckpointError, match="1 checkpoint was not saved; the first: step-000002: not saved"):
        api.train(run_options(**{"train.steps": 4, "train.save_every": 1, "train.keep_checkpoints": 9}), quiet=True)
    folder = tmp_path / "run"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-000001",
        "step-000003",
        "step-000004",
    ]
    assert "The run goes on, and will end with an error" in notices(folder)
    assert events(folder)[-1]["outcome"] == "failed"
    monkeypatch.undo()
    whole = api.train(run_options(**{"train.folder": str(tmp_path / "whole")}), quiet=True)
    assert whole.step == 4
    assert same(weights(folder), weights(tmp_path / "whole"))


@pytest.mark.parametrize(("asked", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("max_minutes", 143), ("twice", 143)])
def test_asked_to_stop_it_is_saved_and_says_by_what(
    asked: str, code: int, run_options: RunOptions, tmp_path: Path
) -> None:
    """Real processes; in the first evaluation as well, which is given up at once."""
    more = {"train.max_minutes": 0.1} if asked == "max_minutes" else {}
    options = run_options(**{"train.steps": 100_000, "train.save_every": 0, "train.evaluate_every": 3, **more})
    with started(options, tmp_path / "run.yaml") as process:
        if asked != "max_minutes":
            wait_for(lambda: (tmp_path / "run" / "events.jsonl").exists() and len(events(tmp_path / "run")) > 8)
            process.send_signal(signal.SIGINT if asked == "SIGINT" else signal.SIGTERM)
        if asked == "twice":
            process.send_signal(signal.SIGINT)  # as a launcher forwards it
        _, said = process.communicate(timeout=120)
    assert process.returncode == code, said
    assert "the run is saved in" in said
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(saved.name[5:]) >= 0
    assert events(tmp_path / "run")[-1]["outcome"] == "interrupted"


def test_5000_numbered_rows_stopped_and_resumed_twice_come_in_the_uninterrupted_order(
    run_options: RunOptions, dialogues: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialogues.write_text("".join(json.dumps({"text": f"row number {i}"}) + "\n" for i in range(5000)))
    seen: list[list[int]] = []
    own = Engine.step

    def step(self: Engine, rows: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_fake(next(self.model.parameters())):  # a forecast's
            seen.append([token for row in rows for token in row.input_ids.tolist()])
        return own(self, rows, *args, **kwargs)

    monkeypatch.setattr(Engine, "step", step)
    shape = {
        "train.batch_tokens": 4096,
        "data.heldout_share": 0,
        "packing.row_tokens": 256,
        "optimizer.schedule": "constant",
    }

    def train(name: str, steps: int, **more: Any) -> list[list[int]]:
        seen.clear()
        api.train(
            run_options(**shape, **{"train.folder": str(tmp_path / name), "train.steps": steps}), quiet=True, **more
        )
        return list(seen)

    whole = train("whole", 5)
    parts = train("parts", 2) + train("parts", 3, resume=True) + train("parts", 5, resume=True)
    assert len(whole) == 5
    assert parts == whole
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_a_folder_that_is_deleted_meanwhile_gets_its_adapter_all_the_same(run_options: RunOptions) -> None:
    options, told = run_options(**{"train.monitor": ()}), list[Event]()
    folder = Path(options.train.folder)

    def delete(event: Event) -> None:
        told.append(event)
        if isinstance(event, StepDone) and event.step == 2:
            shutil.rmtree(folder)

    assert api.train(options, quiet=True, callbacks=[delete]).outcome == "done"
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    assert any("events.jsonl is gone: the model card" in event.text for event in told if isinstance(event, Notice))
