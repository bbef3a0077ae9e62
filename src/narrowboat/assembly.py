"""A model ready to work: loaded where its plan says, adapted, in an engine, under a gauge; put together here alone.

Training, evaluating, answering, probing a plan and scoring keyframes use the model in different ways, but load it in
the same way. The budget holds from the first byte: the memory gauge starts before the model is read, each weight goes
straight to the place that the plan gives it, and at the end no weight is copied back to the device.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowboat.data.prepare import Prepared
from narrowboat.distributed.ranks import OneProcess, Ranks
from narrowboat.engine.engine import Engine
from narrowboat.engine.scaling import loss_scale
from narrowboat.errors import OutOfMemory
from narrowboat.events import ModelReady, Notice, Tell
from narrowboat.machine.card import let_blocks_grow
from narrowboat.machine.hardware import describe_device, pick_device
from narrowboat.machine.precision import Precision, choose_precision, name_of
from narrowboat.machine.profile import margin_of
from narrowboat.machine.tried import newer_than_tried
from narrowboat.model.adapters import adapt
from narrowboat.model.base import hush_transformers, load_base, load_config, load_tokenizer, weight_reader
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import Options
from narrowboat.owner.gauge import Gauge
from narrowboat.owner.owner import Owner
from narrowboat.plan import MemoryPlan
from narrowboat.settling import carrier_for, scheme_for
from narrowboat.units import format_bytes


@dataclass(frozen=True)
class Setting:
    """What is known about a job before a weight is read.

    Attributes:
        options: the options of the run.
        device: the device that computes.
        precision: number formats by role.
        config: the model's transformers configuration.
        tokenizer: the model's tokenizer.
        tell: receives events.
    """

    options: Options
    device: torch.device
    precision: Precision
    config: Any
    tokenizer: Any
    tell: Tell

    @classmethod
    def of(cls, options: Options, tell: Tell, dtype: str = "") -> Setting:
        """The setting for ``options``; ``dtype`` is the number format that an earlier session of the run chose.

        Raises:
            ModelError: there is no such model, or it is not a causal language model.
        """
        hush_transformers()
        for text in newer_than_tried():
            tell(Notice(text))
        device = pick_device(options.model.device)
        if device.type == "cuda":
            let_blocks_grow()  # before anything is measured there, which takes memory
        precision = choose_precision(dtype or options.model.dtype, device, options.model.quantize)  # type: ignore[arg-type]
        config = load_config(options.model.name, tell, options.model.trust_remote_code)
        tokenizer = load_tokenizer(options.model.name, tell, options.model.trust_remote_code)
        tokenizer.chat_template = options.data.chat_template or tokenizer.chat_template
        return cls(options, device, precision, config, tokenizer, tell)

    @property
    def kind(self) -> str:
        """What the model's class is called, without saying what it is for: ``Llama``."""
        return type(self.config).__name__.removesuffix("Config")


@dataclass
class Assembled:
    """A model ready to work.

    Attributes:
        gauge: measures memory; already entered.
        engine: already entered.
        model: with its adapter, if it has one.
        optimizer: over the adapter; None where nothing is trained.
    """

    gauge: Gauge
    engine: Engine
    model: Any
    optimizer: torch.optim.Optimizer | None


@dataclass
class Wanted:
    """What a job needs the model for.

    Attributes:
        plan: the memory plan to begin with.
        budget_bytes: budget on the device, in bytes.
        trains: whether the job takes optimizer steps.
        has_adapter: whether the model gets an adapter.
        data: the data whose documents may use a carry; None where rows are independent.
        ranks: the processes that do the job.
    """

    plan: MemoryPlan
    budget_bytes: int
    trains: bool = True
    has_adapter: bool = True
    data: Prepared | None = field(default=None, repr=False)
    ranks: Ranks = field(default_factory=OneProcess, repr=False)


@contextmanager
def assembled(setting: Setting, wanted: Wanted, gauge: Gauge | None = None) -> Iterator[Assembled]:
    """Load the model of ``setting`` for what is ``wanted``; at the end, release it without copying weights back.

    Args:
        setting: what is known about the model.
        wanted: what the job needs it for.
        gauge: not entered yet; None makes a new one.

    Raises:
        OutOfMemory: the device cannot hold what the plan leaves on it.
        ModelError, MachineError: weights are damaged, or there is no room at the place that the plan gives them.
    """
    gc.collect()  # an earlier model whose parts know each other is there until then
    with ExitStack() as stack:
        gauge = stack.enter_context(gauge or new_gauge(setting, wanted.budget_bytes))
        gauge.begin("loading")
        try:
            model, optimizer = _load(setting, wanted)
            gauge.watch_model(model)
            engine = stack.enter_context(_engine(setting, wanted, model, optimizer))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(_does_not_load(setting, wanted, gauge, error)) from None
        yield Assembled(gauge, engine, model, optimizer)
        gauge.begin("leaving")


def new_gauge(setting: Setting, budget_bytes: int) -> Gauge:
    """A gauge for the setting's device."""
    return Gauge(setting.device, budget_bytes, margin_of(setting.device).context_bytes)


def _load(setting: Setting, wanted: Wanted) -> tuple[Any, torch.optim.Optimizer | None]:
    options, tell = setting.options, setting.tell
    owner = Owner(setting.device, tell, keeps_files=options.lora.init != "pissa")  # which changes the base
    owner.weights.rest(wanted.plan.weights)
    base, _ = load_base(options.model, setting.precision, setting.device, tell, owner.weights)
    owner.own(base)
    if not wanted.has_adapter:
        return base.requires_grad_(False), None
    torch.manual_seed(options.train.seed)  # of the adapter's first weights
    read = weight_reader(options.model.name, tell) if options.lora.init == "loftq" else None
    adapted = adapt(base, options.lora, tell, read)
    owner.bring(adapted.model)
    tell(
        ModelReady(
            name=options.model.name,
            num_parameters=adapted.num_parameters,
            num_trainable=adapted.num_trainable,
            dtype=name_of(setting.precision.base.dtype),
            device=describe_device(setting.device),
            modules_by_target=adapted.matched,
        )
    )
    if not wanted.trains:
        return adapted.model, None
    return adapted.model, build_optimizer(options.optimizer, adapted.model.named_parameters(), tell)


def _engine(setting: Setting, wanted: Wanted, model: Any, optimizer: torch.optim.Optimizer | None) -> Engine:
    options, tell = setting.options, setting.tell
    carries = wanted.data is not None
    return Engine(
        model,
        optimizer,
        wanted.plan,
        setting.tokenizer.pad_token_id or 0,
        options.optimizer.clip_norm,
        tell,
        loss_scale(options.optimizer, setting.precision.compute.dtype) if wanted.trains else None,
        carrier_for(model, options, wanted.data, setting.device, tell) if carries else None,  # type: ignore[arg-type]
        scheme_for(options),
        ranks=wanted.ranks,
        noise=options.train.neftune_alpha,
    )


def _does_not_load(setting: Setting, wanted: Wanted, gauge: Gauge, error: Exception) -> str:
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in list(gauge.by_cause().items())[:3])
    return (
        f"Memory ran out while {setting.options.model.name} was loaded for the plan ({wanted.plan.describe()}): "
        f"{str(error).splitlines()[0]} memory.budget is {format_bytes(wanted.budget_bytes)}. Largest parts: {parts}. "
        "A larger memory.budget or model.quantize: nf4 would help."
    )
