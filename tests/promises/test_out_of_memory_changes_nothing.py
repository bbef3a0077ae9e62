"""The promise: running out of memory costs time and nothing else; no sample is lost or seen twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from narrowboat.errors import OutOfMemory
from narrowboat.events import CheckpointSaved, Evaluated, Notice
from narrowboat.machine.precision import parts_of
from narrowboat.owner.owner import Owner
from narrowboat.plan import MemoryPlan
from narrowboat.training.checkpoint import newest_checkpoint
from tests.training.runs import RUNGS, Run

ONE = (MemoryPlan(layers="keep"),)  # a row by itself: nothing to step down to


class RunsOut(TorchDispatchMode):
    """Raises ``error`` for ``num_errors`` operators, every time at random within ``gap`` of the one before."""

    def __init__(self, gap: tuple[int, int], num_errors: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self._random, self._gap, self._left, self._error = random.Random(0), gap, num_errors, error
        self._wait = self._random.randint(*gap)
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._wait -= 1
        if self._wait < 0 and len(self.names) < self._left:
            self._wait = self._random.randint(*self._gap)
            self.names.append(func.name())
            raise self._error("injected: no memory for this operator.")
        return func(*args, **(kwargs or {}))


def test_200_errors_at_random_places_lose_nothing(tmp_path: Path) -> None:
    small: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "lengths": (12, 20, 9, 16), "batch_tokens": 20}
    small |= {"num_steps": 320, "save_every": 80, "evaluate_every": 80, "rungs": RUNGS[:2], "targets": ("q_proj",)}
    truth, tried = Run(tmp_path / "truth", **small), Run(tmp_path / "tried", **small)
    runs_out = RunsOut((300, 1000), 200)
    tried.modes = [runs_out]
    truth.go()
    done = tried.go()
    assert len(runs_out.names) == 200
    assert len(set(runs_out.names)) > 25  # in forwards, backwards, clipping, updating and saving
    assert [step.step for step in tried.steps] == list(range(1, 321))
    assert [step.num_tokens for step in tried.steps] == [step.num_tokens for step in truth.steps]
    assert tried.losses == pytest.approx(truth.losses, rel=1e-5)
    assert done.num_tokens == sum(step.num_tokens for step in truth.steps)
    assert sum(isinstance(event, CheckpointSaved) for event in tried.events) == 4
    evaluated = [[e.loss for e in r.events if isinstance(e, Evaluated)] for r in (tried, truth)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free", "adalomo", "adamw8bit", "adamw4bit", "adamw_fp8"])
def test_an_update_that_fails_half_way_is_taken_back(optimizer: str, tmp_path: Path) -> None:
    """To the bit, for the plan is the same. Adapters are large enough that quantised states are quantised."""
    is_quantised = optimizer in ("adamw8bit", "adamw4bit", "adamw_fp8")
    size: dict[str, Any] = {"rungs": ONE, "num_steps": 3, "optimizer": optimizer}
    if is_quantised:
        size |= {"hidden_size": 64, "rank": 64, "targets": ("q_proj",), "num_layers": 1, "lengths": (12, 20)}

    class Once(TorchDispatchMode):
        """Fails at the ``place``-th operator counted from the first in-place change of a weight."""

        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.place -= 1
            if self.place == 0:
                raise torch.OutOfMemoryError("injected: no memory for this operator.")
            return func(*args, **(kwargs or {}))

    counter = Once(-1)
    truth = Run(tmp_path / "truth", **size, modes=[counter])
    truth.go()
    if is_quantised:
        assert truth.optimizer_states
        assert all(is_traceable_wrapper_subclass(state["exp_avg"]) for state in truth.optimizer_states)
    num_operators = -1 - counter.place
    for place in random.Random(1).sample(range(num_operators // 4, num_operators), 4):
        tried = Run(tmp_path / f"{place}", **size, modes=[Once(place)])
        tried.go()
        assert tried.losses == truth.losses, place
        for mine, own in zip(tried.optimizer_states, truth.optimizer_states, strict=True):
            for part, its in zip(parts_of(mine["exp_avg"]), parts_of(own["exp_avg"]), strict=True):
                assert torch.equal(part, its), place


def test_every_retry_is_one_event_and_a_change_of_plan_names_both(tmp_path: Path) -> None:
    tried = Run(tmp_path, modes=[RunsOut((1000, 2000), 5)])
    tried.go()
    changes = [change for change in tried.changes if change.reason == "device memory ran out"]
    again = [e.text for e in tried.events if isinstance(e, Notice) and "device memory ran out" in e.text]
    assert len(changes) + len(again) == 5
    assert changes
    assert again
    assert all(change.old != change.new and change.plan for change in tried.changes)
    assert all(text.endswith("under the thriftiest plan, though there is room; it is tried again.") for text in again)


def test_memory_that_runs_out_while_a_plan_is_put_in_force_is_one_rung_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that move may not find room either."""
    tried = Run(tmp_path, modes=[RunsOut((1000, 1000), 1)])
    arrange, calls = Owner.arrange, []

    def fails_once(owner: Owner, plan: MemoryPlan) -> None:
        calls.append(plan)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("injected: no memory for weights.")
        arrange(owner, plan)

    monkeypatch.setattr(Owner, "arrange", fails_once)
    tried.go()
    assert [change.step for change in tried.changes[:2]] == [1, 1]
    assert len(tried.steps) == 5


