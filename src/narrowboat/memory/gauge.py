"""One reading of the device's memory, whatever the device: the allocator's figures on a card, the meter's on a CPU.

The budget is enforced in both places: a card's allocator is told its share, a CPU's meter refuses what would pass it.
Both raise ``torch.OutOfMemoryError``, so whatever recovers from running out of memory can be tried without a card.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch

from narrowboat.memory.meter import Meter


class Gauge:
    """Reads and limits the memory of ``device`` while it is entered.

    Args:
        device: where the model is.
        budget_bytes: what may be held there.
    """

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self.device, self.budget_bytes = device, budget_bytes
        self._meter = Meter(budget_bytes, one_memory=True) if device.type == "cpu" else None
        self._stack = ExitStack()
        self._highest = 0

    def __enter__(self) -> Gauge:
        if self._meter is not None:
            self._stack.enter_context(self._meter)
        else:
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.budget_bytes / total), self.device)
            self._stack.callback(torch.cuda.set_per_process_memory_fraction, 1.0, self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def watch_model(self, model: torch.nn.Module) -> None:
        """Count what was there before the gauge was."""
        if self._meter is not None:
            self._meter.watch_model(model)

    def peak_bytes(self) -> int:
        """The most that was held since the last reset."""
        peak = self._meter.peak.device_bytes if self._meter is not None else torch.cuda.max_memory_reserved(self.device)
        self._highest = max(self._highest, peak)
        return peak

    def by_cause(self) -> dict[str, int]:
        """What the peak was made of, largest first; empty on a card, whose allocator knows no causes."""
        return {} if self._meter is None else self._meter.peak.by_cause

    def reset_peak(self) -> None:
        """Let the peak begin anew."""
        self.peak_bytes()
        if self._meter is not None:
            self._meter.reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def highest_bytes(self) -> int:
        """The most that was ever held while the gauge was entered."""
        self.peak_bytes()
        return self._highest
