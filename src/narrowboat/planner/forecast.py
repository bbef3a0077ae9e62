"""The forecast: what a step will hold, by cause and place, and how many operations it will do, before it is run.

A few layers are rehearsed on a few lengths; the rest is arithmetic without loss. Equal layers hold equal amounts, and
within a layer every operator's bytes grow by the same amount with every further tile: so both are carried on exactly,
moment by moment and operator by operator, and the largest one is the peak. Seconds for a model of any size.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from narrowboat.memory import attention
from narrowboat.memory.meter import BASE_WEIGHTS
from narrowboat.model.adapters import adapt
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.base import empty_base
from narrowboat.model.ranks import adapters_by_layer, for_some_layers
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan, Place
from narrowboat.planner.recorder import BACKWARD, FORWARD, LOSS, START, UPDATE, Bytes, Work
from narrowboat.planner.rehearsal import Part, Rehearsal, Trace, cut_to
from narrowboat.planner.sample import Sample, sample_layers, whole_sample

WHOLE_UNIT = 512
"""Tokens between two rehearsed lengths of a plan without tiles."""


@dataclass(frozen=True)
class Workload:
    """What has to fit: a model with its adapter and optimizer.

    Attributes:
        config: the transformers configuration.
        options: the run's.
        dtype: of the base weights.
        on_card: whether it runs on a card, whose operators take more for themselves than a CPU's.
    """

    config: Any
    options: Options
    dtype: torch.dtype
    on_card: bool = False


@dataclass(frozen=True)
class Forecast:
    """What a step over ``num_rows`` rows of ``num_tokens`` tokens takes under ``plan``.

    ``by_cause`` holds the device's bytes at its peak; host and disk have peaks of their own. ``weights_away_bytes`` is
    what of those are weights.
    """

    plan: MemoryPlan
    num_rows: int
    num_tokens: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    by_cause: dict[str, int]
    work: Work
    weights_away_bytes: int = 0
    seconds: float | None = None


class Forecaster:
    """Forecasts for one workload; what was rehearsed is remembered."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self._base = self._empty()
        self._adapters = adapters_by_layer(self._base, work.options.lora)
        anatomy = Anatomy.of(self._base)
        self._layers, self.untileable = anatomy.layers, anatomy.untileable_layers
        self.num_layers = len(self._layers)
        self._rehearsals: dict[tuple[int, ...], Rehearsal] = {}
        self._traces: dict[Any, Trace] = {}

    def forecast(
        self, plan: MemoryPlan, num_tokens: int, num_rows: int = 1, many: bool = False, in_full: bool = False
    ) -> Forecast:
        """The peak of a step in the middle of a run, optimizer states and gradients there.

        Args:
            plan: what the step does.
            num_tokens: of each row.
            num_rows: that go together.
            many: many lengths will be asked for: rehearse three and carry on from them.
            in_full: rehearse every layer over the whole row instead of carrying on: slow, and the same.
        """
        if self.work.on_card and plan.weights == "disk":  # they come by copies, as from host memory
            from_host = self.forecast(plan.model_copy(update={"weights": "host"}), num_tokens, num_rows, many)
            resting = from_host.weights_away_bytes
            host, disk = from_host.host_bytes - resting, from_host.disk_bytes + resting
            return replace(from_host, plan=plan, host_bytes=host, disk_bytes=disk)
        if in_full:
            everything = whole_sample(len(self._layers), plan)
            return _Whole(self._trace(everything, num_rows, num_tokens), everything).forecast(
                plan, num_rows, num_tokens
            )
        sample = sample_layers(self._layers, plan, self._adapters)
        if not many:
            return _Whole(self._trace(sample, num_rows, num_tokens), sample).forecast(plan, num_rows, num_tokens)
        unit = plan.tile_tokens if plan.layers == "stream" else WHOLE_UNIT
        windows = [w + 2 * unit for layer in self._layers if (w := layer.window) and w < num_tokens]
        if plan.layers == "stream" and num_tokens > attention.KEYS_AT_ONCE:
            windows.append(attention.KEYS_AT_ONCE + 3 * unit)
        steady = max([2 * plan.chunk_tokens, *windows])  # beyond it every further unit adds the same
        first = max(2, -(-steady // unit) - 1) * unit + num_tokens % unit  # a first, a last and a middle tile
        lengths = [first, first + unit, first + 2 * unit]
        if num_tokens <= lengths[-1]:
            trace = self._trace(sample, num_rows, num_tokens)
        else:
            trace = carry_on([self._trace(sample, num_rows, t) for t in lengths], (num_tokens - first) // unit)
        return _Whole(trace, sample).forecast(plan, num_rows, num_tokens)

    def _trace(self, sample: Sample, num_rows: int, num_tokens: int) -> Trace:
        key = (sample.picked, sample.plan, num_rows, num_tokens)
        if key not in self._traces:
            if sample.picked not in self._rehearsals:
                self._rehearsals[sample.picked] = self._rehearsal(sample.picked)
            self._traces[key] = self._rehearsals[sample.picked].run(sample.plan, num_rows, num_tokens)
        return self._traces[key]

    def _empty(self) -> Any:
        return empty_base(copy.deepcopy(self.work.config), self.work.dtype, quantize=self.work.options.model.quantize)

    def _rehearsal(self, picked: tuple[int, ...]) -> Rehearsal:
        options = self.work.options
        model = self._empty()
        cut_to(model, picked)
        lora = for_some_layers(self._base, options.lora, picked)
        adapted = adapt(model, lora, lambda event: None).model
        return Rehearsal(
            adapted, partial(build_optimizer, options.optimizer), options.optimizer.clip_norm, self.work.on_card
        )


def carry_on(traces: Sequence[Trace], num_units: int) -> Trace:
    """The trace ``num_units`` units after the first of three that are one unit apart.

    Bytes and calls go on in a straight line through the last two; arithmetic, since every token meets all earlier ones,
    in the parabola through all three.
    """
    _, second, third = traces
    further = num_units - 1

    def line(a: Bytes, b: Bytes) -> Bytes:
        return {slot: a.get(slot, 0) + further * (b.get(slot, 0) - a.get(slot, 0)) for slot in a.keys() | b.keys()}

    parts = {}
    for moment, part in third.parts.items():
        before = second.parts[moment]
        parts[moment] = Part(
            {key: line(before.peaks.get(key, alive), alive) for key, alive in part.peaks.items()},
            line(before.left, part.left),
            _parabola([trace.parts[moment].work for trace in traces], num_units),
        )
    return Trace(line(second.rest, third.rest), parts, third.layers)


def _parabola(works: Sequence[Work], x: int) -> Work:
    counts = zip(*(work.counts for work in works), strict=True)
    every = Work(*(a + x * (b - a) + x * (x - 1) // 2 * (c - 2 * b + a) for a, b, c in counts))
    return replace(every, calls=works[1].calls + (x - 1) * (works[2].calls - works[1].calls))


class _Whole:
    """The step of the whole model, put together from a sample's moments."""

    def __init__(self, trace: Trace, sample: Sample) -> None:
        place_of = {label: i for i, label in enumerate(sample.sample_labels)}
        layers = [place_of[label] for label in sample.labels]
        further = Counter(layers) - Counter(place_of.values())
        self._rest = _sum([trace.rest, *(_times(trace.layers[i], count) for i, count in further.items())])
        forward, backward = [(FORWARD, i) for i in layers], [(BACKWARD, i) for i in reversed(layers)]
        order = [(START, 0), *forward, (LOSS, 0), *backward, (UPDATE, 0)]
        self._parts = [trace.parts[moment] for moment in order if moment in trace.parts]
        self._busy = [
            trace.parts[moment] for moment in order[1:-1] if moment in trace.parts
        ]  # the rest is milliseconds

    def forecast(self, plan: MemoryPlan, num_rows: int, num_tokens: int) -> Forecast:
        """Each place's peak; the causes are the device's."""
        device, host, disk = (self._peak(place) for place in ("device", "host", "disk"))
        by_cause = {name: size for (name, place), size in device.items() if place == "device" and size}
        return Forecast(
            plan=plan,
            num_rows=num_rows,
            num_tokens=num_tokens,
            device_bytes=_total(device, "device"),
            host_bytes=_total(host, "host"),
            disk_bytes=_total(disk, "disk"),
            by_cause=dict(sorted(by_cause.items(), key=lambda item: -item[1])),
            work=sum((part.work for part in self._busy), Work()),
            weights_away_bytes=sum(
                size for (name, place), size in self._rest.items() if name == BASE_WEIGHTS and place != "device"
            ),
        )

    def _peak(self, place: Place) -> Bytes:
        """What is alive when most is alive at ``place``."""
        alive, best = self._rest, self._rest
        for part in self._parts:
            at_place = (above for (where, *_), above in part.peaks.items() if where == place)
            highest = _sum([alive, max(at_place, key=lambda above: _total(above, place))])
            best = max(best, highest, key=lambda bytes_: _total(bytes_, place))
            alive = _sum([alive, part.left])
        return best


def _sum(parts: Iterable[Bytes]) -> Bytes:
    total: Bytes = defaultdict(int)
    for part in parts:
        for slot, size in part.items():
            total[slot] += size
    return total


def _times(part: Bytes, count: int) -> Bytes:
    return {slot: size * count for slot, size in part.items()}


def _total(alive: Bytes, place: Place) -> int:
    return sum(size for (_, where), size in alive.items() if where == place)
