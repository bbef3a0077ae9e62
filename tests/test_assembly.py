"""A model put together: what goes wrong in the middle of it is one sentence, and leaves nothing behind."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from narrowboat.assembly import Setting, Wanted, assembled
from narrowboat.errors import MachineError, ModelError, OutOfMemory
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan

AWAY = MemoryPlan(layers="stream", tile_tokens=32, inputs="disk", weights="disk")
RunOptions = Callable[..., Options]


def begin(options: Options, plan: MemoryPlan = AWAY, budget_bytes: int = 2**30) -> Any:
    with assembled(Setting.of(options, lambda event: None), Wanted(plan, budget_bytes)) as ready:
        return ready.gauge


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """1 MiB for scratch files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("file systems may not be mounted here")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    gc.collect()
    subprocess.run(["umount", folder], check=True)


def test_scratch_that_fills_up_while_weights_are_cast(run_options: RunOptions, small_disk: Path) -> None:
    with pytest.raises(MachineError, match=r"A scratch file needs 3.00 MiB more in .*; 1.00 MiB are free. Set TMPDIR"):
        begin(run_options(**{"model.dtype": "bfloat16"}))
    assert list(small_disk.iterdir()) == []


def test_a_scratch_folder_that_is_gone(run_options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    options = run_options(**{"model.dtype": "bfloat16"})
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")
    with pytest.raises(MachineError, match=r"cannot be made in /nowhere/at/all: No such file or directory"):
        begin(options)


def test_a_file_that_is_cut_short(run_options: RunOptions, tiny_model: Path, tmp_path: Path) -> None:
    options = run_options()
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    options = options.model_copy(update={"model": options.model.model_copy(update={"name": str(folder)})})
    with pytest.raises(ModelError, match=r"model.safetensors, .* bytes: cannot be read"):
        begin(options)


def test_a_weight_that_is_missing(run_options: RunOptions, tiny_model: Path, tmp_path: Path) -> None:
    options = run_options()
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    options = options.model_copy(update={"model": options.model.model_copy(update={"name": str(folder)})})
    with pytest.raises(ModelError, match=r"1 of its weights are missing; first model\.layers\.1\.mlp\.up_proj\.weight"):
        begin(options)


def test_a_budget_that_the_weights_pass_while_they_are_read(run_options: RunOptions) -> None:
    plan = MemoryPlan(layers="recompute")
    with pytest.raises(
        OutOfMemory, match=r"ran out while .* was loaded for the plan .recompute layers.: .* memory.budget is 1.00 MiB"
    ):
        begin(run_options(), plan, budget_bytes=2**20)


def test_the_meter_knows_each_phase(run_options: RunOptions) -> None:
    gauge = begin(run_options())
    assert list(gauge.by_phase) == ["loading", "leaving"]
    assert gauge.by_phase["leaving"] <= gauge.by_phase["loading"] < 2**20
