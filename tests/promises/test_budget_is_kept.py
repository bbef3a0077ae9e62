"""The promise: a budget is kept, whatever the longest sample needs, and the losses are those of a run without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from narrowboat.errors import BudgetError
from narrowboat.machine.profile import Margin
from narrowboat.planner.forecast import Workload
from narrowboat.planner.search import Search
from narrowboat.planner.target import Limits, Target
from tests.training.runs import RUNGS, Run

LONG = (400, 90, 60, 120, 33, 250)


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run without a budget: all activations are kept."""
    run = Run(tmp_path_factory.mktemp("free"), lengths=LONG, batch_tokens=512, num_steps=4, rungs=RUNGS[:1])
    run.go()
    return run


@pytest.mark.parametrize("share", [0.9, 0.6, 0.45])
def test_a_run_whose_plan_was_too_hopeful_stays_within_its_budget(free: Run, share: float, tmp_path: Path) -> None:
    assert free.gauge is not None
    budget = int(share * free.gauge.highest_bytes)
    run = Run(tmp_path, lengths=LONG, batch_tokens=512, num_steps=4, budget_bytes=budget)
    run.go()
    assert run.gauge is not None
    assert run.gauge.highest_bytes <= budget
    assert all(step.peak_bytes <= budget for step in run.steps)
    assert run.losses == pytest.approx(free.losses, rel=1e-5)
    assert run.changes


@pytest.mark.parametrize("share", [1.0, 0.6, 0.4])
def test_a_run_whose_plan_was_chosen_for_its_budget_never_changes_it(free: Run, share: float, tmp_path: Path) -> None:
    assert free.gauge is not None
    budget = int(share * free.gauge.highest_bytes)
    search = Search(Workload(free.config, free.options, torch.float32), Target(False, Margin()))
    chosen = search.choose(max(LONG), Limits(budget))
    rungs = search.from_here_down(chosen.plan)
    run = Run(
        tmp_path, lengths=LONG, batch_tokens=512, num_steps=4, rungs=rungs, budget_bytes=budget,
        foreseen_bytes=chosen.device_bytes,
    )  # fmt: skip
    run.go()
    assert run.gauge is not None
    assert run.gauge.highest_bytes <= chosen.device_bytes <= budget
    assert run.losses == pytest.approx(free.losses, rel=1e-5)
    assert not run.changes


def test_a_budget_below_the_weights_is_refused_before_anything_runs(free: Run) -> None:
    search = Search(Workload(free.config, free.options, torch.float32), Target(False, Margin()))
    with pytest.raises(
        BudgetError, match=r"thriftiest exact plan .* peaks at .*memory.budget is 10.0 KiB. Largest parts"
    ):
        search.choose(max(LONG), Limits(10 * 1024))
