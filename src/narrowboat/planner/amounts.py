"""What planning counts: a step's bytes by cause and place, and its operations; plain numbers, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from narrowboat.plan import LayerMode, MemoryPlan


@dataclass(frozen=True, slots=True)
class Work:
    """What a device has to do.

    Attributes:
        products: floating-point operations of matrix products.
        attention: floating-point operations of attention.
        moved_bytes: read and written by all other operators.
        calls: of operators.
        host_bytes: travelling between device and host.
        disk_bytes: travelling between device and scratch file.
    """

    products: float = 0
    attention: float = 0
    moved_bytes: float = 0
    calls: float = 0
    host_bytes: float = 0
    disk_bytes: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def __mul__(self, times: float) -> Work:
        return Work(*(a * times for a in self.counts))

    @property
    def counts(self) -> tuple[float, ...]:
        """All of them, in order."""
        return tuple(getattr(self, field) for field in self.__slots__)


@dataclass(frozen=True)
class Forecast:
    """What a step over ``num_rows`` rows of ``num_tokens`` tokens takes under ``plan``.

    ``by_cause`` holds the device's bytes at its peak; host and disk have peaks of their own. ``weights_away_bytes`` is
    what of those are weights, ``file_bytes`` those that stay pages of the model's own files. ``phases`` is the device's
    peak in each phase of a run, where that was asked for. ``seconds`` are those of a step on a known device;
    ``seconds_range`` goes from the fastest to the slowest card of that size where only a budget was named.
    """

    plan: MemoryPlan
    num_rows: int
    num_tokens: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    by_cause: dict[str, int]
    work: Work
    weights_away_bytes: int = 0
    file_bytes: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    seconds: float | None = None
    seconds_range: tuple[float, float] | None = None

    @property
    def slowest(self) -> float:
        """Seconds by which plans are compared; 0 where no rate is known."""
        return self.seconds or (self.seconds_range or (0.0,))[-1]


class Forecasts(Protocol):
    """Where forecasts come from: a rehearsal of this very row, or curves through rehearsals of other lengths.

    Attributes:
        work: what is forecast; ``options`` are its options and ``positions`` those that the model was made for.
        num_layers: of the model.
        layer_bytes: of the weights of its largest layer.
        refused: for each kind of plan that is not right for the model, why.
    """

    work: Any
    num_layers: int

    @property
    def layer_bytes(self) -> int: ...

    @property
    def refused(self) -> Mapping[LayerMode, str]: ...

    def forecast(self, plan: MemoryPlan, num_tokens: int, num_rows: int = 1, many: bool = False) -> Forecast:
        """A step over ``num_rows`` rows of ``num_tokens``; ``many`` says that many lengths will be asked for."""

    def phases(self, plan: MemoryPlan, num_tokens: int, num_rows: int = 1) -> dict[str, int]:
        """The device's peak bytes in each phase of a run."""
