"""A run's folder: what lies in it, and one process that has it to itself.

It is looked at before anything is made or changed: what cannot become a run's folder is refused in a sentence. Then it
is locked, and what killed processes left in it is cleared away. All that is written has the modes that the umask says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from narrowboat.errors import OptionError
from narrowboat.machine.drafts import clear
from narrowboat.machine.locks import LOCK, HeldError, alone_in

OPTIONS_FILE, PLAN_FILE, CHECKPOINTS, ADAPTER, BEST, REPORT = (
    "options.yaml", "plan.json", "checkpoints", "adapter", "best", "report.html",
)  # fmt: skip


@contextmanager
def opened(folder: Path, resume: bool, option: str = "train.folder") -> Iterator[None]:
    """``folder``, made if it is not there, for this process alone; one that stays empty is removed again.

    Raises:
        OptionError: it cannot be a run's folder, another process has it, or it holds another run.
    """
    with ExitStack() as stack:
        try:
            _refuse_other_run(folder, resume)
            if not folder.exists():
                stack.callback(_remove_if_empty, folder)
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone_in(folder))
            _refuse_other_run(folder, resume)  # which may have begun meanwhile
            for place in (folder, folder / CHECKPOINTS):
                clear(place)
        except HeldError as holder:
            raise OptionError(f"{folder} is in use by {holder}. Wait for it, or name another {option}.") from None
        except (OSError, ValueError) as error:
            reason = "it is no folder" if isinstance(error, FileExistsError) else getattr(error, "strerror", "")
            raise OptionError(
                f"{option}: {str(folder)[:200]!r} cannot be made or written: {reason or error}. Name another folder."
            ) from None
        yield


def holds_run(folder: Path) -> bool:
    """Whether ``folder`` holds what a run has learnt."""
    return (folder / ADAPTER).exists() or _has_checkpoints(folder)


def _has_checkpoints(folder: Path) -> bool:
    checkpoints = folder / CHECKPOINTS
    return checkpoints.is_dir() and any(not path.name.startswith(".") for path in checkpoints.iterdir())


def _refuse_other_run(folder: Path, resume: bool) -> None:
    if not resume and _has_checkpoints(folder):
        raise OptionError(
            f"{folder} holds the checkpoints of another run; go on with --resume, or name another train.folder."
        )


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError, ValueError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            folder.rmdir()
