"""What the machine is said to have is what the system itself says, or less where a container limits it."""

import mmap
import os
from pathlib import Path

import psutil
import pytest
import torch

from narrowboat.errors import MachineError
from narrowboat.machine import hardware
from narrowboat.units import MIB


def test_auto_takes_a_card_where_there_is_one():
    assert hardware.pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert hardware.pick_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_cuda_without_a_card_is_refused_with_what_torch_sees():
    with pytest.raises(MachineError, match=r"no CUDA card was found: torch .* sees 0 cards. Set model.device: cpu"):
        hardware.pick_device("cuda")


class Driver:
    """Stands for a card's driver: this machine has none."""

    def __init__(self, answer: int) -> None:
        self.answer, self.num_held = answer, 0

    def cuMemAllocManaged(self, page: object, num_bytes: object, flags: int) -> int:
        self.num_held += self.answer == 0
        return self.answer

    def cuMemFree_v2(self, page: object) -> int:
        self.num_held -= 1
        return 0


@pytest.mark.parametrize(("answer", "can"), [(0, True), (801, False)])
def test_r17_whether_a_card_can_page_is_tried_and_leaves_nothing_held(answer: int, can: bool, monkeypatch):
    driver = Driver(answer)  # 801: operation not supported
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert hardware.can_page(torch.device("cuda")) is can and driver.num_held == 0
    assert not hardware.can_page(torch.device("cpu"))


def test_r17_without_a_driver_of_that_name_nothing_is_paged(monkeypatch):
    def without(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(hardware.ctypes, "CDLL", without)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not hardware.can_page(torch.device("cuda"))


def test_cpu_memory_is_the_hosts():
    memory = hardware.device_memory(torch.device("cpu"))
    assert 0 < memory.free_bytes <= memory.total_bytes <= psutil.virtual_memory().total


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")
def test_what_torch_holds_idle_on_the_card_counts_as_free():
    device = hardware.pick_device("cuda")
    before = hardware.device_memory(device).free_bytes
    block = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    held = hardware.device_memory(device).free_bytes
    del block
    assert before - held == pytest.approx(256 * MIB, rel=0.1)
    assert hardware.device_memory(device).free_bytes == pytest.approx(before, abs=8 * MIB)
    assert hardware.describe_device(device) == torch.cuda.get_device_name(device)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_limit_counts_and_its_page_cache_does_not(version: int, tmp_path: Path, monkeypatch):
    """A limit of 512 MiB, 300 in use of which 100 can be dropped: 312 are free."""
    root = tmp_path if version == 2 else tmp_path / "memory"
    group = root / "user" / "job"
    group.mkdir(parents=True)
    limit, used = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    (group / limit).write_text(f"{512 * MIB}\n")
    (group / used).write_text(f"{300 * MIB}\n")
    droppable = "inactive_file" if version == 2 else "total_inactive_file"
    (group / "memory.stat").write_text(f"anon 1\n{droppable} {100 * MIB}\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/user/job\n" if version == 2 else "5:devices:/\n4:memory:/user/job\n0::/\n")
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path)
    monkeypatch.setattr(hardware, "MEMBERSHIP", membership)
    assert hardware.host_memory() == hardware.Memory(512 * MIB, 312 * MIB)


@pytest.mark.parametrize("content", ["max\n", "9223372036854771712\n", "not a number\n"])
def test_no_limit_leaves_the_machines_memory(content: str, tmp_path: Path, monkeypatch):
    (tmp_path / "memory.max").write_text(content)
    (tmp_path / "memory.current").write_text("4096\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/\n")
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path)
    monkeypatch.setattr(hardware, "MEMBERSHIP", membership)
    assert hardware.host_memory().total_bytes == psutil.virtual_memory().total


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="told apart on Linux only")
def test_a_mapped_file_is_resident_and_not_anonymous(tmp_path: Path):
    size = 64 * MIB
    path = tmp_path / "block"
    path.write_bytes(os.urandom(size))
    before = hardware.process_memory()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[i] for i in range(0, size, 4096)) > 0
        mapped_memory = hardware.process_memory()
    block = bytearray(os.urandom(size))
    owned = hardware.process_memory()
    assert mapped_memory.resident_bytes - before.resident_bytes > 0.9 * size
    assert mapped_memory.anonymous_bytes - before.anonymous_bytes < 0.1 * size
    assert owned.anonymous_bytes - before.anonymous_bytes > 0.9 * size
    assert owned.peak_resident_bytes >= mapped_memory.resident_bytes
    del block


def test_free_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path):
    free = hardware.free_disk_bytes(tmp_path / "runs" / "tomorrow")
    assert free == pytest.approx(psutil.disk_usage(str(tmp_path)).free, abs=512 * MIB)


def test_a_device_is_described():
    assert hardware.describe_device(torch.device("cpu")) == f"CPU, {torch.get_num_threads()} threads"
