"""The promise: a forecast is what the meter reads in the run, within 2 % at worst and 0.5 % in the median."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
import transformers

from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine
from narrowboat.model.adapters import adapt
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import LoraOptions, Options
from narrowboat.owner.meter import Meter, Reading
from narrowboat.plan import MemoryPlan
from narrowboat.planner.amounts import Forecast
from narrowboat.planner.forecast import Forecaster, Workload
from tests.memory.families import FAMILIES, SIZES

WORST, MEDIAN = 0.02, 0.005
TILE = {"layers": "stream", "tile_tokens": 16, "chunk_tokens": 8}
RECOMPUTE = {"layers": "recompute", "chunk_tokens": 16}
PLANS: list[dict[str, Any]] = [
    {"layers": "keep"},
    RECOMPUTE | {"num_kept_layers": 2},
    RECOMPUTE | {"weights": "host"},
    TILE | {"num_kept_layers": 2, "keep_keys_values": True},
    TILE | {"inputs": "host", "weights": "host"},
    TILE | {"inputs": "disk"},
    TILE | {"inputs": "disk", "input_stride": 2, "weights": "disk"},
]


@dataclass(frozen=True)
class Case:
    family: str
    plan: MemoryPlan
    num_tokens: int = 80
    num_rows: int = 1
    rank: int = 4
    dtype: torch.dtype = torch.float32
    changes: dict[str, Any] = field(default_factory=dict)
    experts: Literal["none", "all"] = "none"

    def config(self) -> Any:
        name, differs, _ = FAMILIES[self.family]
        sizes = SIZES | differs | {"num_hidden_layers": 6, "max_position_embeddings": 256} | self.changes
        if self.family == "gpt-neox":
            del sizes["num_key_value_heads"]
        return getattr(transformers, name)(**sizes)

    def options(self) -> Options:
        return Options(lora=LoraOptions(rank=self.rank, experts=self.experts))

    def __str__(self) -> str:
        return f"{self.family}, {self.plan.describe()}, {self.num_rows} x {self.num_tokens}, {self.dtype}"


def cases() -> list[Case]:
    """Families, kinds of plan, lengths, batches, ranks and formats; ``benchmarks/forecast.py`` has more of them."""
    stream, recompute = MemoryPlan(**TILE), MemoryPlan(**RECOMPUTE)
    found = [Case(family, stream) for family in ("gemma3", "gpt-oss", "mixtral")]
    found += [Case(family, recompute) for family in ("gemma2", "mixtral", "phi-3", "gpt-neox")]
    found += [Case("mixtral", plan, experts="all") for plan in (stream, recompute)]
    found += [Case("llama", MemoryPlan(**plan)) for plan in PLANS]
    found += [Case("llama", stream, num_tokens=n) for n in (5, 33)]
    found += [Case("mistral", stream, num_rows=3, rank=64, changes={"sliding_window": 40})]
    return [*found, Case("qwen3", stream, dtype=torch.bfloat16), Case("qwen3", recompute, dtype=torch.bfloat16)]


@contextmanager
def engine_of(case: Case, device: torch.device) -> Iterator[tuple[Engine, list[Row]]]:
    """An engine with the case's model on ``device``, and the rows of its step."""
    torch.manual_seed(0)
    options = case.options()
    base = transformers.AutoModelForCausalLM.from_config(case.config(), dtype=case.dtype).to(device)
    model = adapt(base, options.lora, lambda event: None).model
    optimizer = build_optimizer(options.optimizer, model.named_parameters())
    ids = np.random.default_rng(0).integers(3, SIZES["vocab_size"], case.num_tokens, dtype=np.int32)
    plan = case.plan.model_copy(update={"micro_batch_tokens": case.num_rows * case.num_tokens})
    with Engine(model, optimizer, plan, pad_id=0, clip_norm=1.0) as engine:
        yield engine, [Row(ids, ids, (case.num_tokens,))] * case.num_rows


def read(case: Case) -> Reading:
    """A real step's peak, the third one's: by then the optimizer has its states and what would take them back."""
    with Meter(one_memory=True) as meter, engine_of(case, torch.device("cpu")) as (engine, rows):
        meter.watch_model(engine.model)
        for _ in range(3):
            meter.reset_peak()
            engine.step(rows, learning_rate=1e-4, seed=0)
        return meter.peak  # leaving the engine brings weights home


def foresee(case: Case) -> Forecast:
    forecaster = Forecaster(Workload(case.config(), case.options(), case.dtype))
    return forecaster.forecast(case.plan, case.num_tokens, case.num_rows)


def test_forecast_equals_meter():
    errors = {}
    for case in cases():
        forecast, reading = foresee(case), read(case)
        errors[str(case)] = forecast.device_bytes / reading.device_bytes - 1
        assert forecast.host_bytes == reading.host_bytes, str(case)
        assert reading.disk_bytes <= forecast.disk_bytes <= 1.2 * reading.disk_bytes, str(case)  # files are lent again
    worst = max(errors, key=lambda name: abs(errors[name]))
    assert abs(errors[worst]) < WORST, f"{worst}: {errors[worst]:+.2%}"
    assert median(map(abs, errors.values())) < MEDIAN