def test_on_the_last_rung_it_says_what_would_help(tmp_path: Path) -> None:
    tried = Run(tmp_path, budget_bytes=60_000)
    words = r"ran out in step \d+ under the thriftiest plan .*The longest row has [\d,]+ tokens.*Largest parts"
    with pytest.raises(OutOfMemory, match=words) as caught:
        tried.go()
    assert "would help" in str(caught.value)
    assert len(tried.changes) <= 2 * len(RUNGS)


def test_tries_are_bounded_where_nothing_helps(tmp_path: Path) -> None:
    runs_out = RunsOut((0, 0), 10**6)
    with pytest.raises(OutOfMemory):
        Run(tmp_path, modes=[runs_out]).go()
    assert len(runs_out.names) < 20


def test_other_errors_are_no_memory_errors(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="injected"):
        Run(tmp_path, modes=[RunsOut((500, 1000), 1, RuntimeError)]).go()


def test_r15_a_shrunken_micro_batch_is_resumed_and_no_sample_repeated(tmp_path: Path) -> None:
    """Step batches stay what they were; the number of steps does too; the learnt size comes back."""
    many: dict[str, Any] = {"lengths": (16,) * 24, "num_steps": 6, "save_every": 3, "rungs": RUNGS[:1]}
    free = Run(tmp_path / "free", **many)
    free.go()
    assert free.gauge is not None
    budget = int(0.75 * free.gauge.highest_bytes)
    whole = Run(tmp_path / "whole", **many, budget_bytes=budget)
    whole.go()
    assert [s.num_micro_batches for s in free.steps] == [1] * 6
    assert whole.steps[-1].num_micro_batches > 1
    assert [s.num_tokens for s in whole.steps] == [s.num_tokens for s in free.steps]
    assert whole.losses == pytest.approx(free.losses, rel=1e-5)

    checkpoints = tmp_path / "whole" / "checkpoints"
    (checkpoints / "step-000006").rename(tmp_path / "later")
    found = newest_checkpoint(checkpoints, lambda event: None)
    assert found is not None
    position = found[1]
    assert (position.step, position.num_steps) == (3, 6)
    again = Run(tmp_path / "again", **many, budget_bytes=budget, begin_with=position.plan)
    again.go(position)
    assert [s.step for s in again.steps] == [4, 5, 6]
    assert again.steps[0].num_micro_batches == whole.steps[3].num_micro_batches > 1
    assert not [change for change in again.changes if change.reason == "device memory ran out"]
