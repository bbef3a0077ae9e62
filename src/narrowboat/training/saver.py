"""Saving beside the next steps: the run's state is copied between two steps, and a thread writes the copy to disk.

Price: the copy, in host memory, until it is on disk; in time what copying takes (``benchmarks/saving.py``). Where the
budget or the host has no room for a copy, the next step waits instead, and that is told. One checkpoint is written at a
time. What goes wrong is told and remembered: training goes on, and the run ends with an error when it is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from narrowboat.engine.engine import Engine
from narrowboat.errors import CheckpointError
from narrowboat.events import CheckpointSaved, Notice, Tell
from narrowboat.machine.hardware import host_memory
from narrowboat.model.saved import save_adapter
from narrowboat.optimizers.driving import averaged
from narrowboat.owner.causes import OPTIMIZER_STATES, cause
from narrowboat.owner.gauge import Gauge
from narrowboat.training import checkpoint
from narrowboat.training.checkpoint import Position, Snapshot
from narrowboat.training.folder import BEST, CHECKPOINTS
from narrowboat.units import format_bytes

HOST_SHARE = 0.5
"""Share of the free host memory that a copy may take."""


class Saver:
    """Writes a run's checkpoints.

    Args:
        folder: the run's.
        num_kept: how many of the newest stay.
        gauge: says what room there is.
        high: share of the budget above which a run would step down.
        tell: hears of each checkpoint when it is on disk, and of each that is not.

    Attributes:
        failures: why checkpoints were not saved.
    """

    def __init__(self, folder: Path, num_kept: int, gauge: Gauge, high: float, tell: Tell) -> None:
        self._folder, self._best = folder / CHECKPOINTS, folder / BEST
        self._num_kept, self._gauge, self._high, self._tell = num_kept, gauge, high, tell
        self._writing: _Writing | None = None
        self._newest: Position | None = None
        self._waits_are_told = False
        self.failures: list[CheckpointError] = []

    def save(self, take: Callable[[], Snapshot], position: Position, at_once: bool = False) -> None:
        """Save what ``take`` gives, the run at ``position``; with ``at_once`` it is on disk, or has failed, after."""
        self.settle()
        if self._newest == position:
            return
        try:
            taken = take()
            checkpoint.check_space(self._folder, taken.num_bytes)
        except CheckpointError as error:
            self._take_note(error)
            return
        copy = None if at_once else self._copy(taken)
        self._writing = _Writing(partial(checkpoint.write, self._folder, copy or taken, self._num_kept), position)
        if copy is None:
            self.settle()

    def keep_best(self, engine: Engine, step: int, loss: float) -> bool:
        """Put the adapter of ``engine``, the best so far, in the place of the one that was; whether that went well."""
        try:
            with averaged(engine.optimizer):
                save_adapter(engine.model, self._best, {"step": step, "heldout_loss": loss})
        except CheckpointError as error:
            self._take_note(error)
            return False
        return True

    def look(self) -> None:
        """Tell of what has been written since."""
        if self._writing is not None and self._writing.is_done:
            self.settle()

    def settle(self) -> None:
        """Wait for what is being written."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            saved = writing.result()
        except CheckpointError as error:
            self._take_note(error)
        else:
            self._newest = writing.position
            self._tell(saved)

    def newest(self) -> Path | None:
        """The last checkpoint that this process saved, if the last try was not in vain."""
        return None if self._newest is None else self._folder / checkpoint.name_of(self._newest.step)

    def raise_failures(self) -> None:
        """End a run of which something was not saved with an error.

        Raises:
            CheckpointError: with the number of failures and the first.
        """
        if self.failures:
            num = len(self.failures)
            raise CheckpointError(
                f"{num} checkpoint{'s were' if num > 1 else ' was'} not saved; the first: {self.failures[0]}"
            )

    def _take_note(self, error: CheckpointError) -> None:
        self.failures.append(error)
        self._newest = None
        self._tell(Notice(f"{error} The run goes on, and will end with an error."))

    def _copy(self, taken: Snapshot) -> Snapshot | None:
        """None where there is no room for one."""
        gauge, num_bytes = self._gauge, taken.num_bytes
        if gauge.device.type == "cpu":
            has_room = gauge.highest_bytes + num_bytes <= self._high * gauge.budget_bytes
        else:
            has_room = num_bytes <= HOST_SHARE * host_memory().free_bytes
        if has_room:
            try:
                with cause(OPTIMIZER_STATES, "host"):
                    return taken.copied()
            except (torch.OutOfMemoryError, MemoryError):
                pass
        if not self._waits_are_told:
            self._waits_are_told = True
            self._tell(
                Notice(
                    f"No room to copy the {format_bytes(num_bytes)} of a checkpoint: the next step waits until it is "
                    "on disk."
                )
            )
        return None


class NoSaver(Saver):
    """Of a rank that does not write: rank 0 does."""

    def save(self, take: Callable[[], Snapshot], position: Position, at_once: bool = False) -> None:
        """Only remember that rank 0 has."""
        self._newest = position

    def keep_best(self, engine: Engine, step: int, loss: float) -> bool:
        """Rank 0 says whether it went well."""
        return False


class _Writing:
    """A checkpoint on its way to disk, in a thread that ends with the process."""

    def __init__(self, work: Callable[[], CheckpointSaved], position: Position) -> None:
        self.position = position
        self._work = work
        self._saved: CheckpointSaved | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="narrowboat-saver", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> CheckpointSaved:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def _run(self) -> None:
        work: Any = self._work
        del self._work  # with the copy in it, which is to go as soon as it is written
        try:
            self._saved = work()
        except BaseException as error:
            self._error = error
