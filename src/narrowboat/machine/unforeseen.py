"""An error that nobody foresaw, in one sentence: what was worked on, what was done, and where its traceback is."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from narrowboat.errors import ModelError, NarrowboatError, first_line, said_in_words
from narrowboat.machine.caches import cache_folder, make_private
from narrowboat.machine.drafts import write_whole

ERROR_FILE = "error.txt"


@dataclass
class Work:
    """A job under way, as an error's sentence needs it; whoever does it keeps it up to date.

    Attributes:
        model: what the model is called, its class once that is known.
        doing: what is being done.
        folder: the run's, which gets the traceback; the user's cache folder where there is no run.
        remedy: what to try.
    """

    model: str
    doing: str
    folder: Path | None
    remedy: str

    @contextmanager
    def in_a_sentence(self) -> Iterator[None]:
        """Inside, whatever goes wrong is a ``NarrowboatError``.

        Raises:
            ModelError: for an error that nobody foresaw.
            OutOfMemory, MachineError: the system refused something.
        """
        try:
            with said_in_words():
                yield
        except NarrowboatError:
            raise
        except Exception as error:
            raise ModelError(
                f"{self.model}: {self.doing} failed with {type(error).__name__}: {first_line(error)}. "
                f"{self.remedy}; report it with {self._traceback(error)}, where the traceback is."
            ) from error

    def _traceback(self, error: Exception) -> Path:
        path = (self.folder or cache_folder()) / ERROR_FILE
        with suppress(OSError):  # the error is what matters
            if self.folder is None:
                make_private(path.parent)
            write_whole(path, "".join(traceback.format_exception(error)).encode())
        return path
