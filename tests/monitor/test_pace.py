from __future__ import annotations

import math

import pytest
from tests.monitor.runs import step_done

from narrowboat.monitor.pace import Pace, SmoothedLoss


def test_the_smoothed_loss_is_right_from_the_first_step() -> None:
    smoothed = SmoothedLoss(memory_steps=10)
    assert smoothed.take(4.0) == pytest.approx(4.0)
    assert smoothed.take(2.0) == pytest.approx((0.9 * 4.0 + 2.0) / 1.9)
    assert smoothed.take(math.nan) == pytest.approx((0.9 * 4.0 + 2.0) / 1.9)
    assert math.isnan(SmoothedLoss().take(math.inf))


def test_the_display_does_not_smooth_away_a_broken_loss() -> None:
    pace = Pace()
    pace.take(step_done(1, loss=2.0))
    pace.take(step_done(2, loss=math.nan))
    assert math.isnan(pace.loss)
    pace.take(step_done(3, loss=2.0))
    assert pace.loss == pytest.approx(2.0)


def test_time_left_comes_from_the_last_steps() -> None:
    pace = Pace()
    for step in range(1, 41):
        pace.take(step_done(step, num_steps=100, seconds=100.0 if step <= 20 else 10.0))
    assert pace.seconds_left() == pytest.approx(600.0, abs=1.0)
    assert pace.seconds_left(of_this_step=3.0) == pytest.approx(593.0)
    assert pace.tokens_per_second == pytest.approx(204.8)
    assert pace.overall_tokens_per_second == pytest.approx(2048 * 40 / 2200)
    pace.take(step_done(100, num_steps=100))
    assert pace.seconds_left() == 0.0
