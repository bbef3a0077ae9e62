"""wandb and mlflow, offline: what they wrote is read back by their own means; nothing is sent."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from tests.monitor.runs import ended, started, step_done, whole_run

from narrowboat.errors import MachineError
from narrowboat.events import MemoryMark
from narrowboat.machine import extras
from narrowboat.monitor.recorders import Record
from narrowboat.monitor.scalars import scalars

mlflow = pytest.importorskip("mlflow")
wandb = pytest.importorskip("wandb")


def test_mlflow_has_curves_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    record = Record(tmp_path, quiet=True, monitors=("mlflow",))
    for event in whole_run(tmp_path):
        record.record(event)
    record.begin()
    record.close()
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("narrowboat").experiment_id])
    losses = client.get_metric_history(run.info.run_id, "loss/train")
    assert {one.step: one.value for one in losses} == pytest.approx({step: 3 - 0.1 * step for step in range(1, 7)})
    assert run.data.params["lora.rank"] == "16"
    assert (run.info.status, run.info.run_name) == ("FINISHED", tmp_path.name)


def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    log = wandb.sdk.wandb_run.Run.log
    monkeypatch.setattr(
        wandb.sdk.wandb_run.Run, "log", lambda self, data, *a, **k: (logged.append(data), log(self, data, *a, **k))[1]
    )
    record = Record(tmp_path, quiet=True, monitors=("wandb",))
    record.begin()
    for event in (started(tmp_path), step_done(1), step_done(2, loss=math.nan), ended(tmp_path, 2)):
        record.record(event)
    record.close()
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60
    while written.stat().st_size < 1000 and time.monotonic() < deadline:  # wandb's own process writes it
        time.sleep(0.2)
    assert written.stat().st_size > 1000
    assert [entry["step"] for entry in logged] == [1, 2]
    assert logged[0]["loss/train"] == pytest.approx(2.9)
    assert b"narrowboat" in written.read_bytes()


def test_a_missing_library_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(module: str) -> None:
        raise ImportError(name=module)

    monkeypatch.setattr(extras, "import_module", missing)
    with pytest.raises(MachineError, match=r"train.monitor: wandb needs wandb, which is not installed.*\[monitor\]"):
        Record(tmp_path, quiet=True, monitors=("tensorboard", "wandb"))
    assert list(tmp_path.iterdir()) == []


def test_marks_of_memory_are_numbers_too() -> None:
    mark = MemoryMark("after loading", 0, 100, 120, 150, 50)
    assert scalars(mark) == (
        0,
        {
            "memory/after_loading/allocated": 100,
            "memory/after_loading/reserved": 150,
            "memory/after_loading/holes": 50,
        },
    )
