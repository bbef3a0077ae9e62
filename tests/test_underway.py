"""Where a step is: told by real steps under every kind of plan, forwards and backwards, and never backwards in time."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from narrowboat.underway import Underway
from tests.training.runs import RUNGS, Run


@pytest.mark.parametrize("rung", [0, 1, 2])
def test_a_step_says_where_it_is(rung: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, bool, float, str, float]] = []
    at = Underway.at

    def look(self: Underway, *place: int) -> None:
        at(self, *place)
        if self.work:
            seen.append((self.work, self.layer, self.is_backwards, self.share, self.words(), self.began))

    monkeypatch.setattr(Underway, "at", look)
    Run(tmp_path, num_steps=2, lengths=(48, 40), rungs=RUNGS[rung : rung + 1], batch_tokens=88).go()
    second = max(place[5] for place in seen if place[0] == "step")
    step = [place for place in seen if place[5] == second]  # the first one also tries its layers with a few tokens
    assert {place[1:3] for place in step} == set(itertools.product((0, 1), (False, True)))
    shares = [place[3] for place in step]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(shares)), "the bar never goes back"
    assert 0 <= shares[0] < 0.1 and 0.6 < shares[-1] <= 1
    assert any(place[0] == "evaluation" for place in seen)
    if rung == 2:
        assert "micro-batch 1 of 1, layer 2 of 2 backwards, tile 3 of 3" in {place[4] for place in step}


def test_time_left_follows_from_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    underway = Underway(num_layers=10)
    underway.begin("step", 2)
    assert underway.seconds_left is None
    now += 10
    underway.turn()
    underway.at(4, 0, 8, 8)  # half of the way back of the first of two
    assert underway.share == pytest.approx((0.25 + 0.75 * 0.5) / 2)
    assert underway.seconds_left == pytest.approx(10 * (1 - underway.share) / underway.share)
    assert underway.words() == "micro-batch 1 of 2, layer 5 of 10 backwards"
