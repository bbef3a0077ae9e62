"""What is planned for: a machine's rates and margins, and the limits that the user set or the machine sets."""

from __future__ import annotations

from dataclasses import dataclass

from narrowboat.machine.rates import Capability, Margin, Rates
from narrowboat.planner.amounts import Forecast

SOME_CARD: Capability = (8, 6)
"""Compute capability where a budget alone is named: of most cards that people have."""


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
        card: its kind, if it is one and so has memory of its own; None is a CPU.
        margin: what the device holds beside tensors.
        rates: what it does in a second, or None where that is not known.
        others: what machines of its size do, where its own rates are not known.
    """

    card: Capability | None
    margin: Margin
    rates: Rates | None = None
    others: tuple[Rates, ...] = ()

    @property
    def on_card(self) -> bool:
        """Whether the device has memory of its own."""
        return self.card is not None
