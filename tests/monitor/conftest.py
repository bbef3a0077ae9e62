"""The run folder that the tests of this room write into."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.monitor.runs import Write

from narrowboat.events import Event
from narrowboat.monitor.recorders import EVENTS_FILE, JsonLines


@pytest.fixture
def write(tmp_path: Path) -> Write:

    def write_down(events: Iterable[Event]) -> Path:
        recorder = JsonLines(tmp_path / EVENTS_FILE)
        for event in events:
            recorder.record(event)
        recorder.close()
        return tmp_path / EVENTS_FILE

    return write_down
