"""Loss scaling: no gradient is changed by it, and float16 learns as float32 does, also where gradients are tiny."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine.test_engine import rows
from tests.memory.families import tiny

from narrowboat.data.examples import IGNORED, Row
from narrowboat.engine.engine import Engine
from narrowboat.engine.scaling import LossScale, loss_scale
from narrowboat.errors import OptionError
from narrowboat.model.adapters import adapt
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import LoraOptions, OptimizerOptions
from narrowboat.plan import MemoryPlan


def test_a_scale_is_for_float16_alone_and_can_be_switched_off():
    assert loss_scale(OptimizerOptions(), torch.float16) == LossScale(65536.0, 100)
    assert loss_scale(OptimizerOptions(), torch.bfloat16) is None
    assert loss_scale(OptimizerOptions(loss_scale=0), torch.float16) is None
    with pytest.raises(OptionError, match="adalomo does not go with float16"):
        loss_scale(OptimizerOptions(name="adalomo"), torch.float16)


def test_a_scale_halves_on_overflow_and_doubles_after_good_steps():
    scale = LossScale(4.0, growth_steps=2)
    seen = []
    for is_finite in (False, True, True, False, False, False, False):
        scale.update(is_finite)
        seen.append(scale.value)
    assert seen == [2.0, 2.0, 4.0, 2.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("layers", ["keep", "recompute", "stream"])
def test_the_scale_changes_no_gradient(layers: str):
    """A power of two, in and out again: in float32 not a bit is lost, and the loss is told without it."""
    results = []
    for scale in (None, LossScale(2.0**10, 100)):
        torch.manual_seed(0)
        model = adapt(tiny("llama"), LoraOptions(rank=4), lambda _: None).model
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        with Engine(model, optimizer, MemoryPlan(layers=layers, tile_tokens=16), 0, 0.5, scale=scale) as engine:
            outcome = engine.step(rows(40, 20), 1.0, seed=0)
        weights = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
        results.append((float(outcome.loss), float(outcome.gradient_norm), weights))
    (loss, norm, weights), (scaled_loss, scaled_norm, scaled_weights) = results
    assert (scaled_loss, scaled_norm) == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-5))
    assert torch.allclose(weights, scaled_weights, atol=1e-6)


@pytest.mark.parametrize("named", [["embed_tokens"], ["lm_head", "norm"]], ids=str)
def test_r16_step_1_runs_in_float16_where_weights_are_trained_whole(named: list[str]):
    """Nothing that learns is float16, so nothing has to be unscaled in it; the base stays float16."""
    torch.manual_seed(0)
    base = tiny("llama", tie_word_embeddings=named == ["embed_tokens"]).half()
    model = adapt(base, LoraOptions(rank=4, modules_to_save=named), lambda _: None).model
    whole = [p for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    before, options = [p.detach().clone() for p in whole], OptimizerOptions()
    scale = loss_scale(options, torch.float16)
    optimizer = build_optimizer(options, model.named_parameters())
    with Engine(model, optimizer, MemoryPlan(layers="stream", tile_tokens=16), 0, 1.0, scale=scale) as engine:
        outcome = engine.step(rows(40, 20), 1e-3, seed=0)
    assert not outcome.was_skipped and outcome.loss_scale == 2.0**16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.float16}
    assert not any(torch.equal(a, b) for a, b in zip(before, whole, strict=True))


class Part(Row):
    """One of 2,048 equal parts of a step batch: its gradients are as small as in a step of 192,512 tokens."""

    @property
    def num_supervised(self) -> int:
        return 2048 * int((self.labels != IGNORED).sum())


def counting(step: int) -> list[Row]:
    """Two rows that count upwards, each by a step of its own."""
    random = np.random.default_rng(step)
    made: list[Row] = []
    for _ in range(2):
        ids = ((random.integers(3, 90) + random.integers(1, 4) * np.arange(48)) % 90 + 3).astype(np.int32)
        made.append(Part(ids, np.concatenate([[IGNORED], ids[1:]]).astype(np.int32), (48,)))
    return made


def losses(dtype: torch.dtype, scale: LossScale | None, num_steps: int = 200) -> np.ndarray:
    torch.manual_seed(0)
    base = tiny("llama", num_hidden_layers=1)
    with torch.no_grad():  # a residual stream as large as deep models have it; its gradient is as much smaller
        for part in (
            base.model.embed_tokens,
            base.model.layers[0].self_attn.o_proj,
            base.model.layers[0].mlp.down_proj,
        ):
            part.weight.mul_(64)
    model = adapt(base.to(dtype), LoraOptions(rank=4), lambda _: None).model
    optimizer = build_optimizer(OptimizerOptions(), model.named_parameters())
    with Engine(model, optimizer, MemoryPlan(layers="keep"), 0, 0.0, scale=scale) as engine:
        found = [2048 * float(engine.step(counting(step), 5e-3, step).loss) for step in range(num_steps)]
    return np.convolve(found, np.ones(20) / 20, "valid")


def test_scaled_float16_follows_float32_over_200_steps_where_plain_float16_does_not():
    exact = losses(torch.float32, None)
    scaled, plain = losses(torch.float16, LossScale(2.0**16, 100)), losses(torch.float16, None)
    assert exact[-1] < 0.65 * exact[0]
    assert np.abs(scaled / exact - 1).max() < 0.01
    assert np.abs(plain / exact - 1).max() > 0.1
