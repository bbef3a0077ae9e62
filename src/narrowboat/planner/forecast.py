"""The forecast: what a step will hold, by cause and place, and how many operations it will do, before it is run.

A few layers are rehearsed on a few lengths; the rest is arithmetic without loss. Equal layers hold equal amounts, and
within a layer every operator's bytes grow by the same amount with every further tile: so both are carried on exactly,
moment by moment and operator by operator, and the largest one is the peak. Seconds for a model of any size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from narrowboat.machine.rates import Capability
from narrowboat.memory import attention
from narrowboat.memory.trusted import contract_for
from narrowboat.model.adapters import adapt
from narrowboat.model.anatomy import Anatomy
from narrowboat.model.empty import empty_base
from narrowboat.model.packed import QUANTISING_BYTES, PackedLinear
from narrowboat.model.ranks import adapters_by_layer, for_some_layers
from narrowboat.optimizers.build import build_optimizer
from narrowboat.optimizers.driving import AVERAGING
from narrowboat.options.schema import Options
from narrowboat.owner.causes import BASE_WEIGHTS, LAYER_INPUTS
from narrowboat.plan import LayerMode, MemoryPlan
from narrowboat.planner.amounts import Forecast
from narrowboat.planner.rehearsal import EVALUATION, READING, STEP, Rehearsal, Trace, cut_to
from narrowboat.planner.sample import Sample, sample_layers, whole_sample
from narrowboat.planner.whole import Whole, carry_on, total

WHOLE_UNIT = 512
"""Tokens between two rehearsed lengths of a plan without tiles."""


@dataclass(frozen=True)
class Workload:
    """What has to fit: a model with its adapter and optimizer.

    Attributes:
        config: the transformers configuration.
        options: the run's.
        dtype: of the base weights.
        card: the kind of card that it runs on, with kernels and an allocator of its own; None is a CPU.
        stored: format of the weights in the model's files, where they are used as they lie if it is ``dtype``; None if
            that is not known.
        trains: whether steps are taken; else rows are only evaluated.
        is_shipped: never; curves that come with the package are another work.
    """

    config: Any
    options: Options
    dtype: torch.dtype
    card: Capability | None = None
    stored: torch.dtype | None = None
    trains: bool = True
    is_shipped: bool = False

    @property
    def positions(self) -> int | None:
        """Tokens that the model was made for, where its configuration says so."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)


