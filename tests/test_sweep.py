"""A sweep tries every setting once, goes on where it was stopped, and leaves a ranking and the best configuration."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from narrowboat import sweep as sweeping
from narrowboat.errors import NarrowboatError, OptionError
from narrowboat.options.load import dump, load
from narrowboat.options.schema import Options
from narrowboat.sweep import Trial, parse_over, sweep

OVER = {"optimizer.lr": ["1e-4", "2e-4"], "lora.rank": ["8", "16"]}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    dump(Options(), tmp_path / "run.yaml")
    return tmp_path / "run.yaml"


class Runs:
    """Stands for the processes that train: a loss from the options, and a note of who ran where."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.seen: list[tuple[str, str | None]] = []
        self.stop_after = stop_after

    def __call__(self, file: Path, folder: Path, device: str | None) -> Trial:
        if len(self.seen) == self.stop_after:
            raise KeyboardInterrupt
        self.seen.append((folder.name, device))
        options = load(file)
        assert options.train.folder == str(folder)
        if options.lora.rank == 16 and options.optimizer.lr < 1.5e-4:
            return Trial({}, error="it did not fit")
        return Trial({}, 2.0 + 1000 * options.optimizer.lr + options.lora.rank / 100, 12.0, 3 * 2**30)


def test_settings_are_ranked_and_the_best_is_a_configuration(config: Path, tmp_path: Path):
    said: list[str] = []
    runs = Runs()
    ranked = sweep(config, {"train.steps": "5"}, OVER, tmp_path / "sweep", say=said.append, run=runs)
    assert len(runs.seen) == 4
    assert [trial.values["lora.rank"] for trial in ranked] == ["8", "8", "16", "16"]
    assert [trial.values["optimizer.lr"] for trial in ranked][:3] == ["1e-4", "2e-4", "2e-4"]
    assert [trial.loss for trial in ranked] == [pytest.approx(2.18), pytest.approx(2.28), pytest.approx(2.36), None]
    best = load(tmp_path / "sweep" / "best.yaml")
    assert (best.optimizer.lr, best.lora.rank, best.train.steps) == (1e-4, 8, 5)
    assert best.train.folder == Options().train.folder
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert page.index("2.1800") < page.index("2.2800") < page.index("2.3600") < page.index("it did not fit")
    assert "12 s" in page and "3.00 GiB" in page and "left:calc(100.0%" in page
    assert "lr=1e-4,rank=8: held-out loss 2.1800" in said


def test_a_stopped_sweep_goes_on_and_runs_nothing_twice(config: Path, tmp_path: Path):
    first = Runs(stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        sweep(config, {}, OVER, tmp_path / "sweep", say=lambda _: None, run=first)
    second = Runs()
    ranked = sweep(config, {}, OVER, tmp_path / "sweep", say=lambda _: None, run=second)
    assert len(first.seen) == 2 and len(second.seen) == 2
    assert {name for name, _ in first.seen + second.seen} == {
        f"lr={lr},rank={rank}" for lr in OVER["optimizer.lr"] for rank in OVER["lora.rank"]
    }
    assert len(ranked) == 4
    third = Runs()
    assert sweep(config, {}, OVER, tmp_path / "sweep", say=lambda _: None, run=third) == ranked and not third.seen


def test_each_device_has_its_own_trials(config: Path, tmp_path: Path):
    runs = Runs()
    sweep(config, {}, OVER, tmp_path / "sweep", devices=["0", "1"], say=lambda _: None, run=runs)
    assert {device for _, device in runs.seen} <= {"0", "1"} and len(runs.seen) == 4


def test_another_sweep_in_the_same_folder_is_refused(config: Path, tmp_path: Path):
    sweep(config, {}, OVER, tmp_path / "sweep", say=lambda _: None, run=Runs())
    for flags, over in (({"train.steps": "7"}, OVER), ({}, {"optimizer.lr": ["1e-4", "3e-4"]})):
        with pytest.raises(OptionError, match="holds another sweep"):
            sweep(config, flags, over, tmp_path / "sweep", say=lambda _: None, run=Runs())


def test_every_mistake_of_every_setting_is_told_before_anything_runs(config: Path, tmp_path: Path):
    runs = Runs()
    with pytest.raises(OptionError) as error:
        sweep(config, {}, {"optimizer.lr": ["fast", "1e-4"], "lora.rank": ["8", "0"]}, tmp_path / "sweep", run=runs)
    assert len(error.value.mistakes) == 2 and not runs.seen and not (tmp_path / "sweep").exists()
    with pytest.raises(OptionError, match=r"Did you mean 'optimizer\.lr'"):
        parse_over(["optimizer.lrr=1e-4"])
    with pytest.raises(OptionError, match="expected values"):
        parse_over(["optimizer.lr="])
    assert parse_over(["optimizer.lr=1e-4, 2e-4", "lora.rank=8"]) == {
        "optimizer.lr": ["1e-4", "2e-4"],
        "lora.rank": ["8"],
    }


def test_when_nothing_came_to_a_loss_the_first_reason_is_told(config: Path, tmp_path: Path):
    with pytest.raises(NarrowboatError, match="None of 2 trials has a held-out loss; the first failed with: no luck"):
        sweep(
            config, {}, {"lora.rank": ["8", "9"]}, tmp_path / "sweep", say=lambda _: None,
            run=lambda *_: Trial({}, error="no luck"),
        )  # fmt: skip


def test_it_trains_in_real_processes(run_options, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "src")
    dump(run_options(), tmp_path / "run.yaml")
    ranked = sweep(tmp_path / "run.yaml", {}, {"lora.rank": ["2"]}, tmp_path / "sweep", say=lambda _: None)
    (trial,) = ranked
    assert trial.loss is not None and trial.peak_bytes > 0
    file, folder = tmp_path / "sweep" / "trials" / "rank=2.yaml", tmp_path / "sweep" / "trials" / "rank=2"
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    began = time.monotonic()
    assert sweeping.run_process(file, folder, None).loss == trial.loss and time.monotonic() - began < 1  # it has ended
