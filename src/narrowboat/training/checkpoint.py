"""Checkpoints: whole or not at all, and the run goes on from one as if it had never stopped.

A checkpoint is a folder ``step-000100`` with the adapter (a plain PEFT folder), the optimizer's states and the random
state, and ``run.json``, which is written last and lists every file with its size and digest. The order of the data
follows from the step, so there is no position to save. A ``Snapshot`` is what a checkpoint will hold, taken at one
moment between two steps; it refers to the run's own tensors until it is ``copied``.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from narrowboat.errors import CheckpointError, NarrowboatError, cut
from narrowboat.events import CheckpointSaved, Notice, Tell
from narrowboat.machine import manifest
from narrowboat.machine.drafts import whole
from narrowboat.machine.hardware import free_disk_bytes
from narrowboat.machine.json_files import read_json
from narrowboat.machine.tensor_files import blocks_of
from narrowboat.model.saved import Contents, contents, load_adapter_state, read_tensors
from narrowboat.optimizers.driving import load_states
from narrowboat.plan import MemoryPlan
from narrowboat.training import trees
from narrowboat.training.sameness import Identity
from narrowboat.units import MIB, format_bytes

ADAPTER, STATES, TREE, RUN = "adapter", "states.safetensors", "states.json", "run.json"
PICKLED_STATES = "states.pt"
SMALL_FILES_BYTES = MIB
"""Of a checkpoint, beside its tensors; with room to spare."""

_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Position:
    """How far a run has come, and what it must find again to go on.

    Attributes:
        step: optimizer steps done.
        num_steps: steps of the whole run.
        num_tokens: tokens learnt from so far.
        identity: of the run.
        plan: the memory plan in force; None before the first step.
        dtype: of the base weights; what ``auto`` chose once stays, for another format is another run.
        first_heldout_loss: before step 1.
        last_heldout_loss: the newest,
        evaluated_step: and the step after which it was measured; -1 before the first.
        best_heldout_loss: the lowest so far,
        best_step: and the step after which it was measured.
        num_skipped: steps that had no finite gradient and changed nothing.
        num_passed_over: those of them whose rows were not tried again, so that the data is further than the steps.
        num_bad_in_a_row: those of them since the last good step.
        scale: of the loss, and its good steps in a row.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid"
    )  # of another version, whose sense is not known

    step: NonNegativeInt
    num_steps: int
    num_tokens: int = 0
    identity: Identity = field(default_factory=Identity)
    plan: MemoryPlan | None = None
    dtype: str = "auto"
    first_heldout_loss: float | None = None
    last_heldout_loss: float | None = None
    evaluated_step: int = -1
    best_heldout_loss: float | None = None
    best_step: int = 0
    num_skipped: int = 0
    num_passed_over: int = 0
    num_bad_in_a_row: int = 0
    scale: dict[str, float] = field(default_factory=dict)


_POSITION = TypeAdapter(Position)


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: ``tree`` is that of the states, whose tensors lie in ``tensors``."""

    position: Position
    adapter: Contents
    tree: Any
    tensors: Mapping[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, and nearly what it takes on disk."""
        return self.adapter.num_bytes + sum(t.numel() * t.element_size() for t in self.tensors.values())

    def copied(self) -> Snapshot:
        """The same in host memory of its own, which the next steps do not change."""
        adapter = replace(self.adapter, tensors={name: _copy(t) for name, t in self.adapter.tensors.items()})
        return replace(self, adapter=adapter, tensors={name: _copy(t) for name, t in self.tensors.items()})


def snapshot(
    position: Position, model: Any, optimizer: torch.optim.Optimizer, carry: dict[str, Any] | None = None
) -> Snapshot:
    """The run between two steps; ``carry`` is what a document carries in whose middle the last one ended.

    Raises:
        CheckpointError: the optimizer's states hold something that cannot be saved.
    """
    states = {"optimizer": optimizer.state_dict(), "random": _random_state(), "carry": carry}
    try:
        return Snapshot(position, contents(model), *trees.flatten(states))
    except TypeError as error:
        raise CheckpointError(f"step {position.step}: its states cannot be saved: {error}") from None


