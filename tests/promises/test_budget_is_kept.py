"""The promise: a budget is kept, whatever the longest sample needs, and the losses are those of a run without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowboat.errors import BudgetError
from narrowboat.machine.rates import Margin
from narrowboat.planner.forecast import Forecaster, Workload
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
    search = Search(Forecaster(Workload(free.config, free.options, torch.float32)), Target(None, Margin()))
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
    search = Search(Forecaster(Workload(free.config, free.options, torch.float32)), Target(None, Margin()))
    with pytest.raises(
        BudgetError, match=r"thriftiest exact plan .* peaks at .*memory.budget is 10.0 KiB. Largest parts"
    ):
        search.choose(max(LONG), Limits(10 * 1024))


class Spike(TorchDispatchMode):
    """Something else takes ``num_bytes`` for a moment, once, in the first of a step's micro-batches."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_bytes, self._wait = num_bytes, 600

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._wait -= 1
        if self._wait == 0:
            torch.empty(self._num_bytes, dtype=torch.uint8)
        return func(*args, **(kwargs or {}))


def test_one_spike_is_one_step_down(tmp_path: Path) -> None:
    """Not one for each of the micro-batches that follow in the step."""
    size: dict[str, Any] = {"lengths": (40,) * 6, "batch_tokens": 240, "num_steps": 2}
    rungs = tuple(rung.model_copy(update={"micro_batch_tokens": 40}) for rung in RUNGS)
    calm = Run(tmp_path / "calm", **size, rungs=rungs)
    calm.go()
    assert calm.gauge is not None
    assert [step.num_micro_batches for step in calm.steps] == [6, 6]
    budget = 3 * calm.gauge.highest_bytes
    run = Run(tmp_path / "spike", **size, rungs=rungs, budget_bytes=budget)
    run.modes = [Spike(int(0.9 * budget))]
    run.go()
    assert [(change.step, change.new) for change in run.changes] == [(1, "recompute layers, up to 40 tokens together")]
    assert run.losses == pytest.approx(calm.losses, rel=1e-5)


def test_evaluation_holds_no_more_than_training(tmp_path: Path) -> None:
    """Where the vocabulary is what takes the room, and rows are as long."""
    size: dict[str, Any] = {"lengths": (200,) * 4, "batch_tokens": 200, "num_steps": 2, "evaluate_every": 1}
    for rung in RUNGS:
        run = Run(tmp_path / rung.layers, **size, rungs=(rung,), vocab_size=5000)
        run.go()
        assert run.gauge is not None
        assert run.gauge.by_phase["evaluation"] <= run.gauge.by_phase["step"], rung
