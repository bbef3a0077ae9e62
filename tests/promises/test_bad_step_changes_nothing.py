"""The promise: a step without a finite loss and gradient changes no weight and no state, is counted, and is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from narrowboat.data.batches import StepSchedule
from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine
from narrowboat.engine.scaling import LossScale
from narrowboat.errors import ModelError
from narrowboat.events import Event, Notice, StepDone
from narrowboat.model.adapters import adapt
from narrowboat.model.anatomy import Anatomy
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import LoraOptions, Options
from narrowboat.owner.gauge import Gauge
from narrowboat.plan import MemoryPlan
from narrowboat.training.checkpoint import Position, newest_checkpoint
from narrowboat.training.governor import Governor
from narrowboat.training.loop import Course, run
from narrowboat.training.recovery import Recovery
from narrowboat.training.saver import Saver
from narrowboat.training.signals import StopRequest
from tests.memory.families import tiny

OPTIMIZERS = [
    ("adamw", "device"), ("adamw", "rebuilt"), ("adamw8bit", "device"), ("bnb_lion8bit", "device"),
    ("sophia_h", "device"), ("came", "device"), ("adalomo", "device"), ("schedule_free", "device"),
]  # fmt: skip
NUM_ROWS = 10


class Poison:
    """Makes the embeddings of chosen forwards NaN, as a damaged record or a hardware fault would."""

    def __init__(self, model: torch.nn.Module, *calls: int, value: float = float("nan")) -> None:
        self.calls, self.num_calls, self.value = calls, 0, value
        Anatomy.of(model).embedding.register_forward_hook(self._maybe)

    def _maybe(self, module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return out * self.value if self.num_calls in self.calls else out


def rows() -> list[Row]:
    random = np.random.default_rng(0)
    ids = [random.integers(3, 96, 20, dtype=np.int32) for _ in range(NUM_ROWS)]
    return [Row(row, np.concatenate([[-100], row[1:]]).astype(np.int32), (20,)) for row in ids]


def model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return adapt(tiny("llama", hidden_size=128).to(dtype), LoraOptions(rank=32), lambda event: None).model


def bits(engine: Engine) -> list[torch.Tensor]:
    """Every bit that the next steps depend on."""
    states = engine.optimizer.state_dict()["state"]
    return [p.detach().clone() for p in engine.model.parameters()] + [t.clone() for t in tensors(states)]


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        names = tree.__tensor_flatten__()[0] if hasattr(tree, "codes") else ()
        yield from (getattr(tree, name) for name in names) if names else (tree,)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, int | float):
        yield torch.tensor(tree)


def entered(model: Any, layers: str = "keep", scale: LossScale | None = None, **options: Any) -> Engine:
    options = Options(optimizer={"lr": 1e-3, **options})
    optimizer = build_optimizer(options.optimizer, model.named_parameters())
    return Engine(model, optimizer, MemoryPlan(layers=layers, tile_tokens=8), 0, 1.0, scale=scale)


@pytest.mark.parametrize("layers", ["keep", "stream"])
@pytest.mark.parametrize(("name", "states"), OPTIMIZERS)
def test_nan_in_one_step_changes_nothing(name: str, states: str, layers: str):
    model_ = model()
    with entered(model_, layers, name=name, states=states) as engine:
        for i in range(2):
            engine.step([rows()[i]], 1e-3, seed=i)
        before = bits(engine)
        poison = Poison(model_, 1)
        outcome = engine.step([rows()[2]], 1e-3, seed=2)
        assert outcome.was_skipped and not torch.isfinite(outcome.loss) and poison.num_calls
        assert all(torch.equal(a, b) for a, b in zip(before, bits(engine), strict=True))
        assert not engine.step([rows()[3]], 1e-3, seed=3).was_skipped
        assert not all(torch.equal(a, b) for a, b in zip(before, bits(engine), strict=True))


def trained(model_: Any, tmp_path: Path, schedule: Any = None, position: Position | None = None, **kwargs: Any) -> Any:
    """A run of ten steps over ten rows: position, events, weights."""
    told: list[Event] = []
    scale = kwargs.pop("scale", None)
    options = Options(
        train={"save_every": 0, "longest_first": False}, optimizer={"lr": 1e-3, "warmup_steps": 2, **kwargs}
    )
    course = Course(rows(), [], schedule or StepSchedule([20] * NUM_ROWS, 20, seed=0), 10)  # type: ignore[arg-type]
    with (
        Gauge(torch.device("cpu"), 2**40) as gauge,
        entered(model_, scale=scale, **kwargs) as engine,
    ):
        start = position or Position(0, 10)
        recovery = Recovery(engine, gauge, Governor([engine.plan], 2**40), told.append)
        saver = Saver(tmp_path, 2, gauge, 0.9, told.append)
        with StopRequest() as stop:
            end = run(recovery, course, options, start, saver, stop, told.append)
        return end, told, bits(engine)


def saved_scale(tmp_path: Path) -> dict[str, float]:
    found = newest_checkpoint(tmp_path / "checkpoints", pytest.fail)
    assert found is not None
    return found[1].scale


def test_the_run_is_the_one_that_never_saw_the_bad_rows(tmp_path: Path):
    """NaN at step 3 of 10: the third rows are passed over, the rates are those of ten steps, the result is the same."""
    whole = StepSchedule([20] * NUM_ROWS, 20, seed=0)

    class Without:
        def __getitem__(self, step: int) -> list[int]:
            return whole[step if step < 2 else step + 1]

    hurt = model()
    Poison(hurt, 3)
    end, told, weights = trained(hurt, tmp_path / "hurt")
    _, told_without, weights_without = trained(model(), tmp_path / "without", Without())
    assert (end.step, end.num_skipped, end.num_passed_over, end.num_bad_in_a_row) == (10, 1, 1, 0)
    steps, steps_without = ([e for e in events if isinstance(e, StepDone)] for events in (told, told_without))
    assert [e.num_skipped for e in steps] == [0, 0] + [1] * 8
    assert [(e.loss, e.learning_rate) for e in steps] == [(e.loss, e.learning_rate) for e in steps_without]
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_without, strict=True))
    (said,) = [e.text for e in told if isinstance(e, Notice) and "skipped" in e.text]
    assert said == (
        "Step 3 was skipped: its loss is nan, its gradient norm nan. Nothing was changed, its 20 tokens are passed "
        "over."
    )


def test_what_is_no_number_is_said_with_its_layer_and_tile(tmp_path: Path):
    hurt = model()
    Poison(hurt, 3, 4)  # the step's forward, and the one that looks for it
    _, told, _ = trained(hurt, tmp_path)
    (said,) = [e.text for e in told if isinstance(e, Notice) and "skipped" in e.text]
    assert "its gradient norm nan, first in the embedding, tokens 0 to 8. Nothing was changed" in said


def test_a_scale_that_starts_far_too_high_comes_down_and_loses_no_row(tmp_path: Path):
    end, told, _ = trained(model(torch.float16), tmp_path, scale=LossScale(2.0**40, 100))
    steps = [e for e in told if isinstance(e, StepDone)]
    assert (end.step, end.num_passed_over) == (10, 0)
    assert 10 < end.num_skipped < 40 and saved_scale(tmp_path)["value"] == 2.0 ** (40 - end.num_skipped)
    assert sum(isinstance(e, Notice) and "The loss scale goes from" in e.text for e in told) == end.num_skipped
    _, told_exact, _ = trained(model(), tmp_path / "exact")
    losses, exact_losses = ([e.loss for e in events if isinstance(e, StepDone)] for events in (told, told_exact))
    assert losses == pytest.approx(exact_losses, rel=0.01) and len(steps) == 10


@pytest.mark.parametrize(
    ("dtype", "damage", "cause"),
    [
        (torch.float32, "model", r"The model's own .*mlp.down_proj.* holds NaN or infinity"),
        (torch.float32, "adapter", r"The adapter's .*lora_A.* holds NaN or infinity"),
        (torch.float16, "data", r"values beyond 65,504, where float16 ends \(model.dtype: bfloat16 or float32\); an"),
        (torch.float32, "data", r"Likely causes: an optimizer.lr that is too high; records that the model cannot"),
    ],
)
def test_many_in_a_row_end_the_run_with_the_likely_cause(dtype, damage: str, cause: str, tmp_path: Path):
    broken = model(dtype)
    if damage == "data":
        Poison(broken, *range(3, 100))
    else:
        wanted = "down_proj.base_layer" if damage == "model" else "lora_A"
        first = next(p for name, p in broken.named_parameters() if wanted in name)
        first.data[0, 0] = float("nan")
    with pytest.raises(ModelError, match=f"4 times in a row step .* had no finite loss and gradient.*{cause}"):
        trained(broken, tmp_path, max_skipped=4)


def test_a_resumed_run_goes_on_with_its_scale_and_its_rows(tmp_path: Path):
    position = Position(4, 10, 80, num_skipped=3, num_passed_over=1, scale={"value": 64.0, "num_good": 7})
    _, told, _ = trained(model(torch.float16), tmp_path, position=position, scale=LossScale(2.0**16, 8))
    first = next(e for e in told if isinstance(e, StepDone))
    assert (first.step, first.num_skipped) == (5, 3)
    assert saved_scale(tmp_path) == {"value": 128.0, "num_good": 5}  # doubled after its eighth good step
