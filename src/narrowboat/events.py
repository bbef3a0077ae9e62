"""What a run tells: plain values that the loop emits and recorders write down.

The loop knows when, the engine knows how; recorders know neither. An event is a frozen dataclass; as JSON it carries
its class's name as ``event`` and the wall-clock ``time`` at which it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Event:
    """The root of all events."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with the event's name first."""
        return {"event": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class Notice(Event):
    """Something was ignored, replaced, cut or dropped: said once, with its number."""

    text: str


@dataclass(frozen=True)
class RunStarted(Event):
    """The first event of every sitting; a resumed run has several."""

    folder: str
    options: Mapping[str, Any]
    versions: Mapping[str, str]
    resumed_from_step: int = 0


@dataclass(frozen=True)
class DataReady(Event):
    """The account of the data: every token of the input is in exactly one of the counts; and some examples.

    A sample has a ``source`` and ``parts``, each with a ``text`` and its ``kind``: learnt, context or masked.
    """

    account: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class ModelReady(Event):
    """The model is loaded and adapted."""

    name: str
    num_parameters: int
    num_trainable: int
    dtype: str
    device: str
    modules_by_target: Mapping[str, int]


@dataclass(frozen=True)
class PlanChosen(Event):
    """The plan that the run starts with, why it fits, and the pace that is forecast."""

    plan: Mapping[str, Any]
    description: str
    budget_bytes: int
    forecast_bytes: Mapping[str, int]
    longest_tokens: int
    phases: Mapping[str, int] = field(default_factory=dict)
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class PlanChanged(Event):
    """The run goes on under another plan; the result stays the same."""

    step: int
    reason: str
    old: str
    new: str
    plan: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepDone(Event):
    """One optimizer step.

    ``num_skipped`` steps of the run so far had no finite gradient; ``by_cause`` is what the peak was made of.
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

    ``peak_bytes`` is the most since the stage before; holes are reserved and in no tensor.
    """

    stage: str
    step: int
    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    hole_bytes: int


@dataclass(frozen=True)
class Evaluated(Event):
    """Held-out loss, in nats a supervised token."""

    step: int
    loss: float
    num_supervised_tokens: int
    seconds: float


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A whole checkpoint is on disk."""

    step: int
    folder: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class RunEnded(Event):
    """The last event of a sitting. ``outcome``: done, interrupted or failed."""

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
    """Writes events down; must not slow the loop and must not raise for what it cannot draw."""

    def record(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Flush and release; called exactly once."""


Tell = Callable[[Event], None]
"""What rooms below the recorders take to say something: ``tell(Notice("2 records dropped"))``."""
