"""Gradients that are gathered, and gradients that are used in backward: what a step that failed leaves behind."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from tests.engine.test_engine import rows
from tests.memory.families import adapted

from narrowboat.engine.engine import Engine
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import OptimizerOptions
from narrowboat.plan import MemoryPlan

PLAN = MemoryPlan(layers="keep", micro_batch_tokens=32)


def engine_with(name: str) -> Engine:
    model = adapted("llama")
    return Engine(model, build_optimizer(OptimizerOptions(name=name), model.named_parameters()), PLAN, pad_id=0)


def weights(engine: Engine) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in engine.model.parameters() if p.requires_grad])


def fail() -> NoReturn:
    raise RuntimeError("the power went")


@pytest.mark.parametrize("name", ["adamw", "adalomo"])
@pytest.mark.parametrize("lengths", [(20,), (30, 30)], ids=["one micro-batch", "two"])
def test_after_a_step_that_failed_the_next_one_is_what_it_would_have_been(name: str, lengths: tuple[int, ...]) -> None:
    twice, once = engine_with(name), engine_with(name)
    before = weights(twice)
    with twice, pytest.raises(RuntimeError, match="the power went"):
        twice.step(rows(*lengths, seed=1), 1e-2, seed=1, after_micro_batch=fail)
    assert torch.equal(weights(twice), before)
    assert all(p.grad is None for p in twice.model.parameters())
    with twice, once:
        found, truth = (engine.step(rows(*lengths), 1e-2, seed=0) for engine in (twice, once))
    assert torch.equal(found.gradient_norm, truth.gradient_norm)
    assert torch.equal(weights(twice), weights(once))
    assert not torch.equal(weights(once), before)


@pytest.mark.parametrize("name", ["adamw", "adalomo"])
def test_a_loss_that_is_no_number_goes_no_further(name: str) -> None:
    engine = engine_with(name)
    with torch.no_grad():
        next(engine.model.parameters())[5:] = torch.nan
    before = weights(engine)
    with engine:
        outcome = engine.step(rows(20), 1e-2, seed=0)
    assert outcome.was_skipped
    assert torch.equal(weights(engine), before)
