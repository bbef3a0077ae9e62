"""The plan of a run that carries: the fastest rung whose step, run on fake tensors over enough segments, fits.

With a full carry every further segment takes what the one before took, so a few segments are enough to know the peak
for any length (with ``carry.gradients: exact`` it grows with the document, and the longest is taken whole). What waits
beside the device under ``carry.policy: fetch`` grows with the document in any case: it is counted, not run.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from narrowboat.owner.causes import CARRY
from narrowboat.owner.meter import Meter, Reading
from narrowboat.plan import MemoryPlan, Place
from narrowboat.planner.target import Limits
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
        open_tokens: of the longest documents that are open at once, one that is trained on and one that is held out.
        device_bytes: the device's memory.
        on_card: whether that is another memory than the host's.
    """

    config: Any
    options: Options
    dtype: torch.dtype
    segment_tokens: int
    num_segments: int
    open_tokens: int
    device_bytes: int
    on_card: bool = False


def choose_carried(work: CarriedWork, limits: Limits, wanted: str = "auto") -> tuple[list[MemoryPlan], Reading]:
    """Plans from the fastest that fits ``limits`` to the thriftiest, and what the first takes.

    Args:
        work: what has to fit.
        limits: of the device, and of what is beside it.
        wanted: only plans whose layers are this, if it is not auto.

    Raises:
        BudgetError: with the thriftiest plan, its largest parts and the budget; or with what has to wait beside the
            device, and the room there.
    """
    beside, places = _beside(work, limits)
    rungs = [plan for plan in RUNGS if wanted in ("auto", plan.layers)]
    for number, plan in enumerate(rungs):
        alone = forecast_carried(work, plan)
        for place in places:
            reading = _with(alone, beside, place, work.on_card)
            if reading.device_bytes <= limits.device_bytes:
                first = plan.model_copy(update={"documents": place})
                below = (rung.model_copy(update={"documents": places[-1]}) for rung in rungs[number:])
                return [first, *(rung for rung in below if rung != first)], reading
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in list(reading.by_cause.items())[:3])
    raise BudgetError(
        f"The thriftiest plan ({plan.describe()}) peaks at {format_bytes(reading.device_bytes)} for segments of "
        f"{work.segment_tokens:,} tokens with a carry of {work.options.carry.budget}; memory.budget is "
        f"{format_bytes(limits.device_bytes)}. Largest parts: {largest}. Lower segments.max_tokens or carry.budget."
    )


def _beside(work: CarriedWork, limits: Limits) -> tuple[int, list[Place]]:
    """What documents take beside the device, and where there is room for it, the faster place first."""
    base = empty_base(work.config, work.dtype)
    needed = Carrier(base, work.options.carry, work.device_bytes).bytes_beside(work.open_tokens)
    if not needed:
        return 0, ["device"]
    host_bytes = limits.host_bytes if work.on_card else limits.device_bytes
    rooms: list[tuple[Place, int | None]] = [("host", host_bytes), ("disk", limits.disk_bytes)]
    places = [place for place, room in rooms if room is None or needed <= room]
    if not places:
        raise BudgetError(
            f"Under carry.policy: fetch, {work.open_tokens:,} tokens of the longest documents take "
            f"{format_bytes(needed)} beside the device; host memory has room for {format_bytes(host_bytes or 0)}, the "
            f"disk of temporary files for {format_bytes(limits.disk_bytes or 0)}. Set carry.storage: int4, point "
            "TMPDIR at a larger disk, or choose a policy that drops tokens, such as sinks."
        )
    return needed, places


def _with(alone: Reading, beside: int, place: Place, on_card: bool) -> Reading:
    """``alone``, and ``beside`` bytes that wait at ``place``."""
    if place == "disk":
        return replace(alone, disk_bytes=alone.disk_bytes + beside)
    if on_card:
        return replace(alone, host_bytes=alone.host_bytes + beside)
    causes = alone.by_cause | {CARRY: alone.by_cause.get(CARRY, 0) + beside}
    by_cause = dict(sorted(causes.items(), key=lambda part: -part[1])) if beside else alone.by_cause
    return replace(alone, device_bytes=alone.device_bytes + beside, by_cause=by_cause)


def forecast_carried(work: CarriedWork, plan: MemoryPlan) -> Reading:
    """The peak of the second step, whose optimizer states are there; without what waits beside the device."""
    options, plan = work.options, plan.model_copy(update={"documents": "disk"})
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
