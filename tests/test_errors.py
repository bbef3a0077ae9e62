"""What the system refuses where nobody knew better is a sentence with an exit code, and no traceback."""

from __future__ import annotations

import errno
import os

import pytest

from narrowboat.errors import DataError, MachineError, NarrowboatError, OutOfMemory, said_in_words


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/b"), MachineError, "a/b: No space left on device"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), MachineError, "Input/output error"),
        (OSError("a library's own words"), MachineError, "a library's own words"),
        (MemoryError(), OutOfMemory, "Host memory ran out: no room for another object."),
        (RuntimeError("DefaultCPUAllocator: not enough memory\nat ..."), OutOfMemory, "ran out: DefaultCPUAllocator"),
    ],
)
def test_the_machine_s_refusals(error: Exception, kind: type[NarrowboatError], words: str) -> None:
    with pytest.raises(kind) as said, said_in_words():
        raise error
    assert words in str(said.value)
    assert "\n" not in str(said.value)
    assert said.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("a bug"), DataError("a record"), KeyboardInterrupt()])
def test_what_is_no_refusal_of_the_machine_stays_what_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as said, said_in_words():
        raise error
    assert said.value is error
