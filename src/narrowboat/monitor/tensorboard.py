"""Curves and text for TensorBoard: losses, rate, gradient norm, pace, memory by cause; plans and notices as text.

``tensorboard --logdir RUN_FOLDER/tensorboard`` draws them while the run goes on. The writer is tensorboard's own;
neither torch nor TensorFlow is loaded for it, and the library itself only when the first event arrives.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from narrowboat.events import Event, RunStarted
from narrowboat.machine.extras import require
from narrowboat.monitor.scalars import scalars, text

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

FLUSH_SECONDS = 10


class TensorBoard:
    """Writes one event file a session. A resumed run takes back the steps that it is about to repeat."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: EventFileWriter | None = None

    def record(self, event: Event) -> None:
        """Write the event's scalars, if it has any."""
        match event:
            case RunStarted():
                self._forget_after(event.resumed_from_step)
            case _:
                step, numbers = scalars(event)
                if numbers:
                    self._write(step, numbers)
                elif said := text(event):
                    self._write_text(*said)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> EventFileWriter:
        if self._writer is None:
            writer = require("tensorboard.summary.writer.event_file_writer", "tensorboard/")
            self._writer = writer.EventFileWriter(str(self._folder), flush_secs=FLUSH_SECONDS)
        return self._writer

    def _write(self, step: int, scalars: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._open().add_event(Record(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write_text(self, step: int, tag: str, words: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        summary = text_pb(tag, words)
        assert isinstance(summary, Summary)
        self._open().add_event(Record(wall_time=time.time(), step=step, summary=summary))

    def _forget_after(self, step: int) -> None:
        writer = self._open()
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog

        start = SessionLog(status=SessionLog.START)
        writer.add_event(Record(wall_time=time.time(), step=step + 1, session_log=start))
