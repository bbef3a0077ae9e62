"""The plan of a run that carries: the fastest rung whose step, run on fake tensors over enough segments, fits.

With a full carry every further segment takes what the one before took, so a few segments are enough to know the peak
for any length (with ``carry.gradients: exact`` it grows with the document, and the longest is taken whole).
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowboat.data.trains import Train
from narrowboat.engine.engine import Engine
from narrowboat.errors import BudgetError
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.model.adapters import adapt
from narrowboat.model.empty import empty_base, give_fake_tensors
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import Options
from narrowboat.owner.meter import Meter, Reading
from narrowboat.plan import MemoryPlan
from narrowboat.units import format_bytes

RUNGS = (
    MemoryPlan(layers="keep"),
    MemoryPlan(layers="recompute"),
    MemoryPlan(layers="stream", tile_tokens=512),
    MemoryPlan(layers="stream", tile_tokens=128, chunk_tokens=64),
)
"""From fastest to thriftiest; a segment is short, so its layers' inputs need not leave the device."""


@dataclass(frozen=True)
class CarriedWork:
    """What has to fit.

    Attributes:
        config: the transformers configuration.
        options: the run's.
        dtype: of the base weights.
        segment_tokens: of the longest segment.
        num_segments: of the longest document.
        device_bytes: the device's memory.
        on_card: whether that is another memory than the host's.
    """

    config: Any
    options: Options
    dtype: torch.dtype
    segment_tokens: int
    num_segments: int
    device_bytes: int
    on_card: bool = False


def choose_carried(work: CarriedWork, budget_bytes: int, wanted: str = "auto") -> tuple[MemoryPlan, Reading]:
    """The fastest plan that fits ``budget_bytes``; only plans whose layers are ``wanted`` if that is not auto.

    Raises:
        BudgetError: with the thriftiest plan, its largest parts and the budget.
    """
    for plan in (plan for plan in RUNGS if wanted in ("auto", plan.layers)):
        reading = forecast_carried(work, plan)
        if reading.device_bytes <= budget_bytes:
            return plan, reading
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in list(reading.by_cause.items())[:3])
    raise BudgetError(
        f"The thriftiest plan ({plan.describe()}) peaks at {format_bytes(reading.device_bytes)} for segments of "
        f"{work.segment_tokens:,} tokens with a carry of {work.options.carry.budget}; memory.budget is "
        f"{format_bytes(budget_bytes)}. Largest parts: {largest}. Lower segments.max_tokens or carry.budget."
    )


def forecast_carried(work: CarriedWork, plan: MemoryPlan) -> Reading:
    """The peak of the second step, whose optimizer states are there."""
    options = work.options
    model = adapt(
        empty_base(work.config, work.dtype, quantize=options.model.quantize), options.lora, lambda event: None
    ).model  # on meta
    with FakeTensorMode(), ExitStack() as stack:
        give_fake_tensors(model)
        meter = stack.enter_context(Meter(one_memory=not work.on_card))
        meter.watch_model(model)
        optimizer = build_optimizer(options.optimizer, model.named_parameters())
        carrier = Carrier(model, options.carry, work.device_bytes)
        reach = options.carry.gradient_segments or work.num_segments
        full = math.ceil(carrier.num_tokens / (work.segment_tokens * options.carry.retention_ratio))
        num_segments = min(work.num_segments, math.ceil((full + 1) / reach) * reach + reach)
        num_tokens = work.segment_tokens * num_segments
        nothing = np.zeros(num_tokens, dtype=np.int32)
        train = Train(nothing, nothing, (work.segment_tokens,) * num_segments)
        engine = Engine(model, optimizer, plan, 0, options.optimizer.clip_norm, carrier=carrier)
        with engine:
            engine.step([train], learning_rate=1e-4, seed=0)
            meter.reset_peak()
            engine.step([train], learning_rate=1e-4, seed=0)
        return meter.peak
