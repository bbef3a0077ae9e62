"""The events of a run: plain values that the training loop emits and recorders write down.

An event is a frozen dataclass. As JSON it also has its class name as ``event`` and the wall-clock ``time`` at which it
was written. Recorders see events alone, and know neither the loop nor the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Event:
    """The base class of all events."""

    def as_dict(self) -> dict[str, Any]:
        """The event as a dictionary that JSON can hold, with its class name first."""
        return {"event": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class Notice(Event):
    """Something was ignored, replaced, cut or dropped: reported once, with its number."""

    text: str


@dataclass(frozen=True)
class RunStarted(Event):
    """The first event of a session. A run that was resumed has several sessions."""

    folder: str
    options: Mapping[str, Any]
    versions: Mapping[str, str]
    resumed_from_step: int = 0


@dataclass(frozen=True)
class DataReady(Event):
    """The account of the data, in which every input token is counted exactly once, and some examples.

    A sample has a ``source`` and ``parts``, each with a ``text`` and its ``kind``: learnt, context or masked.
    """

    account: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class ModelReady(Event):
    """The model is loaded and has its adapter."""

    name: str
    num_parameters: int
    num_trainable: int
    dtype: str
    device: str
    modules_by_target: Mapping[str, int]


@dataclass(frozen=True)
class PlanChosen(Event):
    """The plan that the run starts with, its forecast in bytes, and the forecast speed."""

    plan: Mapping[str, Any]
    description: str
    budget_bytes: int
    forecast_bytes: Mapping[str, int]
    longest_tokens: int
    phases: Mapping[str, int] = field(default_factory=dict)
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class PlanChanged(Event):
    """The run continues under another plan; the result stays the same."""

    step: int
    reason: str
    old: str
    new: str
    plan: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepDone(Event):
    """One optimizer step.

    ``num_skipped`` counts the steps of the run so far without a finite gradient; ``by_cause`` splits the peak's bytes.
    """

    step: int
    num_steps: int
    loss: float
    learning_rate: float
    gradient_norm: float
    num_tokens: int
    num_supervised_tokens: int
    num_micro_batches: int
    seconds: float
    peak_bytes: int
    budget_bytes: int
    num_skipped: int = 0
    by_cause: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryMark(Event):
    """The device's memory at a stage of the run: after loading, around the first step, in an evaluation.

    ``peak_bytes`` is the peak since the stage before. ``hole_bytes`` are reserved by the allocator, but in no tensor.
    """

    stage: str
    step: int
    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    hole_bytes: int


@dataclass(frozen=True)
class Evaluated(Event):
    """The loss on held-out data (validation loss), in nats per supervised token."""

    step: int
    loss: float
    num_supervised_tokens: int
    seconds: float


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A complete checkpoint is on disk."""

    step: int
    folder: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class RunEnded(Event):
    """The last event of a session. ``outcome``: done, interrupted or failed."""

    outcome: str
    step: int
    seconds: float
    num_tokens: int
    peak_bytes: int
    budget_bytes: int
    first_heldout_loss: float | None = None
    last_heldout_loss: float | None = None
    adapter_folder: str | None = None
    report_path: str | None = None
    error: str | None = None
    peak_by_phase: Mapping[str, int] = field(default_factory=dict)


class Recorder(Protocol):
    """Writes events down. It must not slow the loop, and must not raise for values that it cannot draw."""

    def record(self, event: Event) -> None:
        """Write one event down."""

    def close(self) -> None:
        """Flush and release; called exactly once."""


Tell = Callable[[Event], None]
"""A function that takes events, passed to code that reports something: ``tell(Notice("2 records dropped"))``."""
