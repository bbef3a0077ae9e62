from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.memory.families import adapted

from narrowboat.data.examples import IGNORED, Example, Row
from narrowboat.engine.engine import Engine
from narrowboat.plan import MemoryPlan

RECOMPUTE = MemoryPlan(layers="recompute", chunk_tokens=16)


def rows(*lengths: int, masked: int = 3, seed: int = 0) -> list[Row]:
    """Rows of random tokens whose first ``masked`` are not learnt."""
    random = np.random.default_rng(seed)
    made = []
    for length in lengths:
        ids = random.integers(3, 96, length).astype(np.int32)
        labels = ids.copy()
        labels[:masked] = IGNORED
        made.append(Row(ids, labels, (length,)))
    return made


@pytest.fixture
def engine_of() -> Callable[..., Engine]:
    def make(plan: MemoryPlan, family: str = "llama", clip_norm: float = 0.0, **changes: Any) -> Engine:
        model = adapted(family, **changes)
        trainable = [p for p in model.parameters() if p.requires_grad]
        return Engine(model, torch.optim.SGD(trainable, lr=1.0), plan, pad_id=0, clip_norm=clip_norm)

    return make


def moved(engine: Engine, batch: Sequence[Row], seed: int = 0) -> tuple[torch.Tensor, float]:
    """What one step of plain gradient descent adds to the weights (so: minus the gradient), and its loss."""
    trainable = [p for p in engine.model.parameters() if p.requires_grad]
    before = torch.cat([p.detach().flatten().clone() for p in trainable])
    with engine:
        outcome = engine.step(batch, learning_rate=1.0, seed=seed)
    return torch.cat([p.detach().flatten() for p in trainable]) - before, float(outcome.loss)


def test_r14_a_step_batch_is_normalised_by_all_its_supervised_tokens(engine_of: Callable[..., Engine]) -> None:
    """4.0 on one token and 1.0 on three give 1.75: the loss is the mean over tokens, not over micro-batches."""
    batch = [*rows(9, masked=8), *rows(20, masked=17, seed=1)]
    assert [row.num_supervised for row in batch] == [1, 3]
    engine = engine_of(RECOMPUTE)
    with engine:
        alone = [engine.evaluate([row])[0] for row in batch]
    _, loss = moved(engine, batch)
    assert loss == pytest.approx(sum(alone) / 4, rel=1e-5)
    assert loss != pytest.approx((alone[0] / 1 + alone[1] / 3) / 2, rel=1e-2)


@pytest.mark.parametrize("micro_batch_tokens", [1, 24, 60, 10_000])
def test_r14_any_split_into_micro_batches_gives_the_gradient_of_the_big_batch(
    engine_of: Callable[..., Engine], micro_batch_tokens: int
) -> None:
    batch = rows(5, 24, 11, 8, 24, 17)
    reference, loss = moved(engine_of(MemoryPlan(layers="keep", micro_batch_tokens=10_000)), batch)
    plan = MemoryPlan(layers="recompute", micro_batch_tokens=micro_batch_tokens)
    split, split_loss = moved(engine_of(plan), batch)
    assert float((split - reference).norm() / reference.norm()) < 1e-5
    assert split_loss == pytest.approx(loss, rel=1e-6)


def test_dropout_does_not_depend_on_the_split(engine_of: Callable[..., Engine]) -> None:
    batch = rows(5, 24, 11, 8)
    big = moved(
        engine_of(MemoryPlan(layers="keep", micro_batch_tokens=10_000), lora={"lora_dropout": 0.3}), batch, seed=5
    )[0]
    small = moved(engine_of(MemoryPlan(layers="stream", tile_tokens=7), lora={"lora_dropout": 0.3}), batch, seed=5)[0]
    other = moved(engine_of(MemoryPlan(layers="stream", tile_tokens=7), lora={"lora_dropout": 0.3}), batch, seed=6)[0]
    assert float((small - big).norm() / big.norm()) < 1e-5
    assert float((other - big).norm() / big.norm()) > 1e-2


def test_the_gradient_is_clipped_to_its_norm(engine_of: Callable[..., Engine]) -> None:
    batch = rows(20)
    free, _ = moved(engine_of(RECOMPUTE), batch)
    clipped, _ = moved(engine_of(RECOMPUTE, clip_norm=float(free.norm()) / 4), batch)
    assert float(clipped.norm() / free.norm()) == pytest.approx(0.25, rel=1e-4)


def test_a_step_without_a_finite_gradient_changes_nothing(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(RECOMPUTE)
    weight = next(p for name, p in engine.model.named_parameters() if "lora_A" in name)
    with torch.no_grad():
        weight[0, 0] = torch.nan
    change, loss = moved(engine, rows(20))
    assert np.isnan(loss)
    assert not change.nan_to_num().any()


def test_a_change_of_plan_between_steps_changes_nothing(engine_of: Callable[..., Engine]) -> None:
    first, second = rows(20, 9), rows(13, 24, seed=1)

    def two_steps(*plans: MemoryPlan) -> torch.Tensor:
        engine = engine_of(plans[0])
        with engine:
            engine.step(first, learning_rate=1e-2, seed=1)
            engine.replan(plans[-1])
            engine.step(second, learning_rate=1e-2, seed=2)
        return torch.cat([p.detach().flatten() for p in engine.model.parameters() if p.requires_grad])

    steady = two_steps(MemoryPlan(layers="keep"))
    changed = two_steps(MemoryPlan(layers="keep"), MemoryPlan(layers="stream", tile_tokens=5, inputs="disk"))
    assert float((steady - changed).norm() / steady.norm()) < 1e-6


def test_evaluation_is_the_models_own_loss_and_leaves_no_gradient(engine_of: Callable[..., Engine]) -> None:
    batch = rows(20, 9)
    engine = engine_of(MemoryPlan(layers="stream", tile_tokens=6))
    with engine:
        total, num_supervised = engine.evaluate(batch)
    assert num_supervised == 17 + 6
    engine.model.eval()
    expected = 0.0
    for row in batch:
        ids, labels = (torch.from_numpy(t.astype(np.int64))[None] for t in (row.input_ids, row.labels))
        with torch.no_grad():
            expected += float(engine.model(input_ids=ids, labels=labels).loss) * row.num_supervised
    assert total == pytest.approx(expected, rel=1e-5)
    assert all(p.grad is None for p in engine.model.parameters())


def test_packed_documents_count_as_if_they_were_alone(engine_of: Callable[..., Engine]) -> None:
    parts = rows(9, 14)
    packed = Row.join([Example(row.input_ids, row.labels) for row in parts])
    together, _ = moved(engine_of(MemoryPlan(layers="stream", tile_tokens=5)), [packed])
    apart, _ = moved(engine_of(RECOMPUTE), parts)
    assert float((together - apart).norm() / apart.norm()) < 1e-5
