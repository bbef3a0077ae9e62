"""Every optimizer under the engine: what the forecast says of its states is what they take."""

from __future__ import annotations

import pytest
import torch
from tests.engine.test_engine import rows
from tests.memory.families import tiny
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowboat.engine.engine import Engine
from narrowboat.model.adapters import adapt
from narrowboat.model.empty import empty_base, give_fake_tensors
from narrowboat.optimizers.build import build_optimizer
from narrowboat.optimizers.table import KINDS
from narrowboat.options.schema import LoraOptions, OptimizerOptions
from narrowboat.owner.causes import GRADIENTS, OPTIMIZER_STATES
from narrowboat.owner.meter import Meter, Reading
from narrowboat.plan import MemoryPlan

PLAN = MemoryPlan(layers="keep")


def after_two_steps(model, options: OptimizerOptions) -> tuple[Reading, Reading]:
    """What is alive after the second step, and the peak of it."""
    with Meter() as meter:
        meter.watch_model(model)
        optimizer = build_optimizer(options, model.named_parameters())
        with Engine(model, optimizer, PLAN, pad_id=0) as engine:
            for seed in range(2):
                meter.reset_peak()
                engine.step(rows(40), 1e-3, seed)
        return meter.live, meter.peak


@pytest.mark.parametrize("name", KINDS)
def test_the_forecast_knows_the_states_of_every_optimizer(name: str):
    options, lora = OptimizerOptions(name=name), LoraOptions(rank=32)
    base = tiny("llama", hidden_size=128, num_hidden_layers=1)
    live, peak = after_two_steps(adapt(base, lora, lambda _: None).model, options)
    fake_model = adapt(empty_base(base.config, torch.float32), lora, lambda _: None).model
    with FakeTensorMode():
        give_fake_tensors(fake_model)
        forecast_live, forecast_peak = after_two_steps(fake_model, options)
    measured = live.by_cause[OPTIMIZER_STATES]
    assert forecast_live.by_cause[OPTIMIZER_STATES] == pytest.approx(measured, rel=0.001, abs=2100)  # and two tables
    assert forecast_peak.device_bytes == pytest.approx(peak.device_bytes, rel=0.02)


def test_adalomo_keeps_no_gradients():
    model = adapt(tiny("llama", hidden_size=128, num_hidden_layers=1), LoraOptions(rank=32), lambda _: None).model
    size = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    (live, peak), (live_during, peak_during) = (
        after_two_steps(model, OptimizerOptions(name=name)) for name in ("adafactor", "adalomo")
    )
    assert live.by_cause[GRADIENTS] >= size
    assert live_during.by_cause.get(GRADIENTS, 0) < 0.1 * size
    assert peak_during.device_bytes <= peak.device_bytes - 0.5 * size
