"""A rehearsal: ``Engine.step`` itself, run by a small model of fake tensors, so a forecast cannot drift from the code.

No weight is read and nothing is computed. The model has a few of the real one's layers (``sample``); what came of each
moment of its step is put together to the whole model's in ``forecast``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine
from narrowboat.machine.rates import Capability
from narrowboat.memory.contract import Contract
from narrowboat.model.anatomy import Anatomy, text_config
from narrowboat.model.empty import give_fake_tensors
from narrowboat.model.leaves import frozen_leaves
from narrowboat.model.miniature import keep_layers
from narrowboat.owner.owner import Owner
from narrowboat.owner.values import forecast_of
from narrowboat.plan import MemoryPlan
from narrowboat.planner.amounts import Work
from narrowboat.planner.fakes import RememberingFakeMode
from narrowboat.planner.recorder import BACKWARD, FORWARD, LOSS, START, UPDATE, Bytes, Moment, Recorder, Slot

FIRST_TOKENS = 8

STEP, EVALUATION, READING = "step", "evaluation", "reading"
"""What may be rehearsed."""


@dataclass(frozen=True)
class Part:
    """One moment of a step.

    Attributes:
        peaks: by where and by operator the most that was alive there, above what was when the moment began.
        left: what is alive at its end above what was when it began; negative where it frees.
        work: its operations.
    """

    peaks: dict[Any, Bytes]
    left: Bytes
    work: Work


@dataclass(frozen=True)
class Trace:
    """One step or one evaluation, by moment.

    Attributes:
        rest: alive before it.
        parts: its moments.
        layers: for each layer its weights, gradients, states and copies of them.
        states: of those the states and all copies, which the first step does not find yet.
        copies: of those the copies of states, which the first step does not make.
    """

    rest: Bytes
    parts: dict[Moment, Part]
    layers: list[Bytes]
    states: list[Bytes]
    copies: list[Bytes]


class Rehearsal:
    """A model of fake tensors ready to be stepped, under any plan and over any shape.

    Args:
        model: on ``meta``, with its adapter.
        contract: what the whole model asks for.
        build_optimizer: over the model's named parameters; None for a model that only evaluates.
        clip_norm: the engine's.
        card: the kind of card that it is to run on; None is a CPU.
        answer_tokens: that may be written behind what is read.
    """

    def __init__(
        self,
        model: nn.Module,
        contract: Contract,
        build_optimizer: Callable[[Any], torch.optim.Optimizer] | None,
        clip_norm: float,
        card: Capability | None = None,
        answer_tokens: int = 0,
    ) -> None:
        self._anatomy, self._answer_tokens = Anatomy.of(model), answer_tokens
        self._card = card
        self._fakes, self._recorder = RememberingFakeMode(), Recorder(card is not None)
        with self._fakes:
            give_fake_tensors(model)
        Owner(torch.device("cpu"), as_card=card is not None).own(model)
        with _leaving_no_rings(), forecast_of(card), self._fakes, self._recorder:
            self._recorder.watch_model(model)
            self._optimizer = build_optimizer(model.named_parameters()) if build_optimizer else None
            plan = MemoryPlan(layers="keep")
            self._engine = Engine(model, self._optimizer, plan, pad_id=0, clip_norm=clip_norm, contract=contract)
            self._engine.__enter__()  # for good: the model is the rehearsal's own
            for _ in range(2 if self._optimizer else 0):  # its states are made, and what could take them back
                self._work(STEP, self._engine.plan, 1, FIRST_TOKENS)

    def run(self, work: str, plan: MemoryPlan, num_rows: int, num_tokens: int) -> Trace:
        """One ``STEP``, ``EVALUATION`` or ``READING`` of a micro-batch ``[num_rows, num_tokens]``."""
        recorder = self._recorder
        recorder.forget()
        with _leaving_no_rings(), forecast_of(self._card), self._fakes, recorder, self._moments():
            self._engine.replan(plan.model_copy(update={"inputs": "device"}))  # gives back what a longer row had taken
            self._work(work, plan, num_rows, num_tokens)
            own = [self._own(layer.module) for layer in self._anatomy.layers]
        order = list(recorder.begun)
        ends = [recorder.begun[after] for after in order[1:]] + [recorder.alive()]
        parts = {}
        for moment, end in zip(order, ends, strict=True):
            begun = recorder.begun[moment]
            peaks = {key: minus(alive, begun) for key, alive in recorder.peaks[moment].items()}
            parts[moment] = Part(peaks, minus(end, begun), sum(recorder.work[moment], Work()))
        return Trace(recorder.begun[START, 0], parts, *(list(kind) for kind in zip(*own, strict=True)))

    def _work(self, work: str, plan: MemoryPlan, num_rows: int, num_tokens: int) -> None:
        zeros = np.zeros(num_tokens, dtype=np.int32)
        rows = [Row(zeros, zeros, (num_tokens,))] * num_rows
        self._engine.replan(plan.model_copy(update={"micro_batch_tokens": num_rows * num_tokens}))
        self._recorder.begin(START)
        if work == EVALUATION:
            self._engine.evaluate(rows)
        elif work == READING:
            reading = self._engine.reading(num_tokens + self._answer_tokens)
            self._engine.read_on(reading, torch.zeros(1, num_tokens, dtype=torch.long))
            reading.release()
        else:
            self._engine.step(rows, 1e-4, seed=0, after_micro_batch=lambda: self._recorder.begin(UPDATE))
        self._recorder.end()

    @contextmanager
    def _moments(self) -> Iterator[None]:
        """Tell the recorder when a layer begins, forwards and backwards, and when the loss does.

        No hook sees a layer's output: an engine would take it for somebody who wants to keep it.
        """
        layers, backbone = [layer.module for layer in self._anatomy.layers], self._anatomy.backbone

        def enter(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index:
                self._announce(args[0] if args else kwargs["hidden_states"], index - 1)
            self._recorder.begin(FORWARD, index)

        def leave(output: Any) -> None:
            self._announce(output[0], len(layers) - 1)
            self._recorder.begin(LOSS)

        with ExitStack() as stack:
            for i, layer in enumerate(layers):
                hook = layer.register_forward_pre_hook(lambda *given, i=i: enter(i, *given[1:]), with_kwargs=True)
                stack.callback(hook.remove)
            stack.callback(backbone.register_forward_hook(lambda *given: leave(given[2])).remove)
            yield

    def _announce(self, output: torch.Tensor, layer: int) -> None:
        """Backwards a layer begins when the gradient of its output is there."""
        if output.requires_grad:  # no gradient comes to what lies before the first adapter
            output.register_hook(lambda _: self._recorder.begin(BACKWARD, layer))

    def _own(self, layer: nn.Module) -> tuple[Bytes, Bytes, Bytes]:
        """What belongs to a layer between steps; of that states and copies; of that copies of states."""
        parameters = list(layer.parameters())
        tensors = [leaf.tensor for leaf in frozen_leaves(layer, set())] + list(layer.buffers())
        tensors += [p for p in parameters if p.requires_grad] + [p.grad for p in parameters if p.grad is not None]
        states = [t for p in parameters for t in self._states(p)]
        copies = [copy for p in parameters for copy in self._engine.undo.copies_of(p)]
        of_states = [copy for p in parameters for copy in self._engine.undo.copies_of(p)[1:]]
        of = self._recorder.of
        return of(tensors + states + copies), of(states + copies), of(of_states)

    def _states(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        states = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
        return [value for value in states.values() if isinstance(value, torch.Tensor)]


def cut_to(model: nn.Module, picked: tuple[int, ...]) -> None:
    """Leave only the layers ``picked`` in ``model``, which is on ``meta`` and has no adapter yet."""
    anatomy = Anatomy.of(model)
    config = text_config(anatomy.causal)
    name = anatomy.layers[0].name.rpartition(".")[0]
    owner, _, attribute = name.rpartition(".")
    kept = nn.ModuleList(anatomy.layers[i].module for i in picked)
    setattr(anatomy.causal.get_submodule(owner), attribute, kept)
    keep_layers(config, picked)


def minus(a: Bytes, b: Bytes) -> Bytes:
    """``a - b``, slot by slot."""
    slots: set[Slot] = a.keys() | b.keys()
    return {slot: size for slot in slots if (size := a.get(slot, 0) - b.get(slot, 0))}


@contextmanager
def _leaving_no_rings() -> Iterator[None]:
    """Free what is left in rings of references, which the next rehearsal would count.

    Only what is made in here is looked through: all that torch has loaded takes a third of a second each time.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
