"""The governor's rules as tables: readings in, plans out."""

from __future__ import annotations

import pytest

from narrowboat.plan import MemoryPlan
from narrowboat.training.governor import LOW, PATIENCE_STEPS, Governor, Memory

KEEP = MemoryPlan(layers="keep", micro_batch_tokens=400)
RECOMPUTE = MemoryPlan(layers="recompute")
HOST = MemoryPlan(layers="stream", inputs="host")
DISK = MemoryPlan(layers="stream", inputs="disk")
RUNGS = (KEEP, RECOMPUTE, HOST, DISK)
BUDGET = 1000


def governor(**more: float) -> Governor:
    return Governor(RUNGS, BUDGET, **more)  # type: ignore[arg-type]


def state(of: Governor) -> tuple[str, str, int]:
    return of.plan.layers, of.plan.inputs, of.plan.micro_batch_tokens


@pytest.mark.parametrize(
    ("high", "foreseen", "peak", "row", "changed", "layers", "tokens"),
    [
        (0.9, 0, 900, 100, False, "keep", 400),  # at the threshold is not above it
        (0.9, 0, 901, 100, True, "keep", 200),  # rows go together: fewer of them
        (0.9, 0, 901, 300, True, "recompute", 400),  # a single row: the next rung
        (0.9, 950, 940, 300, False, "keep", 400),  # no surprise
        (0.9, 950, 951, 300, True, "recompute", 400),
        (0.9, 5000, 1001, 300, True, "recompute", 400),  # nothing above the budget is right because it was foreseen
        (0.5, 0, 501, 300, True, "recompute", 400),
        (1.0, 0, 1000, 300, False, "keep", 400),
    ],
)
def test_above_the_threshold_it_steps_down(
    high: float, foreseen: int, peak: int, row: int, changed: bool, layers: str, tokens: int
) -> None:
    g = governor(high=high, foreseen_bytes=foreseen)
    assert g.after_micro_batch(peak, row) is changed
    assert state(g) == (layers, "device", tokens)


def test_a_micro_batch_is_never_halved_below_its_longest_row() -> None:
    g = governor()
    assert [g.after_micro_batch(999, 150) and g.plan.micro_batch_tokens for _ in range(2)] == [200, 200]
    assert g.plan.layers == "recompute"


@pytest.mark.parametrize("memory", ["pinned", "host"])
def test_where_host_memory_runs_out_the_next_plan_needs_none(memory: Memory) -> None:
    g = Governor((HOST, HOST.model_copy(update={"tile_tokens": 64}), DISK), BUDGET)
    assert g.after_failure(memory, 400)
    assert state(g)[:2] == ("stream", "disk")


def test_below_the_last_rung_there_is_nothing() -> None:
    g = governor()
    assert [g.after_failure("device", 400) for _ in range(4)] == [True, True, True, False]
    assert not g.after_failure("host", 400)
    assert g.is_last


LOW_PEAK, MIDDLE_PEAK = int(LOW * 900) - 1, 800


@pytest.mark.parametrize(
    ("peaks", "ups"),
    [
        ([LOW_PEAK] * PATIENCE_STEPS, 1),
        ([LOW_PEAK] * (PATIENCE_STEPS - 1), 0),
        ([LOW_PEAK, MIDDLE_PEAK] * PATIENCE_STEPS, 0),  # they have to come in a row
        ([LOW_PEAK] * 2 * PATIENCE_STEPS, 2),
        ([LOW_PEAK] * 9 * PATIENCE_STEPS, 2),  # never beyond where the run began
    ],
)
def test_well_below_the_threshold_it_steps_up_again(peaks: list[int], ups: int) -> None:
    g = governor()
    for _ in range(2):
        g.after_failure("device", 400)
    assert [g.after_step(peak) for peak in peaks].count(True) == ups
    assert RUNGS.index(g.plan.model_copy(update={"micro_batch_tokens": RUNGS[2 - ups].micro_batch_tokens})) == 2 - ups


def test_halved_micro_batches_are_doubled_again() -> None:
    g = governor()
    g.after_failure("device", 100)
    g.after_failure("device", 100)
    assert g.plan.micro_batch_tokens == 100
    ups = [g.after_step(0) and g.plan.micro_batch_tokens for _ in range(9)]
    assert [tokens for tokens in ups if tokens] == [200, 400]


def test_r15_it_begins_with_the_plan_that_was_learnt() -> None:
    g, again = governor(), governor()
    g.after_failure("device", 100)
    again.begin_with(g.plan)
    assert again.plan == g.plan
    g.after_failure("device", 400)
    again.begin_with(g.plan)
    assert again.plan == g.plan
    assert [again.after_step(0) for _ in range(PATIENCE_STEPS)][-1]
    assert again.plan.layers == "keep"
