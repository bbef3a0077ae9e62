"""What is planned for: a machine's rates and margins, and the limits that the user set or the machine sets."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from narrowboat.errors import BudgetError
from narrowboat.machine.hardware import describe_device, device_memory, free_disk_bytes, host_memory
from narrowboat.machine.profile import Margin, Rates, profile_of
from narrowboat.options.schema import MemoryOptions
from narrowboat.planner.forecast import Forecast
from narrowboat.units import format_bytes

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
    """The user's budgets, or most of what is free here. On a CPU the device's budget is the host's.

    Raises:
        BudgetError: a budget is larger than this machine's memory.
    """
    on_card, memory = device.type == "cuda", device_memory(device)
    name = describe_device(device)
    _refuse_more("memory.budget", options.budget, memory.total_bytes, name)
    if on_card:
        _refuse_more("memory.host_budget", options.host_budget, host_memory().total_bytes, "this machine")
    return Limits(
        device_bytes=options.budget or int(FREE_SHARE * memory.free_bytes),
        host_bytes=options.host_budget or (int(FREE_SHARE * host_memory().free_bytes) if on_card else None),
        disk_bytes=int(FREE_SHARE * free_disk_bytes(Path(tempfile.gettempdir()))),
    )


def _refuse_more(option: str, wanted: int | None, total_bytes: int, where: str) -> None:
    if wanted is not None and wanted > total_bytes:
        raise BudgetError(
            f"{option} is {format_bytes(wanted)}; {where} has {format_bytes(total_bytes)}. Name at most that, or leave "
            f"{option} out for {FREE_SHARE:.0%} of what is free."
        )
