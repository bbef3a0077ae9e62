from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.memory.families import adapted

from narrowboat.errors import CheckpointError
from narrowboat.events import Event, Notice
from narrowboat.training.checkpoint import RUN, STATES, Position, newest_checkpoint, restore, save_checkpoint


def stepped() -> tuple[Any, torch.optim.Optimizer]:
    """A tiny adapted model after one step of AdamW."""
    model = adapted("llama")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.arange(3, 20)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return model, optimizer


def at(step: int) -> Position:
    return Position(step, 10, 100 * step, "abc", {"layers": "recompute"}, "float32", 2.5)


def tensors(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [p.detach().clone() for p in model.parameters() if p.requires_grad] + [s.clone() for s in states]


def test_r21_what_is_restored_is_bit_for_bit_what_was_saved(tmp_path: Path) -> None:
    model, optimizer = stepped()
    saved, random = tensors(model, optimizer), torch.get_rng_state()
    event = save_checkpoint(tmp_path, at(3), model, optimizer, keep=2)
    assert event.num_bytes == sum(
        f.stat().st_size for f in Path(event.folder).rglob("*") if f.name != RUN and f.is_file()
    )
    other, fresh = stepped()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1 if p.requires_grad else 0)
    torch.rand(3)
    found = newest_checkpoint(tmp_path, pytest.fail)
    assert found is not None
    assert found[1] == at(3)
    restore(found[0], other, fresh)
    assert all(map(torch.equal, tensors(other, fresh), saved))
    assert torch.equal(torch.get_rng_state(), random)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    model, optimizer = stepped()
    for step in range(1, 5):
        save_checkpoint(tmp_path, at(step), model, optimizer, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]


@pytest.mark.parametrize("damage", ["cut", "missing", "no mark"])
def test_r22_a_checkpoint_that_is_not_whole_is_passed_over_and_named(tmp_path: Path, damage: str) -> None:
    model, optimizer = stepped()
    for step in (1, 2):
        save_checkpoint(tmp_path, at(step), model, optimizer, keep=3)
    newest = tmp_path / "step-000002"
    if damage == "cut":
        with (newest / STATES).open("r+b") as file:
            file.truncate(100)
    elif damage == "missing":
        (newest / "adapter" / "adapter_model.safetensors").unlink()
    else:
        (newest / RUN).unlink()
    told: list[Event] = []
    found = newest_checkpoint(tmp_path, told.append)
    assert found is not None
    assert found[1].step == 1
    assert [type(event) for event in told] == [Notice]
    assert "step-000002 is not whole" in told[0].text  # type: ignore[attr-defined]


def test_r22_what_a_killed_save_leaves_is_no_checkpoint(tmp_path: Path) -> None:
    model, optimizer = stepped()
    save_checkpoint(tmp_path, at(1), model, optimizer, keep=3)
    shutil.copytree(tmp_path / "step-000001", tmp_path / ".step-000002.77")
    found = newest_checkpoint(tmp_path, pytest.fail)
    assert found is not None
    assert found[1].step == 1


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small disk needs root")
def test_r22_a_full_disk_leaves_the_earlier_checkpoint_whole(tmp_path: Path) -> None:
    model, optimizer = stepped()
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        save_checkpoint(disk, at(1), model, optimizer, keep=1)
        (disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(disk).free - 30_000))
        before = tensors(model, optimizer)
        with pytest.raises(CheckpointError, match=r"KiB are free there\. Earlier checkpoints are whole"):
            save_checkpoint(disk, at(2), model, optimizer, keep=1)
        found = newest_checkpoint(disk, pytest.fail)
        assert found is not None
        assert found[1].step == 1
        assert sorted(path.name for path in disk.iterdir()) == ["ballast", "step-000001"]
        assert all(map(torch.equal, before, tensors(model, optimizer)))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_another_adapter_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = stepped()
    path = Path(save_checkpoint(tmp_path, at(1), model, optimizer, keep=1).folder)
    (path / STATES).write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"states\.pt: cannot be put into this optimizer"):
        restore(path, model, optimizer)
