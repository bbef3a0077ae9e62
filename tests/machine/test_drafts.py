"""A folder is there whole, or as it was; its files have the modes that the umask says."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from narrowboat.errors import CheckpointError
from narrowboat.machine import manifest
from narrowboat.machine.caches import filling
from narrowboat.machine.drafts import clear, stamp_of, whole, write_whole
from narrowboat.machine.tensor_files import blocks_of


def fill(folder: Path, word: bytes) -> None:
    with whole(folder) as draft:
        draft.write("a.txt", word + word)
        draft.write("below/b.txt", word)
        draft.write_blocks("c.safetensors", blocks_of({"c": torch.arange(5)}))
        draft.write("manifest.json", manifest.render({"step": 3}, draft.stamps))


def test_its_files_are_known_by_size_and_digest(tmp_path: Path) -> None:
    fill(tmp_path / "it", b"word")
    content, stamps = manifest.read(tmp_path / "it" / "manifest.json")
    assert content == {"step": 3}
    assert {name: stamp_of(tmp_path / "it" / name) for name in stamps} == stamps
    assert stamps["a.txt"].size == 8
    manifest.check(tmp_path / "it", stamps)


def test_every_byte_that_is_flipped_or_cut_is_noticed(tmp_path: Path) -> None:
    fill(tmp_path / "it", b"word")
    folder = tmp_path / "it"
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        good = path.read_bytes()
        for place in range(len(good)):
            for bad in (good[:place], good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]):
                path.write_bytes(bad)
                with pytest.raises(CheckpointError) as error:
                    manifest.check(folder, manifest.read(folder / "manifest.json")[1])
                assert "\n" not in str(error.value) and str(path) in str(error.value)
        path.write_bytes(good)
    manifest.check(folder, manifest.read(folder / "manifest.json")[1])


def test_a_manifest_names_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(manifest.render({}, {"../secret": stamp_of(Path(__file__))}))
    with pytest.raises(CheckpointError, match=r"damaged: '\.\./secret' leads out of its folder"):
        manifest.read(tmp_path / "manifest.json")


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    fill(tmp_path / "it", b"first")
    with pytest.raises(KeyError), whole(tmp_path / "it") as draft:  # noqa: PT012
        draft.write("a.txt", b"second")
        raise KeyError
    assert (tmp_path / "it" / "a.txt").read_bytes() == b"firstfirst"
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize("at", range(1, 9))
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(at: int, tmp_path: Path) -> None:
    """A process that writes over a folder ends itself at its n-th call of the file system."""
    fill(tmp_path / "it", b"first")
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.machine.test_drafts import fill
calls = 0
def counted(own):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == {at}:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args, **kwargs)
    return call
for name in ("replace", "fsync", "mkdir"):
    setattr(os, name, counted(getattr(os, name)))
fill(Path({str(tmp_path)!r}) / "it", b"second")
print("done", calls)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode in (0, -9), done.stderr
    clear(tmp_path)
    folder = tmp_path / "it"
    manifest.check(folder, manifest.read(folder / "manifest.json")[1])
    assert (folder / "a.txt").read_bytes() in (b"firstfirst", b"secondsecond")
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert done.returncode == -9 or at > 7


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_modes_are_those_of_the_umask_and_caches_are_private(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        fill(tmp_path / "it", b"word")
        write_whole(tmp_path / "one.txt", b"word")
        with filling(tmp_path / "cache" / "data" / "it"):
            pass
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert {modes[Path(name)] for name in ("it/a.txt", "it/c.safetensors", "one.txt")} == {0o666 & ~mask}
    assert {modes[Path(name)] for name in ("it", "it/below")} == {0o777 & ~mask}
    assert {modes[Path(name)] for name in ("cache", "cache/data")} == {0o700}


def test_what_a_killed_process_left_in_a_cache_goes(tmp_path: Path) -> None:
    (tmp_path / ".model-abcd1234" / "draft").mkdir(parents=True)
    (tmp_path / ".other-abcd1234").mkdir()
    with filling(tmp_path / "model"):
        assert {path.name for path in tmp_path.iterdir()} == {".other-abcd1234", "model.lock"}
