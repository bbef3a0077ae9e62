"""Events as numbers by name, alike for every recorder that draws curves; and as text where one shows text."""

from __future__ import annotations

from narrowboat.events import Evaluated, Event, MemoryMark, Notice, PlanChanged, PlanChosen, StepDone


def scalars(event: Event) -> tuple[int, dict[str, float]]:
    """The step and the numbers that belong to it; none for an event without any."""
    match event:
        case StepDone():
            return event.step, {
                "loss/train": event.loss,
                "learning_rate": event.learning_rate,
                "gradient_norm": event.gradient_norm,
                "tokens_per_second": event.num_tokens / event.seconds if event.seconds > 0 else 0.0,
                "memory/peak_bytes": event.peak_bytes,
                "memory/budget_bytes": event.budget_bytes,
                **{f"memory/{cause.replace(' ', '_')}_bytes": size for cause, size in event.by_cause.items()},
            }
        case Evaluated():
            return event.step, {"loss/heldout": event.loss}
        case MemoryMark():
            sizes = {"allocated": event.allocated_bytes, "reserved": event.reserved_bytes, "holes": event.hole_bytes}
            return event.step, {f"memory/{event.stage.replace(' ', '_')}/{key}": size for key, size in sizes.items()}
    return 0, {}


def text(event: Event) -> tuple[int, str, str] | None:
    """The step, a name and words; None for an event that says nothing."""
    match event:
        case PlanChosen():
            return 0, "plan", event.description
        case PlanChanged():
            return event.step, "plan", f"{event.new} (was {event.old}: {event.reason})"
        case Notice():
            return 0, "notice", event.text
    return None
