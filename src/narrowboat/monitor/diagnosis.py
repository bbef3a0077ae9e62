"""From a run's history to findings: what went wrong, with the numbers that say so. A pure function; nothing is asked.

Each rule looks for one kind of trouble (``monitor.remedies``) and says nothing where the record leaves a doubt: a
finding on a healthy run costs more trust than a missing one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from narrowboat.events import StepDone
from narrowboat.monitor.history import History
from narrowboat.monitor.remedies import REMEDIES, Remedy
from narrowboat.units import format_bytes, format_seconds

MESSAGES = (
    (r"Memory ran out while .* was loaded", "oom_load"),
    (r"Host memory ran out", "host_memory"),
    (r"Pinned memory ran out", "pinned_memory"),
    (r"Device memory ran out in step 1 ", "oom_first_step"),
    (r"Device memory ran out in evaluation", "oom_evaluation"),
    (r"Device memory ran out in step", "oom_step"),
    (r"thriftiest (exact )?plan .*peaks at|No plan fits|is above what|holds not even", "no_plan_fits"),
    (r"No space left|disk is full|checkpoints? (was|were) not saved|adapter was not saved|are free there", "disk_full"),
    (r"The model's own .* holds NaN", "base_damaged"),
    (r"had no finite loss and gradient.*float16", "float16"),
    (r"had no finite loss and gradient", "not_finite"),
    (r"lora\.targets", "targets_unmatched"),
    (r"adapters got no gradient", "idle_adapters"),
    (r"nothing to learn|no token.* learnt|nothing is learnt|Nothing .*learn", "nothing_learnt"),
    (r"OutOfMemoryError|CUDA out of memory", "other_oom"),
    (r"'grad_norm': '?nan|'loss': '?(nan|0\.0)\b", "other_not_finite"),
    (r"does not require grad|None of the inputs have requires_grad", "other_no_gradient"),
    (r"unscale FP16 gradients", "other_unscale"),
    (r"[Cc]ould not find response key", "other_answer_not_found"),
    (r"Target modules .* not found in the base model", "other_targets"),
    (r"sequence length is longer than", "other_too_long"),
    (r"device-side assert triggered", "other_device_assert"),
    (r"NCCL watchdog|watchdog thread.*timeout", "other_ranks"),
    (r"DefaultCPUAllocator|Cannot allocate memory", "host_memory"),
)
"""What errors say, and what that means; the first that fits counts."""

BEFORE_STEPS, MANY_STEPS = 4, 12
"""Fewer say nothing about where a loss goes."""

LONG_SECONDS = 1.0
"""Of a step below that, what the forecast knows nothing of takes the most."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, and the evidence with its numbers."""

    kind: str
    evidence: str

    @property
    def remedy(self) -> Remedy:
        """What it is and what helps."""
        return REMEDIES[self.kind]

    def lines(self) -> list[str]:
        """The finding as lines of text."""
        remedy = self.remedy
        return [
            f"{remedy.symptom}.",
            f"  evidence  {self.evidence}",
            f"  cause     {remedy.cause}",
            f"  change    {remedy.option}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        remedy = self.remedy
        told = {"kind": self.kind, "symptom": remedy.symptom, "evidence": self.evidence}
        return told | {"cause": remedy.cause, "option": remedy.option}


def diagnose(history: History, lines: Iterable[str] = ()) -> list[Finding]:
    """All that is found in a run's history, and in the lines of another tool's log; each kind once."""
    found: dict[str, Finding] = {}
    for rule in RULES:
        for finding in rule(history):
            found.setdefault(finding.kind, finding)
    for line in lines:
        if (kind := _meaning(line)) is not None:
            found.setdefault(kind, Finding(kind, line.strip()[:300]))
    return list(found.values())


def _meaning(text: str) -> str | None:
    return next((kind for pattern, kind in MESSAGES if re.search(pattern, text, re.DOTALL)), None)


def _failure(history: History) -> Iterator[Finding]:
    """What the last session ended with."""
    end = history.sessions[-1].end if history.sessions else None
    if end is None or not end.error or end.outcome != "failed":
        return
    kind = _meaning(end.error)
    step = re.search(r"ran out in step (\d+)", end.error)
    if kind in ("oom_step", "oom_first_step") and step and int(step[1]) in history.steps:
        number = int(step[1])
        is_measured = number in history.evaluations or not history.evaluations
        kind = "oom_save" if is_measured else "oom_evaluation"
    if kind is not None:
        yield Finding(kind, end.error[:400])


def _no_end(history: History) -> Iterator[Finding]:
    if history.sessions and history.sessions[-1].end is None and history.start is not None:
        step = max(history.steps, default=0)
        torn = ", and its last line is torn" if history.torn_at_end else ""
        yield Finding("killed", f"the record stops after step {step:,} without an end{torn}; or the run goes on still")


def _plan_changes(history: History) -> Iterator[Finding]:
    ran_out = [change for change in history.plan_changes if "ran out" in change.reason]
    if len(ran_out) >= 3:
        steps = ", ".join(f"{change.step:,}" for change in ran_out[:8])
        yield Finding(
            "tight_budget",
            f"memory ran out {len(ran_out)} times, in steps {steps} of {format_bytes(history.budget_bytes)}",
        )


def _not_finite(history: History) -> Iterator[Finding]:
    skipped = [text for text in history.notices if " was skipped: " in text and "The loss scale goes from" not in text]
    strange = history.strange_losses
    if not skipped and not strange:
        return
    is_half = history.model is not None and history.model.dtype == "float16"
    evidence = skipped[0] if skipped else f"the loss of step {strange[0]:,} is no number"
    yield Finding(
        "float16" if is_half else "not_finite", f"{len(skipped) or len(strange):,} steps; the first: {evidence}"
    )


def _spikes(history: History) -> Iterator[Finding]:
    steps = _finite(history)
    for place in range(BEFORE_STEPS, len(steps)):
        usual = median(step.loss for step in steps[max(0, place - 10) : place])
        if steps[place].loss > max(2.0 * usual, usual + 2.0):
            yield Finding(
                "loss_spikes",
                f"step {steps[place].step:,} has loss {steps[place].loss:.3f}, those before it {usual:.3f}",
            )
            return


def _learning(history: History) -> Iterator[Finding]:
    """Not falling, worse, over-fitting: at most one of them."""
    steps, heldout = _finite(history), list(history.evaluations.values())
    if len(steps) < MANY_STEPS:
        return
    first, last = _quarters(steps, lambda step: step.loss)
    change = last / first - 1 if first else 0.0
    losses = [event.loss for event in heldout if math.isfinite(event.loss)]
    told = f"training loss {first:.4f} at first, {last:.4f} at last"
    if len(losses) > 1:
        told += f"; held out {losses[0]:.4f} to {losses[-1]:.4f}, lowest {min(losses):.4f}"
    rate = max(step.learning_rate for step in steps)
    has_improved = len(losses) > 2 and min(losses) < 0.99 * losses[0]
    if has_improved and change < -0.05 and losses[-1] > 1.05 * min(losses):
        yield Finding("over_fitting", f"{told} after step {min(heldout, key=lambda event: event.loss).step:,}")
    elif len(losses) > 1 and losses[-1] > 1.02 * losses[0]:
        yield Finding("worse_after", f"{told}; highest rate {rate:.3g}")
    elif abs(change) < 0.01 and (len(losses) < 2 or abs(losses[-1] / losses[0] - 1) < 0.005):
        yield Finding("rate_too_low" if rate < 2e-5 else "not_falling", f"{told}; highest rate {rate:.3g}")


def _account(history: History) -> Iterator[Finding]:
    account = history.data.account if history.data else {}
    total = int(account.get("tokens_in") or 0)
    if total < 100:
        return
    learnt, dropped = int(account.get("learnt_tokens") or 0), dict(account.get("dropped_tokens") or {})
    if learnt / total < 0.01:
        yield Finding("nothing_learnt", f"{learnt:,} of {total:,} tokens are learnt ({100 * learnt / total:.2g} %)")
    if sum(dropped.values()) > total / 3:
        reasons = "; ".join(f"{reason}: {number:,}" for reason, number in dropped.items())
        yield Finding("data_dropped", f"{sum(dropped.values()):,} of {total:,} tokens are dropped: {reasons}")
    broken, documents = int(account.get("num_broken") or 0), int(account.get("num_documents") or 0)
    if broken > (broken + documents) / 10:
        place = next((f"; the first: {': '.join(map(str, one))}" for one in account.get("broken") or ()), "")
        yield Finding("data_broken", f"{broken:,} of {broken + documents:,} records are skipped{place}")
    if (opened := int(account.get("num_open") or 0)) > 0:
        yield Finding(
            "end_never_learnt", f"{opened:,} of {documents:,} documents end an answer without an end-of-turn token"
        )


def _plan(history: History) -> Iterator[Finding]:
    steps = list(history.steps.values())
    if history.plan is None or len(steps) < 3:
        return
    plan = history.plan_changes[-1].plan if history.plan_changes else history.plan.plan
    layers, budget, peak = plan.get("layers"), history.budget_bytes, max(step.peak_bytes for step in steps[1:])
    if layers == "stream" and plan.get("tile_tokens", 512) <= 32:
        yield Finding(
            "tiny_tiles", f"tiles of {plan['tile_tokens']} tokens; peak {format_bytes(peak)} of {format_bytes(budget)}"
        )
    elif layers in ("stream", "recompute") and budget and peak < 0.5 * budget and not history.plan_changes:
        yield Finding("memory_free", f"{history.plan.description}: peak {format_bytes(peak)} of {format_bytes(budget)}")
    pace, foreseen = history.tokens_per_second, history.plan.tokens_per_second
    is_long = median(step.seconds for step in steps) >= LONG_SECONDS
    if pace and foreseen and pace < 0.25 * foreseen and is_long:
        moves = [name for name in ("weights", "inputs") if plan.get(name, "device") != "device"]
        rest = f"; {' and '.join(moves)} off the device" if moves else ""
        kind = "bound_by_moving" if moves else "below_forecast"
        yield Finding(kind, f"{pace:,.0f} tokens/s of {foreseen:,.0f} that were forecast{rest}")


def _time(history: History) -> Iterator[Finding]:
    steps = list(history.steps.values())
    if len(steps) < MANY_STEPS:
        return
    first, last = _quarters(steps[1:], lambda step: step.seconds / max(1, step.num_tokens))
    if last > 2.5 * first:
        yield Finding("slowing_down", f"{1e3 * first:.3g} s for 1,000 tokens at first, {1e3 * last:.3g} s at last")
    within = history.step_seconds
    saving = sum(event.seconds for event in history.checkpoints.values())
    measuring = sum(event.seconds for event in history.evaluations.values())
    if len(history.checkpoints) > 3 and saving > within / 3:
        yield Finding(
            "saves_too_often",
            f"{len(history.checkpoints)} checkpoints: {format_seconds(saving)}, steps: {format_seconds(within)}",
        )
    if len(history.evaluations) > 3 and 0 < within < measuring / 2:
        yield Finding(
            "measures_too_often",
            f"{len(history.evaluations)} evaluations: {format_seconds(measuring)}, steps: {format_seconds(within)}",
        )


def _finite(history: History) -> list[StepDone]:
    return [step for step in history.steps.values() if math.isfinite(step.loss)]


def _quarters(steps: Sequence[StepDone], value: Callable[[StepDone], float]) -> tuple[float, float]:
    """Medians of the first and of the last quarter."""
    size = max(1, len(steps) // 4)
    return median(map(value, steps[:size])), median(map(value, steps[-size:]))


RULES = (_failure, _no_end, _plan_changes, _not_finite, _spikes, _learning, _account, _plan, _time)
