"""What is planned for: a machine's rates and margins, and the limits that the user set or the machine sets."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from narrowboat.machine.hardware import device_memory, free_disk_bytes, host_memory
from narrowboat.machine.profile import Margin, Rates, profile_of
from narrowboat.options.schema import MemoryOptions
from narrowboat.planner.forecast import Forecast

FREE_SHARE = 0.9
"""Of what is free, taken where the user names no budget."""


@dataclass(frozen=True)
class Limits:
    """What a plan may take: bytes of the device, of host memory, of the scratch file; None is no limit."""

    device_bytes: int
    host_bytes: int | None = None
    disk_bytes: int | None = None

    def allow(self, forecast: Forecast) -> bool:
        """Whether it fits everywhere."""
        return (
            forecast.device_bytes <= self.device_bytes
            and (self.host_bytes is None or forecast.host_bytes <= self.host_bytes)
            and (self.disk_bytes is None or forecast.disk_bytes <= self.disk_bytes)
        )


@dataclass(frozen=True)
class Target:
    """The machine that is planned for.

    Attributes:
        on_card: whether the device has memory of its own.
        margin: what the device holds beside tensors.
        rates: what it does in a second, or None where that is not known.
    """

    on_card: bool
    margin: Margin
    rates: Rates | None = None


def target_here(device: torch.device, dtype: torch.dtype) -> Target:
    """This machine, as it was measured."""
    profile = profile_of(device, dtype)
    return Target(device.type == "cuda", profile.margin, profile.rates)


def limits_here(options: MemoryOptions, device: torch.device) -> Limits:
    """The user's budgets, or most of what is free here. On a CPU the device's budget is the host's."""
    on_card = device.type == "cuda"
    host = options.host_budget or (int(FREE_SHARE * host_memory().free_bytes) if on_card else None)
    return Limits(
        device_bytes=options.budget or int(FREE_SHARE * device_memory(device).free_bytes),
        host_bytes=host,
        disk_bytes=int(FREE_SHARE * free_disk_bytes(Path(tempfile.gettempdir()))),
    )
