from __future__ import annotations

import pytest

from narrowboat.optimizers.schedule import learning_rate
from narrowboat.options.schema import OptimizerOptions


def rates(num_steps: int, **options: object) -> list[float]:
    chosen = OptimizerOptions.model_validate({"lr": 1.0, **options})
    return [learning_rate(chosen, step, num_steps) for step in range(1, num_steps + 1)]


def test_it_rises_to_the_highest_rate_and_falls() -> None:
    found = rates(100, warmup_steps=10)
    assert found[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert found[10] == 1.0
    assert found[10:] == sorted(found[10:], reverse=True)
    assert 0 < found[-1] < 0.001


def test_the_shapes() -> None:
    assert rates(4, warmup_steps=0, schedule="constant") == [1.0] * 4
    assert rates(4, warmup_steps=0, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, warmup_steps=0, schedule="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-5)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_a_run_shorter_than_its_warm_up_learns_all_the_same(num_steps: int) -> None:
    found = rates(num_steps, warmup_steps=50)
    assert min(found) > 0
    assert max(found) == 1.0