def check_space(folder: Path, num_bytes: int) -> None:
    """Refuse to begin what the disk of ``folder`` has no room for.

    Raises:
        CheckpointError: with bytes needed and free.
    """
    free = free_disk_bytes(folder)
    if free < num_bytes + SMALL_FILES_BYTES:
        raise CheckpointError(
            f"{folder}: not saved: it takes {format_bytes(num_bytes + SMALL_FILES_BYTES)}, {format_bytes(free)} are "
            "free there. Earlier checkpoints are whole."
        )


def write(folder: Path, taken: Snapshot, num_kept: int) -> CheckpointSaved:
    """Write ``folder/step-NNNNNN`` and remove all but the ``num_kept`` newest.

    Raises:
        CheckpointError: with bytes needed and free; earlier checkpoints stay whole.
    """
    began = time.monotonic()
    final = folder / name_of(taken.position.step)
    try:
        with whole(final) as draft:
            taken.adapter.write(draft, ADAPTER)
            draft.write_blocks(STATES, blocks_of(taken.tensors))
            draft.write(TREE, json.dumps(taken.tree).encode())
            num_bytes = sum(stamp.size for stamp in draft.stamps.values())
            draft.write(RUN, manifest.render(_POSITION.dump_python(taken.position, mode="json"), draft.stamps))
        for old in _by_step(folder)[num_kept:]:
            shutil.rmtree(old)
    except OSError as error:
        raise CheckpointError(
            f"{final}: not saved: {error.strerror or error}. It takes about {format_bytes(taken.num_bytes)}, "
            f"{format_bytes(free_disk_bytes(folder))} are free there. Earlier checkpoints are whole."
        ) from None
    return CheckpointSaved(taken.position.step, str(final), num_bytes, time.monotonic() - began)


def name_of(step: int) -> str:
    """Of a checkpoint's folder."""
    return f"step-{step:06d}"


def newest_checkpoint(folder: Path, tell: Tell) -> tuple[Path, Position] | None:
    """The newest whole checkpoint in ``folder``, None if there is none at all; others are told and passed over.

    Raises:
        CheckpointError: there are some, and none is whole.
    """
    reasons = []
    for path in _by_step(folder):
        try:
            return path, _read(path)
        except CheckpointError as error:
            reasons.append(f"{path} is not whole and is passed over: {error}")
            tell(Notice(reasons[-1]))
    if reasons:
        raise CheckpointError(
            f"{folder}: none of {len(reasons)} checkpoints can be used; {reasons[0]}. Put one back from a copy, or "
            "begin anew in another train.folder."
        )
    return None


def restore(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Put the states of the checkpoint ``path`` into ``model``, ``optimizer`` and the random generators.

    Returns:
        What was saved as ``carry``.

    Raises:
        CheckpointError: names the file that is missing or does not fit.
    """
    load_adapter_state(model, path / ADAPTER)
    try:
        states = trees.restore(read_json(path / TREE), read_tensors(path / STATES))
        load_states(optimizer, states["optimizer"])
        _set_random_state(states["random"])
        carry: dict[str, Any] | None = states["carry"]
    except (NarrowboatError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # a checkpoint may be anybody's, and so is what it makes of an optimizer
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path / STATES}: cannot be put into this optimizer: {cut(reason)}") from None
    return carry


def _read(path: Path) -> Position:
    try:
        content, stamps = manifest.read(path / RUN)
    except FileNotFoundError:
        raise CheckpointError(f"it has no {RUN}, which is written last") from None
    manifest.check(path, stamps)
    if PICKLED_STATES in stamps:
        raise CheckpointError(f"its {PICKLED_STATES} is pickled; the version of Narrowboat that wrote it can read it")
    try:
        return _POSITION.validate_python(content)
    except ValidationError:
        raise CheckpointError(f"its {RUN} is of another version of Narrowboat, which can go on with it") from None


def _by_step(folder: Path) -> list[Path]:
    """Checkpoints, newest first, whole or not."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
