from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from narrowboat.errors import MachineError
from narrowboat.events import Event
from narrowboat.owner.inputs import Elsewhere, OnDevice, Store
from narrowboat.owner.places import Disk, Host, map_scratch
from narrowboat.owner.stride import Strided
from narrowboat.training.checkpoint import newest_checkpoint
from tests.training.runs import RUNGS, Run


def no_layer(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError


def quiet(_: Event) -> None:
    pass


def on_host(device: str = "cpu") -> Store:
    return Elsewhere(Host(torch.device(device), quiet))


def on_disk(device: str = "cpu", folder: Path | None = None) -> Store:
    return Elsewhere(Disk(torch.device(device), quiet, folder))


@pytest.mark.parametrize("make", [OnDevice, on_host, on_disk], ids=["device", "host", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_put_comes_back(make: Callable[[], Store], dtype: torch.dtype) -> None:
    store = make()
    inputs = [torch.randn(2, 10, 4).to(dtype) for _ in range(3)]
    held = [store.put(x, no_layer) for x in inputs]
    for x, h in reversed(list(zip(inputs, held, strict=True))):
        assert torch.equal(h.tile(3, 8), x[:, 3:8])
        h.release()
    store.close()


def test_buffers_are_lent_again() -> None:
    store = on_disk()
    first = store.put(torch.randn(1, 8, 4), no_layer)
    where = first.tile(0, 8).data_ptr()
    first.release()
    second = store.put(torch.randn(1, 8, 4), no_layer)
    assert second.tile(0, 8).data_ptr() == where
    second.release()
    assert store.put(torch.randn(1, 9, 4), no_layer).tile(0, 9).data_ptr() != where


def test_scratch_has_no_name_and_goes_with_its_tensor(tmp_path: Path) -> None:
    t = map_scratch(tmp_path, torch.Size((3, 5)), torch.float32)
    t.fill_(7)
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del t
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("file systems may not be mounted here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_is_told_with_bytes_needed_and_free(small_disk: Path) -> None:
    store = on_disk(folder=small_disk)
    held = [store.put(torch.randn(1, 100, 1000), no_layer) for _ in range(2)]
    with pytest.raises(MachineError, match=r"needs 391 KiB more in .*; 24\d KiB are free\. Set TMPDIR"):
        store.put(torch.randn(1, 100, 1000), no_layer)
    assert list(small_disk.iterdir()) == []
    assert held[1].tile(0, 1).abs().sum() > 0  # what is there stays whole
    del held, store
    gc.collect()


def test_a_folder_that_is_memory_is_told_once(small_disk: Path) -> None:
    told: list[Event] = []
    store = Elsewhere(Disk(torch.device("cpu"), told.append, small_disk))
    for _ in range(2):
        store.put(torch.randn(1, 8, 4), no_layer)
    assert [str(event) for event in told if "is a tmpfs" in str(event)] == [str(event) for event in told]
    assert len(told) == 1


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"32 B cannot be made in .*gone: No such file or directory. Set TMPDIR"):
        map_scratch(tmp_path / "gone", (8,), torch.float32)


def test_a_run_whose_disk_fills_up_keeps_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stopped = (Run(tmp_path / name, rungs=RUNGS[3:], num_steps=3, save_every=1) for name in ("whole", "stopped"))
    whole.go()
    allocate = os.posix_fallocate
    saved = [run.folder / "checkpoints" / "step-000002" for run in (whole, stopped)]

    def fills_up(file: int, start: int, num_bytes: int) -> None:
        if any(event.step == 2 for event in stopped.steps):
            raise OSError(28, "No space left on device")
        allocate(file, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", fills_up)
    with pytest.raises(MachineError, match=r"A scratch file needs .* more in .*; .* are free"):
        stopped.go()
    found = newest_checkpoint(stopped.folder / "checkpoints", pytest.fail)
    assert found is not None
    assert found[1].step == 2
    theirs, ours = ({path.name: path.read_bytes() for path in place.rglob("*.safetensors")} for place in saved)
    assert theirs == ours
    assert len(theirs) == 2


def test_every_second_input_is_computed_again() -> None:
    calls: list[int] = []

    def layer(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            calls.append(number)
            return x + number

        return run

    store, x = Strided(OnDevice(), 3), torch.zeros(1, 4, 2)
    inputs, held = [], []
    for number in range(5):
        inputs.append(x)
        held.append(store.put(x, layer(number)))
        x = x + number
    for i in reversed(range(5)):
        assert torch.equal(held[i].tile(0, 4), inputs[i])
        held[i].release()
    assert calls == [3, 0, 1]


def test_memory_that_cannot_be_pinned_is_told_once() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine can pin memory")
    told: list[Event] = []
    memory = Host(torch.device("cuda"), told.append)
    assert memory.where == "pinned"
    for _ in range(2):
        assert not memory.empty((1000,), torch.float32, "x").is_pinned()
    assert memory.where == "host"
    assert len(told) == 1
    assert "3.91 KiB could not be pinned" in str(told[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("make", [on_host, on_disk], ids=["host", "disk"])
def test_to_the_host_and_back(make: Callable[[str], Store]) -> None:
    store = make("cuda")
    inputs = [torch.randn(2, 1000, 400, device="cuda") for _ in range(4)]
    copies = [x.clone() for x in inputs]
    held = [store.put(x, no_layer) for x in inputs]
    for x in inputs:
        x.zero_()  # whoever reads late reads this
    for x, h in reversed(list(zip(copies, held, strict=True))):
        assert torch.equal(h.tile(300, 800), x[:, 300:800])
        h.release()
    store.close()
