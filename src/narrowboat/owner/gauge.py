"""One reading of the device's memory, whatever the device: the allocator's figures on a card, the meter's on a CPU.

What is compared with the budget is what tensors take at their peak, and what a card holds beside them (``held``).
It is not what the allocator has reserved: that never falls by itself, so a run that was once above its threshold would
be for good, and holes in it are room for the next tensor. The driver's figures are not it either: they count others.

The budget is enforced in both places: a card's allocator is told its share, a CPU's meter refuses what would pass it.
Both raise ``torch.OutOfMemoryError``, so whatever recovers from running out of memory can be tried without a card.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import torch

from narrowboat.events import MemoryMark
from narrowboat.owner.causes import WORKING_SET
from narrowboat.owner.meter import Meter, Reading
from narrowboat.owner.owner import holdings


@dataclass(frozen=True)
class Figures:
    """What a card's allocator and driver say.

    Attributes:
        allocated_bytes: in tensors now.
        peak_bytes: the most that was, since the last reset.
        reserved_bytes: taken from the driver by this process's allocator.
        free_bytes, total_bytes: of the card, by the driver.
    """

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int

    @property
    def hole_bytes(self) -> int:
        """Reserved, and in no tensor."""
        return self.reserved_bytes - self.allocated_bytes

    def held(self, beside_bytes: int) -> int:
        """What counts against the budget, where the driver and its libraries hold ``beside_bytes``."""
        return self.peak_bytes + beside_bytes


class Gauge:
    """Reads and limits the memory of ``device`` while it is entered.

    Args:
        device: where the model is.
        budget_bytes: what may be held there.
        beside_bytes: what a card holds beside tensors.

    Attributes:
        by_phase: the most that was held in each phase of the work, as far as it was read.
        peak_bytes: the same since the present phase began.
        peak_by_cause: what that was made of.
        highest_bytes: the same since the gauge was entered.
    """

    def __init__(self, device: torch.device, budget_bytes: int, beside_bytes: int = 0) -> None:
        self.device, self.budget_bytes, self._beside_bytes = device, budget_bytes, beside_bytes
        self._meter = Meter(budget_bytes, one_memory=True) if device.type == "cpu" else None
        self._stack = ExitStack()
        self._model: torch.nn.Module | None = None
        self._phase = ""
        self.by_phase: dict[str, int] = {}
        self.peak_bytes = self.highest_bytes = 0
        self.peak_by_cause: dict[str, int] = {}

    def __enter__(self) -> Gauge:
        if self._meter is not None:
            self._stack.enter_context(self._meter)
        else:
            total = torch.cuda.get_device_properties(self.device).total_memory
            share = (self.budget_bytes - self._beside_bytes) / total  # the allocator knows nothing of the rest
            torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), self.device)
            self._stack.callback(torch.cuda.set_per_process_memory_fraction, 1.0, self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.read()
        self._stack.close()

    def watch_model(self, model: torch.nn.Module) -> None:
        """Count what was there before the gauge was, and ask the model's owner for causes."""
        self._model = model
        if self._meter is not None:
            self._meter.watch_model(model)

    def begin(self, phase: str) -> None:
        """From here on readings belong to ``phase``."""
        self.read()
        self._phase, self.peak_bytes, self.peak_by_cause = phase, 0, {}

    def read(self) -> int:
        """The most that was held since the last reading or since the phase began; the next one begins anew."""
        if self._meter is not None:
            now = self._meter.peak.device_bytes
            causes = self.by_cause() if now > self.peak_bytes else self.peak_by_cause
            self._meter.reset_peak()
        else:
            now = self.figures().held(self._beside_bytes)
            causes = self.by_cause() if now > self.peak_bytes else self.peak_by_cause
            torch.cuda.reset_peak_memory_stats(self.device)
        self.peak_by_cause = causes
        self.peak_bytes, self.highest_bytes = max(self.peak_bytes, now), max(self.highest_bytes, now)
        if self._phase:
            self.by_phase[self._phase] = max(self.by_phase.get(self._phase, 0), now)
        return now

    def now(self) -> Reading:
        """What is held at this moment, for whoever looks on from another thread.

        Raises:
            RuntimeError: something was allocated meanwhile; ask again.
        """
        if self._meter is not None:
            return self._meter.live
        sizes: dict[str, int] = {}
        places: dict[str, int] = {}
        for holding in holdings(self._model) if self._model is not None else ():
            num_bytes = holding.tensor.untyped_storage().nbytes()
            places[holding.where] = places.get(holding.where, 0) + num_bytes
            if holding.where == "device":
                sizes[holding.cause] = sizes.get(holding.cause, 0) + num_bytes
        held = torch.cuda.memory_allocated(self.device)
        sizes[WORKING_SET] = max(0, held - sum(sizes.values()))
        host = places.get("host", 0) + places.get("pinned", 0)
        return Reading(held + self._beside_bytes, host, places.get("disk", 0), places.get("file", 0), sizes)

    def mark(self, stage: str, step: int) -> MemoryMark:
        """What there is at a stage of the run; a CPU's memory has no holes that torch would know of."""
        self.read()
        if self._meter is not None:
            held = self._meter.live.device_bytes
            return MemoryMark(stage, step, held, self.peak_bytes, held, 0)
        now = self.figures()
        return MemoryMark(stage, step, now.allocated_bytes, self.peak_bytes, now.reserved_bytes, now.hole_bytes)

    def figures(self) -> Figures:
        """A card's, now."""
        free, total = torch.cuda.mem_get_info(self.device)
        return Figures(
            torch.cuda.memory_allocated(self.device),
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.memory_reserved(self.device),
            free,
            total,
        )

    def by_cause(self) -> dict[str, int]:
        """What the peak since the last reading was made of, largest first; on a card, what is held now."""
        if self._meter is not None:
            return self._meter.peak.by_cause
        sizes: dict[str, int] = {}
        for holding in holdings(self._model) if self._model is not None else ():
            if holding.where == "device":
                sizes[holding.cause] = sizes.get(holding.cause, 0) + holding.tensor.untyped_storage().nbytes()
        sizes[WORKING_SET] = max(0, self.figures().peak_bytes - sum(sizes.values()))
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))
