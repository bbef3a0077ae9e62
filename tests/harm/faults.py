"""A fault at every write: whatever the disk refuses, a run ends in a sentence and goes on when the disk is well again.

Every call by which training or exporting changes something below a folder is counted: a file that is opened to be
written, bytes that are written or flushed, names that are given, changed or taken away. In session after session the
n-th of them fails, once or together with all that follow.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowboat import api
from narrowboat.machine import drafts
from narrowboat.monitor.recorders import JsonLines
from narrowboat.training.folder import BEST
from tests.harm.place import PLANS, Place, differences, drafts_in, is_refusal, session, under

TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
NAMED = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")
"""What Python's audit says before a name changes, with the path first."""

STEPS = 3


@dataclass
class Result:
    """What came of the faults; ``wrong`` are tracebacks and what was not whole afterwards."""

    faults: int = 0
    refused: int = 0
    writes: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Faults:
    """Counts what changes ``folder``; the ``first``-th fails, and with ``stays`` all that follow. 0 lets all go on."""

    def __init__(self, folder: Path, first: int = 0, stays: bool = False) -> None:
        self.num_writes, self._folder, self._first, self._stays = 0, str(folder), first, stays

    def inject(self) -> None:
        """From here on, until this process ends."""
        sys.addaudithook(self._audit)
        for owner, name in ((drafts.HashedFile, "write"), (os, "fsync"), (JsonLines, "record")):
            setattr(owner, name, self._before(getattr(owner, name)))

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[2], int) and not args[2] & TO_WRITE:
            return
        if event in ("open", *NAMED) and self._is_below(args[0]):
            self._count()

    def _is_below(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(self._folder)

    def _before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._count()
            return own(*args)

        return call

    def _count(self) -> None:
        self.num_writes += 1
        if self._first and (self.num_writes == self._first or (self._stays and self.num_writes > self._first)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def faults(place: Place, num_faults: int | None, seed: int, say: Callable[[str], None]) -> Result:
    """``num_faults`` of all there may be, while training and while exporting; every one of them for None."""
    place.steps = STEPS
    result, rng = Result(), random.Random(seed)
    for name, kind in (("training", _Training(place)), ("exporting", _Exporting(place))):
        result.writes[name] = num_writes = kind.reference()
        places = [(at, stays) for at in range(1, num_writes + 1) for stays in (False, True)]
        some = places if num_faults is None else rng.sample(places, min(len(places), num_faults // 2))
        for number, (at, stays) in enumerate(sorted(some)):
            code, wrong = kind.harmed(at, stays)
            result.faults += 1
            result.refused += code > 0
            result.wrong += [f"{name}, write {at}{' and all later ones' if stays else ''}: {words}" for words in wrong]
            if number % 50 == 49:
                say(f"{name}: {result.faults} faults, {len(result.wrong)} wrong")
    return result


class _Training:
    """A run from the reading of its data on."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def reference(self) -> int:
        """Let a run alone; how often it writes."""
        return _num_writes(self._place, lambda faults: self._train("whole", False, faults))

    def harmed(self, at: int, stays: bool) -> tuple[int, list[str]]:
        """The exit code of a run with a fault, and what was wrong with it or when it went on."""
        run = self._place.folder / "harmed" / "run"
        code, before = session(lambda: self._train("harmed/run", False, Faults(self._place.folder, at, stays)))
        wrong = [] if is_refusal(code, before) else [f"ends with {code}: {before[-1500:]}"]
        again, said = session(lambda: self._train("harmed/run", True))
        wrong += [] if again == 0 else [f"after {code} it does not go on ({again}): {said[-1500:]}"]
        if again == 0:
            is_lost = f"{run / BEST}: the adapter was not saved" in before  # and said; the run has gone on
            found = differences(self._place.folder / "whole", run, STEPS) + drafts_in(run.parent)
            wrong += [name for name in found if not (is_lost and name.startswith(BEST))]
        shutil.rmtree(run.parent, ignore_errors=True)
        return code, wrong

    def _train(self, name: str, resume: bool, faults: Faults | None = None) -> None:
        changes = {"data.cache": str(self._place.folder / name / ".." / "prepared"), "train.evaluate_every": 1}
        with under(PLANS["keep"]):
            options = self._place.options(name, changes)
            if faults:
                faults.inject()
            api.train(options, resume=resume, quiet=True)


class _Exporting:
    """The merged model of the run that was let alone."""

    def __init__(self, place: Place) -> None:
        self._place, self._out = place, place.folder / "exported" / "out"

    def reference(self) -> int:
        """Export once; how often it writes."""
        return _num_writes(self._place, lambda faults: self._export(self._out.with_name("whole"), faults))

    def harmed(self, at: int, stays: bool) -> tuple[int, list[str]]:
        """The exit code of an export with a fault, and what was wrong with it or with the next one."""
        code, said = session(lambda: self._export(self._out, Faults(self._place.folder, at, stays)))
        wrong = [] if is_refusal(code, said) else [f"ends with {code}: {said[-1500:]}"]
        if not self._out.exists():
            again, said = session(lambda: self._export(self._out))
            wrong += [] if again == 0 else [f"after {code} it cannot be tried again ({again}): {said[-1500:]}"]
        if _contents(self._out) != _contents(self._out.with_name("whole")):
            wrong.append("it is not what it was")
        shutil.rmtree(self._out, ignore_errors=True)
        left = sorted(os.listdir(self._out.parent))
        return code, wrong + ([] if left == ["whole"] else [f"what stays is {left}"])

    def _export(self, out: Path, faults: Faults | None = None) -> None:
        if faults:
            faults.inject()
        api.export(self._place.folder / "whole", out, say=lambda text: None, verified=False)


def _num_writes(place: Place, work: Callable[[Faults], None]) -> int:
    """How often ``work`` writes when nothing fails."""
    file = place.folder.with_name(f"{place.folder.name}.writes")

    def counted() -> None:
        faults = Faults(place.folder)
        work(faults)
        file.write_text(str(faults.num_writes))

    code, said = session(counted)
    assert code == 0, said
    found = int(file.read_text())
    file.unlink()
    return found


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}
