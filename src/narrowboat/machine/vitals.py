"""What the machine is doing while a run goes on: memory of the process, traffic to the disk, and the card's health.

Read every other second from a display's thread; a card's driver is asked through NVML, which needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from narrowboat.machine.hardware import process_memory


@dataclass(frozen=True)
class CardVitals:
    """A card's temperature in degrees Celsius, power in watts, use in per cent, and bytes a second over the bus."""

    celsius: int
    watts: float
    percent: int
    bus_bytes: int


@dataclass(frozen=True)
class Vitals:
    """Host memory that nobody can take back, bytes a second to and from disks, and the card where there is one."""

    host_bytes: int
    disk_bytes: int
    card: CardVitals | None = None


class Pulse:
    """Takes vitals; the rate of traffic is that since the last time.

    Args:
        device: where the arithmetic is.
    """

    def __init__(self, device: torch.device) -> None:
        self._process = psutil.Process()
        self._read_card = _card_reader(device)
        self._moved, self._at = self._moved_bytes(), time.monotonic()

    def take(self) -> Vitals:
        """What there is now."""
        moved, now = self._moved_bytes(), time.monotonic()
        rate = (moved - self._moved) / max(1e-3, now - self._at)
        self._moved, self._at = moved, now
        return Vitals(process_memory().anonymous_bytes, int(rate), self._read_card())

    def _moved_bytes(self) -> int:
        """Read and written so far; 0 where the system does not say, as macOS."""
        with suppress(AttributeError, OSError, psutil.Error, NotImplementedError):
            counters = self._process.io_counters()  # type: ignore[attr-defined, unused-ignore]
            return int(counters.read_bytes + counters.write_bytes)
        return 0


def _card_reader(device: torch.device) -> Callable[[], CardVitals | None]:
    """Reads the card by its own number, which holds whatever CUDA_VISIBLE_DEVICES says."""
    if device.type != "cuda":
        return lambda: None
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
    except (pynvml.NVMLError, AttributeError):  # another maker's card, a virtual one, or a driver without it
        return lambda: None
    return lambda: _read(pynvml, handle)


def _read(nvml: Any, handle: Any) -> CardVitals | None:
    try:
        bus = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        moved = 0
        with suppress(nvml.NVMLError):
            moved = 1024 * sum(nvml.nvmlDeviceGetPcieThroughput(handle, way) for way in bus)
        return CardVitals(
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            moved,
        )
    except nvml.NVMLError:
        return None
