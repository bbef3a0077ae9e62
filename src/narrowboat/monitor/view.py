"""What a display may look at while a run goes on, beside the events that it is told.

Everything here is asked from the display's own thread and never waits for the thread that works.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowboat.underway import Underway
from narrowboat.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from narrowboat.machine.vitals import Pulse, Vitals
    from narrowboat.owner.meter import Reading

READ_SECONDS = 2.0
"""Between two readings of memory and machine; on a card they take some milliseconds."""


@dataclass
class View:
    """Eyes on a run.

    Attributes:
        underway: where the step is.
        now: what memory holds; RuntimeError where that changes while it is read.
        pulse: of the machine.
        heard: the signal that asked the run to stop, 0 without one.
        patience_seconds: what a step may still take then.
    """

    underway: Underway
    now: Callable[[], Reading]
    pulse: Pulse
    heard: Callable[[], int]
    patience_seconds: float
    reading: Reading | None = None
    vitals: Vitals | None = None
    read_at: float = -math.inf

    def look(self) -> None:
        """Read memory and machine anew, every other second; what cannot be read now stays as it was."""
        if time.monotonic() < self.read_at + READ_SECONDS:
            return
        self.read_at = time.monotonic()
        with suppress(Exception):  # of the thread that works, whose tensors come and go while they are counted
            self.reading = self.now()
        self.vitals = self.pulse.take()

    def vitals_words(self) -> str:
        """``host 3.10 GiB   scratch 1.20 GiB   disk 310 MiB/s   card 61 °C, 310 W, 98 % used, bus 1.2 GiB/s``."""
        reading, vitals = self.reading, self.vitals
        if reading is None or vitals is None:
            return ""
        parts = [f"host {format_bytes(vitals.host_bytes)}"]
        if reading.disk_bytes:
            parts.append(f"scratch {format_bytes(reading.disk_bytes)}")
        if vitals.disk_bytes:
            parts.append(f"disk {format_bytes(vitals.disk_bytes)}/s")
        if (card := vitals.card) is not None:
            health = f"card {card.celsius} °C, {card.watts:.0f} W, {card.percent} % used"
            parts.append(f"{health}, bus {format_bytes(card.bus_bytes)}/s")
        return "   ".join(parts)

    def memory_words(self, budget_bytes: int) -> str:
        """``memory 1.21 GiB of 2.00 GiB now: base weights 257 MiB, layer inputs 120 MiB``."""
        if self.reading is None:
            return ""
        causes = ", ".join(f"{name} {format_bytes(size)}" for name, size in list(self.reading.by_cause.items())[:5])
        of = f" of {format_bytes(budget_bytes)}" if budget_bytes else ""
        return f"memory {format_bytes(self.reading.device_bytes)}{of} now" + (f": {causes}" if causes else "")

    def stopping_words(self, step: int) -> str:
        """What becomes of Ctrl-C in step ``step``, and when; empty while nobody asked."""
        if not (number := self.heard()):
            return ""
        name, patience = signal.Signals(number).name, format_seconds(self.patience_seconds)
        again = "Once more stops at once, and what was not saved is lost."
        if self.underway.work == "evaluation":
            return f"{name} heard: the evaluation is given up at once, and the run is saved as it is. {again}"
        if not self.underway.work:
            return f"{name} heard: no step is under way, and the run is saved now. {again}"
        left = self.underway.seconds_left
        if left is not None and left > self.patience_seconds:
            return (
                f"{name} heard: step {step:,} would take {format_seconds(left)} more, so it is given up in {patience} "
                f"at most, and the run is saved after step {step - 1:,}. {again}"
            )
        when = f" in about {format_seconds(left)}" if left is not None else ""
        end = f"{name} heard: step {step:,} is finished{when}, or given up after {patience}"
        return f"{end}; then the run is saved. {again}"
