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
from narrowboat.events import CheckpointSaved, Event, Notice
from narrowboat.machine.drafts import HashedFile, clear
from narrowboat.plan import MemoryPlan
from narrowboat.training.checkpoint import (
    RUN,
    STATES,
    TREE,
    Position,
    check_space,
    newest_checkpoint,
    restore,
    snapshot,
    write,
)
from narrowboat.training.sameness import Identity

FILES = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors", "adapter/manifest.json", RUN, STATES, TREE]


def stepped() -> tuple[Any, torch.optim.Optimizer]:
    """A tiny adapted model after one step of AdamW."""
    model = adapted("llama")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.arange(3, 20)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return model, optimizer


def at(step: int) -> Position:
    identity = Identity({"data": "abc"}, {"lora.rank": 4, "optimizer.beta1": None, "lora.targets": ["q_proj"]})
    return Position(step, 10, 100 * step, identity, MemoryPlan(layers="recompute"), "float32", 2.5)


def save(folder: Path, step: int, model: Any, optimizer: torch.optim.Optimizer, keep: int = 3) -> CheckpointSaved:
    return write(folder, snapshot(at(step), model, optimizer), keep)


def tensors(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [p.detach().clone() for p in model.parameters() if p.requires_grad] + [s.clone() for s in states]


def test_r21_what_is_restored_is_bit_for_bit_what_was_saved(tmp_path: Path) -> None:
    model, optimizer = stepped()
    saved, random = tensors(model, optimizer), torch.get_rng_state()
    event = save(tmp_path, 3, model, optimizer)
    found = sorted(str(path.relative_to(event.folder)) for path in Path(event.folder).rglob("*") if path.is_file())
    assert found == sorted(FILES)  # and so no pickle among them
    assert event.num_bytes == sum((Path(event.folder) / name).stat().st_size for name in FILES if name != RUN)
    other, fresh = stepped()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1 if p.requires_grad else 0)
    torch.rand(3)
    whole = newest_checkpoint(tmp_path, pytest.fail)
    assert whole is not None
    assert whole[1] == at(3)
    restore(whole[0], other, fresh)
    assert all(map(torch.equal, tensors(other, fresh), saved))
    assert torch.equal(torch.get_rng_state(), random)


def test_a_copy_is_what_was_there_when_it_was_taken(tmp_path: Path) -> None:
    model, optimizer = stepped()
    saved = tensors(model, optimizer)
    taken = snapshot(at(1), model, optimizer).copied()
    model(input_ids=torch.arange(3, 20)[None], labels=torch.arange(3, 20)[None]).loss.backward()
    optimizer.step()
    assert not all(map(torch.equal, tensors(model, optimizer), saved))
    restore(Path(write(tmp_path, taken, 1).folder), model, optimizer)
    assert all(map(torch.equal, tensors(model, optimizer), saved))


def test_only_the_newest_stay(tmp_path: Path) -> None:
    model, optimizer = stepped()
    for step in range(1, 5):
        save(tmp_path, step, model, optimizer, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_r22_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, name: str, damage: str) -> None:
    model, optimizer = stepped()
    for step in (1, 2):
        save(tmp_path, step, model, optimizer)
    path = tmp_path / "step-000002" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    if damage != "remove":
        path.write_bytes(content if damage == "flip" else content[:-1])
    told: list[Event] = []
    found = newest_checkpoint(tmp_path, told.append)
    assert found is not None
    assert found[1].step == 1
    assert [type(event) for event in told] == [Notice]
    assert "step-000002 is not whole and is passed over" in told[0].text  # type: ignore[attr-defined]


def test_where_none_is_whole_the_run_does_not_begin_anew(tmp_path: Path) -> None:
    model, optimizer = stepped()
    save(tmp_path, 1, model, optimizer)
    (tmp_path / "step-000001" / RUN).unlink()
    with pytest.raises(CheckpointError, match=r"none of 1 checkpoints can be used; .*it has no run\.json"):
        newest_checkpoint(tmp_path, lambda event: None)


def test_r22_what_a_killed_save_leaves_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    model, optimizer = stepped()
    save(tmp_path, 1, model, optimizer)
    shutil.copytree(tmp_path / "step-000001", tmp_path / ".draft-step-000002")
    found = newest_checkpoint(tmp_path, pytest.fail)
    assert found is not None
    assert found[1].step == 1
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_what_was_moved_aside_when_a_save_was_killed_comes_back(tmp_path: Path) -> None:
    model, optimizer = stepped()
    save(tmp_path, 1, model, optimizer)
    (tmp_path / "step-000001").rename(tmp_path / ".old-step-000001")
    clear(tmp_path)
    found = newest_checkpoint(tmp_path, pytest.fail)
    assert found is not None


def test_r22_a_write_that_fails_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the n-th write, for the first and the last and many between."""
    model, optimizer = stepped()
    save(tmp_path, 1, model, optimizer)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    num_writes, full_at, own = 0, 0, HashedFile.write

    def fails(self: HashedFile, block: bytes) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes == full_at:
            raise OSError(28, "No space left on device")
        return own(self, block)

    monkeypatch.setattr(HashedFile, "write", fails)
    write(tmp_path / "elsewhere", snapshot(at(2), model, optimizer), 1)
    most, num_tried = num_writes, 0
    for number in {*range(1, 6), *range(6, most, 17), most - 2, most - 1, most}:
        num_writes, full_at = 0, number
        with pytest.raises(CheckpointError, match=r"not saved: No space left on device\. It takes about"):
            save(tmp_path, 2, model, optimizer, keep=1)
        num_tried += 1
        shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert num_tried > 10


def test_room_is_looked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowboat.training.checkpoint.free_disk_bytes", lambda path: 2**20)
    with pytest.raises(CheckpointError, match=r"it takes 2\.00 MiB, 1\.00 MiB are free there"):
        check_space(tmp_path, 2**20)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small disk needs root")
def test_r22_a_full_disk_leaves_the_earlier_checkpoint_whole(tmp_path: Path) -> None:
    model, optimizer = stepped()
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        save(disk, 1, model, optimizer, keep=1)
        (disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(disk).free - 30_000))
        before = tensors(model, optimizer)
        with pytest.raises(CheckpointError, match=r"KiB are free there\. Earlier checkpoints are whole"):
            save(disk, 2, model, optimizer, keep=1)
        found = newest_checkpoint(disk, pytest.fail)
        assert found is not None
        assert found[1].step == 1
        assert sorted(path.name for path in disk.iterdir()) == ["ballast", "step-000001"]
        assert all(map(torch.equal, before, tensors(model, optimizer)))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = stepped()
    path = Path(save(tmp_path, 1, model, optimizer).folder)
    (path / STATES).write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"states\.safetensors: cannot be read"):
        restore(path, model, optimizer)
    other = torch.optim.AdamW([next(p for p in model.parameters() if p.requires_grad)])
    save(tmp_path, 1, model, optimizer)
    with pytest.raises(CheckpointError, match=r"states\.safetensors: cannot be put into this optimizer"):
        restore(path, model, other)
