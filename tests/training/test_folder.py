"""What cannot become a run's folder is refused in a sentence, and nothing is made or changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from narrowboat.errors import OptionError
from narrowboat.training.folder import opened


def refused(folder: Path, problem: str, resume: bool = False) -> None:
    with pytest.raises(OptionError, match=problem) as error, opened(folder, resume):
        pytest.fail("it was opened")
    assert "\n" not in str(error.value)


def test_a_file_and_what_is_under_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused(tmp_path / "file", "train.folder: .*file' cannot be made or written: it is no folder")
    refused(tmp_path / "file" / "run", "Not a directory")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    refused(tmp_path / "link", "it is no folder")
    assert os.listdir(tmp_path) == ["link"]


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"], ids=["too long", "NUL"])
def test_a_name_that_is_none(name: str, tmp_path: Path) -> None:
    refused(tmp_path / name, "File name too long|null byte")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="Windows knows no such users")
def test_another_user_s_folder() -> None:
    """Tried as somebody else, since root may write anywhere."""
    script = """
import os, sys
from pathlib import Path
from narrowboat.errors import OptionError
from narrowboat.training.folder import opened
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
for name in ("", "run"):
    try:
        with opened(Path(sys.argv[1]) / name, False): print("opened")
    except OptionError as error: print(error)
"""
    with tempfile.TemporaryDirectory() as theirs:
        Path(theirs).chmod(0o555)
        done = subprocess.run([sys.executable, "-c", script, theirs], capture_output=True, text=True)
    assert done.stdout.count("cannot be made or written: Permission denied") == 2, done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small disk needs root")
def test_a_full_disk_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        (disk / "ballast").write_bytes(b"x" * shutil.disk_usage(disk).free)
        refused(disk / "run", "No space left on device")
        assert os.listdir(disk) == ["ballast"]
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        refused(disk / "run", "Read-only file system")
        refused(disk, "Read-only file system")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_another_run_s_folder_without_resume(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-000003").mkdir(parents=True)
    refused(tmp_path / "run", "holds the checkpoints of another run; go on with --resume")


def test_one_in_use_is_told_with_its_process(tmp_path: Path) -> None:
    with opened(tmp_path / "run", False):
        refused(tmp_path / "run", rf"run is in use by process {os.getpid()} on ")


def test_what_stays_empty_goes_and_drafts_go(tmp_path: Path) -> None:
    with opened(tmp_path / "a" / "run", False):
        assert (tmp_path / "a" / "run").is_dir()
    assert not (tmp_path / "a" / "run").exists()
    (tmp_path / "run" / "checkpoints" / ".draft-step-000004" / "adapter").mkdir(parents=True)
    (tmp_path / "run" / ".draft-options.yaml").touch()
    with opened(tmp_path / "run", False):
        assert sorted(os.listdir(tmp_path / "run")) == [".lock", ".lock.json", "checkpoints"]
        assert not os.listdir(tmp_path / "run" / "checkpoints")
