"""What a search says of the plan that it found: its forecast is that of the rows that go together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from narrowboat.machine.rates import Margin
from narrowboat.planner.forecast import Forecaster, Workload
from narrowboat.planner.search import Search
from narrowboat.planner.target import Limits, Target
from tests.training.runs import RUNGS, Run

SHORT = (60,) * 12


def test_rows_that_go_together_are_in_the_forecast(tmp_path: Path) -> None:
    run = Run(tmp_path / "one", lengths=SHORT, batch_tokens=512, num_steps=3, rungs=RUNGS[:1])
    search = Search(Forecaster(Workload(run.config, run.options, torch.float32)), Target(None, Margin()))
    alone = search.forecast(RUNGS[0], max(SHORT))
    found = search.group_rows(alone, SHORT, 512, Limits(2**40))
    assert found.plan.micro_batch_tokens == 480
    run = Run(tmp_path / "together", lengths=SHORT, batch_tokens=512, num_steps=3, rungs=(found.plan,))
    run.go()
    assert run.gauge is not None
    assert found.device_bytes == pytest.approx(run.gauge.highest_bytes, rel=0.02)
    assert found.device_bytes > 1.5 * alone.device_bytes


def test_no_more_rows_go_together_than_fit(tmp_path: Path) -> None:
    run = Run(tmp_path, lengths=SHORT, batch_tokens=512, num_steps=1)
    search = Search(Forecaster(Workload(run.config, run.options, torch.float32)), Target(None, Margin()))
    alone, four = search.forecast(RUNGS[0], 60), search.forecast(RUNGS[0], 60, num_rows=4)
    found = search.group_rows(alone, SHORT, 512, Limits(four.device_bytes))
    assert found.plan.micro_batch_tokens == 240
    assert found.device_bytes == four.device_bytes
    assert search.group_rows(alone, SHORT, 512, Limits(alone.device_bytes)).device_bytes == alone.device_bytes
