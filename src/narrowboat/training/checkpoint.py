"""Checkpoints: whole or not at all, and the run goes on from one as if it had never stopped.

A checkpoint is a folder ``step-000100`` with the adapter (a plain PEFT folder), the optimizer's states and the random
state, and ``run.json``, which is written last and lists every file with its size. It is made under another name and
renamed when it is on disk; older ones are removed only after that. The order of the data follows from the step, so
there is no position to save.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from narrowboat.errors import CheckpointError
from narrowboat.events import CheckpointSaved, Notice, Tell
from narrowboat.machine.hardware import free_disk_bytes
from narrowboat.model.adapters import load_adapter_state, save_adapter
from narrowboat.optimizers.driving import load_states
from narrowboat.units import format_bytes

ADAPTER, STATES, RUN = "adapter", "states.pt", "run.json"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Position:
    """How far a run has come, and what it must find again to go on.

    Attributes:
        step: optimizer steps done.
        num_steps: steps of the whole run.
        num_tokens: tokens learnt from so far.
        data_fingerprint: of the prepared rows; another one means other data.
        plan: the memory plan in force.
        dtype: of the base weights; what ``auto`` chose once stays, for another format is another run.
        first_heldout_loss: before step 1.
        num_skipped: steps that had no finite gradient and changed nothing.
        num_passed_over: those of them whose rows were not tried again, so that the data is further than the steps.
        num_bad_in_a_row: those of them since the last good step.
        scale: of the loss, and its good steps in a row.
    """

    step: int
    num_steps: int
    num_tokens: int
    data_fingerprint: str
    plan: dict[str, Any]
    dtype: str = "auto"
    first_heldout_loss: float | None = None
    num_skipped: int = 0
    num_passed_over: int = 0
    num_bad_in_a_row: int = 0
    scale: dict[str, float] = field(default_factory=dict)


def save_checkpoint(
    folder: Path,
    position: Position,
    model: Any,
    optimizer: torch.optim.Optimizer,
    keep: int,
    carry: dict[str, Any] | None = None,
) -> CheckpointSaved:
    """Write ``folder/step-NNNNNN`` and remove all but the ``keep`` newest.

    ``carry`` is what a document carries in whose middle the step ended.

    Raises:
        CheckpointError: with bytes needed and free; earlier checkpoints stay whole.
    """
    began = time.monotonic()
    final = folder / f"step-{position.step:06d}"
    draft = folder / f".{final.name}.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(draft, ignore_errors=True)
    states = {"optimizer": optimizer.state_dict(), "random": _random_state(), "carry": carry}
    try:
        draft.mkdir()
        save_adapter(model, draft / ADAPTER)
        torch.save(states, draft / STATES)
        files = {str(path.relative_to(draft)): path.stat().st_size for path in _files(draft)}
        (draft / RUN).write_text(json.dumps({"files": files, **asdict(position)}, indent=1), encoding="utf-8")
        for path in _files(draft):
            _to_disk(path)
        if final.exists():  # a step done again after a resume
            shutil.rmtree(final)
        os.replace(draft, final)
        _to_disk(folder)
    except torch.OutOfMemoryError:  # whoever called may try again
        raise
    except (OSError, RuntimeError, CheckpointError) as error:  # torch.save raises RuntimeError on a full disk
        raise CheckpointError(
            f"{final}: not saved: {error}. It takes about {format_bytes(_num_bytes(model, states))}, "
            f"{format_bytes(free_disk_bytes(folder))} are free there. Earlier checkpoints are whole."
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for old in _by_step(folder)[keep:]:
        shutil.rmtree(old)
    num_bytes = sum(files.values())
    return CheckpointSaved(position.step, str(final), num_bytes, time.monotonic() - began)


def newest_checkpoint(folder: Path, tell: Tell) -> tuple[Path, Position] | None:
    """The newest whole checkpoint in ``folder``; newer ones that are not whole are told and passed over."""
    for path in _by_step(folder):
        try:
            return path, _read(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            tell(Notice(f"{path} is not whole and is passed over: {error}"))
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
        states = torch.load(path / STATES, map_location="cpu", weights_only=True)
        load_states(optimizer, states["optimizer"])
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError) as error:
        raise CheckpointError(
            f"{path / STATES}: cannot be put into this optimizer: {str(error).splitlines()[0]}"
        ) from None
    torch.set_rng_state(states["random"]["cpu"])
    if torch.cuda.is_available() and states["random"]["cuda"]:
        torch.cuda.set_rng_state_all(states["random"]["cuda"])
    return states.get("carry")


def _read(path: Path) -> Position:
    run = json.loads((path / RUN).read_text(encoding="utf-8"))
    for name, size in run.pop("files").items():
        found = (path / name).stat().st_size
        if found != size:
            raise ValueError(f"{name} has {found:,} bytes of {size:,}")
    return Position(**run)


def _by_step(folder: Path) -> list[Path]:
    """Checkpoints, newest first, whole or not."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if path.is_file())


def _to_disk(path: Path) -> None:
    """Have the operating system write ``path`` out, so that a power cut after the rename loses nothing."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _num_bytes(model: torch.nn.Module, states: dict[str, Any]) -> int:
    tensors: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
    for state in states["optimizer"]["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)
