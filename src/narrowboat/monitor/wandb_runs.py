"""Weights & Biases: a run's curves in its folder, ready for ``wandb sync``.

Nothing leaves this machine unless WANDB_MODE=online says so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from narrowboat.events import Event, RunEnded, RunStarted
from narrowboat.machine.extras import require
from narrowboat.monitor.scalars import scalars


class WandbRuns:
    """Writes one offline run a session, under ``wandb/`` in the run folder.

    Raises:
        MachineError: wandb is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._library = require("wandb", "train.monitor: wandb")
        self._folder, self._run = folder, None
        self._exit_code = 1

    def record(self, event: Event) -> None:
        """Log the event's numbers at its step."""
        if isinstance(event, RunStarted):
            self._run = self._start(event)
        if isinstance(event, RunEnded):
            self._exit_code = int(event.outcome == "failed")
        step, numbers = scalars(event)
        if numbers and self._run is not None:
            self._run.log(numbers | {"step": step})

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)

    def _start(self, event: RunStarted) -> Any:
        run = self._library.init(
            project="narrowboat",
            name=self._folder.name,
            dir=str(self._folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(event.options),
            settings=self._library.Settings(silent=True, console="off"),
        )
        run.define_metric("*", step_metric="step")
        return run
