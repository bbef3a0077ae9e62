"""Being asked to stop or to save: by Ctrl-C, by a scheduler's signal, or because the time is up.

SIGINT and SIGTERM: the step in progress is finished and the run saved; after ``PATIENCE_SECONDS`` the micro-batch under
way is given up, between two parts of a layer, and the step with it. In an evaluation that happens at once, for there is
nothing to lose. Two signals within a second are one, as launchers forward them; a later one stops at once. A signal
that came while Python was within one long call is heard when that ends, so it counts as later only if work went on a
second after the first. The exit code is that of the first. SIGUSR1 saves and goes on. ``train.max_minutes`` ends a run
as SIGTERM does.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType

from torch import nn

STOPPING = (signal.SIGINT, signal.SIGTERM)
SAVING = getattr(signal, "SIGUSR1", None)  # Windows has none
PATIENCE_SECONDS = 30.0
FORWARDED_SECONDS = 1.0


class GivenUp(Exception):
    """The work under way was given up; it has changed nothing."""


class StoppedAtOnce(KeyboardInterrupt):
    """Stopped without saving; ``exit_code`` is the first signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


class StopRequest:
    """Remembers what was asked for while it is entered.

    Args:
        max_seconds: from entering it, after which the run is to stop; None for no limit.
        patience_seconds: what a step may still take once it was asked to stop.

    Attributes:
        received: the number of the first stopping signal, 0 without one.
        wants_save: whether saving was asked for; whoever saves makes it false.
        patience_seconds: as given.
    """

    def __init__(self, max_seconds: float | None = None, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.received = 0
        self.wants_save = False
        self._is_patient = self._loses_nothing = False
        self._max_seconds, self.patience_seconds = max_seconds, patience_seconds
        self._received_at = self._went_on_at = 0.0
        self._end: float | None = None
        self._before: dict[int, signal._HANDLER] = {}
        self._arrivals: tuple[socket.socket, socket.socket] | None = None
        self._woken_before = -1

    def __enter__(self) -> StopRequest:
        self._end = None if self._max_seconds is None else time.monotonic() + self._max_seconds
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._before = {number: signal.signal(number, self._note) for number in STOPPING}
            if SAVING is not None:
                self._before[SAVING] = signal.signal(SAVING, self._note_save)
            self._arrivals = socket.socketpair()
            for end in self._arrivals:
                end.setblocking(False)
            self._woken_before = signal.set_wakeup_fd(self._arrivals[1].fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._arrivals is not None:
            signal.set_wakeup_fd(self._woken_before)
            for end in self._arrivals:
                end.close()

    @property
    def heard(self) -> int:
        """The first stopping signal that came, also one that Python has had no time to look at; any thread may ask."""
        if not self.received and self._arrivals is not None:
            with suppress(OSError):
                waiting = self._arrivals[0].recv(4096, socket.MSG_PEEK)
                return next((number for number in waiting if number in STOPPING), 0)
        return self.received

    @property
    def is_asked(self) -> bool:
        """Whether the run is to stop."""
        if not self.received and self._end is not None and time.monotonic() >= self._end:
            self.received, self._received_at = signal.SIGTERM, self._end
        return bool(self.received)

    def check(self) -> None:
        """Give up what goes on, if it has to stop and has had its time.

        Raises:
            GivenUp: it has.
        """
        self._went_on_at = time.monotonic()
        if self.is_asked and (self._loses_nothing or self._went_on_at > self._received_at + self.patience_seconds):
            raise GivenUp

    @contextmanager
    def checked_in(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, every part of every layer begins with ``check``, also those that backward runs again."""
        with ExitStack() as stack:
            for layer in layers:
                for part in layer.children():
                    stack.callback(part.register_forward_pre_hook(lambda *_: self.check()).remove)
            yield

    @contextmanager
    def losing_nothing(self) -> Iterator[None]:
        """Inside, what goes on is given up as soon as the run is to stop."""
        self._loses_nothing = True
        try:
            yield
        finally:
            self._loses_nothing = False

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Inside, whoever works looks for what was asked; outside of it, a signal stops at once."""
        self._is_patient = True
        try:
            yield
        finally:
            self._is_patient = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._received_at = self._first(number), time.monotonic()
            is_last = not self._is_patient
        else:
            is_last = self._went_on_at > self._received_at + FORWARDED_SECONDS
        self._went_on_at = time.monotonic()
        if is_last:
            raise StoppedAtOnce(self.received)

    def _first(self, number: int) -> int:
        """The signal that came first, where several came while Python could not handle them."""
        came = b""
        if self._arrivals is not None:
            with suppress(BlockingIOError):
                came = self._arrivals[0].recv(4096)
        return next((other for other in came if other in STOPPING), number)

    def _note_save(self, number: int, frame: FrameType | None) -> None:
        self.wants_save = True