class Forecaster:
    """Forecasts for one workload; what was rehearsed is remembered."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self._base = self._empty()
        self._adapters = adapters_by_layer(self._base, work.options.lora)
        anatomy = Anatomy.of(self._base)
        self._layers, self.contract = anatomy.layers, contract_for(self._base)
        self._is_square = any(layer.is_square for layer in self.contract.layers.values())
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
        found = _forecast(self._whole(plan, num_tokens, num_rows, many, in_full), plan, num_rows, num_tokens)
        if plan.weights != "disk":
            return found
        in_file = self._mapped_bytes
        return replace(found, disk_bytes=found.disk_bytes - in_file, file_bytes=in_file)

    def phases(self, plan: MemoryPlan, num_tokens: int, num_rows: int = 1) -> dict[str, int]:
        """The device's peak in each phase of a run."""
        evaluation = self._whole(plan, num_tokens, num_rows, work=EVALUATION)
        if not self.work.trains:
            loading = self._loading(total(evaluation.rest, "device"), evaluation.resting_weights)
            phases = {"loading": loading, "evaluation": total(evaluation.peak("device"), "device")}
            if self.contract.reads_on:  # else answers go through their own cache
                phases["answers"] = self._answers(plan, num_tokens)
            return phases
        step = self._whole(plan, num_tokens, num_rows)
        resting = total(step.after, "device")
        return {
            "loading": self._loading(step.before_the_first_step, step.resting_weights),
            "first step": step.first_step,
            "step": total(step.peak("device"), "device"),
            "evaluation": step.evaluated(evaluation, self.work.options.optimizer.name in AVERAGING),
            "saving": resting,
            "leaving": resting,
        }

    def _answers(self, plan: MemoryPlan, num_tokens: int) -> int:
        """The device's peak while questions of ``num_tokens`` are answered, as many together as the plan lets go so.

        Most is held while the last of them is read, beside what was read before, or while all are written on: then each
        has its keys and values, one layer's once more where that layer works, and its token's logits, as they come and
        in float32.
        """
        reading = self._whole(plan, num_tokens, 1, work=READING)
        resting = reading.left_by_layers(LAYER_INPUTS, "device")
        resting[0] = min(resting[:2])  # the first layer leaves hidden states as well, which others only exchange
        logits = Anatomy.of(self._base).vocab_size * (4 + self.work.dtype.itemsize)
        num = max(1, plan.micro_batch_tokens // (num_tokens + self.work.options.evaluate.answer_tokens))
        while_read = total(reading.peak("device"), "device") + (num - 1) * sum(resting)
        return max(while_read, total(reading.rest, "device") + num * (sum(resting) + max(resting) + logits))

    @property
    def refused(self) -> Mapping[LayerMode, str]:
        """For each kind of plan that is not right for the model, why."""
        return self.contract.refused

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of the weights of the largest layer, which has to be on a card as a whole."""
        return max(sum(p.nbytes for p in layer.module.parameters()) for layer in self._layers)

    def _loading(self, loaded_bytes: int, weight_bytes: int) -> int:
        """The peak while the last weight is read, or later, when a loss looks at what the head does to one token: its
        logits twice in float32 and once as they come.
        """
        itemsize, quantize = self.work.dtype.itemsize, self.work.options.model.quantize
        cast = itemsize if itemsize < 4 and quantize == "int4_weight" else 0
        linears = [m.in_features * m.out_features for m in self._base.modules() if isinstance(m, PackedLinear)]
        reading = int((QUANTISING_BYTES[quantize] + cast) * max(linears, default=0))
        looking = Anatomy.of(self._base).vocab_size * (8 + (itemsize if itemsize < 4 else 0))
        return max(weight_bytes + reading, loaded_bytes + looking)

    @cached_property
    def _mapped_bytes(self) -> int:
        """Bytes of weights that can stay in the model's files: not cast, quantised or put together anew."""
        if self.work.stored != self.work.dtype or self.work.options.model.quantize != "none":
            return 0
        anatomy = Anatomy.of(self._base)
        units = [*(layer.module for layer in anatomy.layers), anatomy.head, anatomy.embedding]
        weights = {id(p): p for unit in units for p in unit.parameters()}
        return sum(p.nbytes for p in weights.values() if p.dim() < 3)  # experts are stored one by one

    def _whole(
        self,
        plan: MemoryPlan,
        num_tokens: int,
        num_rows: int,
        many: bool = False,
        in_full: bool = False,
        work: str = "",
    ) -> Whole:
        """The whole model's step, or ``EVALUATION``, put together."""
        work = work or (STEP if self.work.trains else EVALUATION)
        plan = plan.model_copy(update={"micro_batch_tokens": 1})  # num_rows says what goes together
        if in_full:
            everything = whole_sample(len(self._layers), plan)
            return Whole(self._trace(work, everything, num_rows, num_tokens), everything)
        sample = sample_layers(self._layers, plan, self._adapters)
        if not many or (self._is_square and plan.layers != "stream"):
            return Whole(self._trace(work, sample, num_rows, num_tokens), sample)
        unit = plan.tile_tokens if plan.layers == "stream" else WHOLE_UNIT
        windows = [w + 2 * unit for layer in self._layers if (w := layer.window) and w < num_tokens]
        if plan.layers == "stream" and num_tokens > attention.KEYS_AT_ONCE:
            windows.append(attention.KEYS_AT_ONCE + 3 * unit)
        steady = max([2 * plan.chunk_tokens, *windows])  # beyond it every further unit adds the same
        first = max(2, -(-steady // unit) - 1) * unit + num_tokens % unit  # a first, a last and a middle tile
        lengths = [first, first + unit, first + 2 * unit]
        if num_tokens <= lengths[-1]:
            trace = self._trace(work, sample, num_rows, num_tokens)
        else:
            trace = carry_on([self._trace(work, sample, num_rows, t) for t in lengths], (num_tokens - first) // unit)
        return Whole(trace, sample)

    def _trace(self, work: str, sample: Sample, num_rows: int, num_tokens: int) -> Trace:
        key = (work, sample.picked, sample.plan, num_rows, num_tokens)
        if key not in self._traces:
            if sample.picked not in self._rehearsals:
                self._rehearsals[sample.picked] = self._rehearsal(sample.picked)
            self._traces[key] = self._rehearsals[sample.picked].run(work, sample.plan, num_rows, num_tokens)
        return self._traces[key]

    def _empty(self) -> Any:
        return empty_base(copy.deepcopy(self.work.config), self.work.dtype, quantize=self.work.options.model.quantize)

    def _rehearsal(self, picked: tuple[int, ...]) -> Rehearsal:
        options = self.work.options
        model = self._empty()
        cut_to(model, picked)
        lora = for_some_layers(self._base, options.lora, picked)
        adapted = adapt(model, lora, lambda event: None).model
        build = partial(build_optimizer, options.optimizer) if self.work.trains else None
        answer_tokens = options.evaluate.answer_tokens
        return Rehearsal(adapted, self.contract, build, options.optimizer.clip_norm, self.work.card, answer_tokens)


def _forecast(whole: Whole, plan: MemoryPlan, num_rows: int, num_tokens: int) -> Forecast:
    """Each place's peak; the causes are the device's."""
    device = whole.peak("device")
    by_cause = {name: size for (name, where), size in device.items() if where == "device" and size}
    away = (size for (name, where), size in whole.rest.items() if name == BASE_WEIGHTS and where != "device")
    return Forecast(
        plan=plan,
        num_rows=num_rows,
        num_tokens=num_tokens,
        device_bytes=total(device, "device"),
        host_bytes=total(whole.peak("host"), "host"),
        disk_bytes=total(whole.peak("disk"), "disk"),
        by_cause=dict(sorted(by_cause.items(), key=lambda item: -item[1])),
        work=whole.work,
        weights_away_bytes=sum(away),
    )
