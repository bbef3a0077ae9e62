"""MLflow: a run's curves and options, in files in its folder or on the server that MLFLOW_TRACKING_URI names.

``mlflow ui --backend-store-uri RUN_FOLDER/mlruns`` shows the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from narrowboat.events import Event, RunEnded, RunStarted
from narrowboat.machine.extras import require
from narrowboat.monitor.scalars import scalars

EXPERIMENT = "narrowboat"
MOST_CHARS = 500
"""Of a parameter's value, as MLflow allows."""


class MlflowRuns:
    """Writes one run a session.

    Raises:
        MachineError: mlflow is not installed.
    """

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is enough for one run
        library = require("mlflow", "train.monitor: mlflow")
        self._entities, self._folder = library.entities, folder
        address = os.environ.get("MLFLOW_TRACKING_URI") or (folder.resolve() / "mlruns").as_uri()
        self._client = library.MlflowClient(tracking_uri=address)
        self._run, self._status = "", "FAILED"

    def record(self, event: Event) -> None:
        """Log the event's numbers at its step."""
        if isinstance(event, RunStarted):
            self._start(event)
        if isinstance(event, RunEnded):
            self._status = {"done": "FINISHED", "interrupted": "KILLED"}.get(event.outcome, "FAILED")
        step, numbers = scalars(event)
        if numbers and self._run:
            now = int(1000 * time.time())
            metrics = [self._entities.Metric(key, float(value), now, step) for key, value in numbers.items()]
            self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """End the run."""
        if self._run:
            self._client.set_terminated(self._run, self._status)

    def _start(self, event: RunStarted) -> None:
        known = self._client.get_experiment_by_name(EXPERIMENT)
        number = known.experiment_id if known else self._client.create_experiment(EXPERIMENT)
        self._run = self._client.create_run(number, run_name=self._folder.name).info.run_id
        parameters = [
            self._entities.Param(f"{group}.{name}", str(value)[:MOST_CHARS])
            for group, values in event.options.items()
            if isinstance(values, Mapping)
            for name, value in values.items()
        ]
        self._client.log_batch(self._run, params=parameters)
