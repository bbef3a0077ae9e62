"""Small runs of a small model, for what happens in a loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from narrowboat.data.batches import StepSchedule
from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine
from narrowboat.events import Event, PlanChanged, StepDone
from narrowboat.model.adapters import adapt
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import LoraOptions, OptimizerOptions, Options, TrainOptions
from narrowboat.owner.gauge import Gauge
from narrowboat.plan import MemoryPlan
from narrowboat.training.checkpoint import Position, restore
from narrowboat.training.governor import Governor
from narrowboat.training.loop import Course, run
from narrowboat.training.recovery import Recovery
from narrowboat.training.saver import Saver
from narrowboat.training.signals import StopRequest

RUNGS = (
    MemoryPlan(layers="keep", micro_batch_tokens=64),
    MemoryPlan(layers="recompute", chunk_tokens=16),
    MemoryPlan(layers="stream", tile_tokens=16, chunk_tokens=8),
    MemoryPlan(layers="stream", tile_tokens=8, chunk_tokens=8, inputs="disk"),
)


class Rows(list[Row]):
    """Rows in memory, as a course wants them."""

    @property
    def lengths(self) -> Any:
        return np.array([row.num_tokens for row in self])


def rows(lengths: Sequence[int], vocab_size: int = 64) -> Rows:
    random = np.random.default_rng(0)
    ids = [random.integers(3, vocab_size, n, dtype=np.int32) for n in lengths]
    return Rows(Row(i, np.where(np.arange(len(i)) % 3, i, -100).astype(np.int32), (len(i),)) for i in ids)


@dataclass
class Run:
    """A small run, ready to go; ``events`` are what it told."""

    folder: Path
    lengths: Sequence[int] = (48, 30, 20, 20, 12, 40, 33, 9)
    rungs: Sequence[MemoryPlan] = RUNGS
    budget_bytes: int = 2**40
    num_steps: int = 5
    num_layers: int = 2
    hidden_size: int = 16
    vocab_size: int = 64
    batch_tokens: int = 64
    optimizer: Any = "adamw"
    rank: int = 2
    targets: tuple[str, ...] = ("all-linear",)
    save_every: int = 0
    evaluate_every: int = 0
    begin_with: MemoryPlan | None = None
    foreseen_bytes: int = 0
    modes: Sequence[Any] = ()
    events: list[Event] = field(default_factory=list)
    optimizer_states: list[dict[str, Any]] = field(default_factory=list)
    gauge: Gauge | None = None

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab_size, hidden_size=self.hidden_size, intermediate_size=2 * self.hidden_size,
            num_hidden_layers=self.num_layers, num_attention_heads=2, num_key_value_heads=1,
            max_position_embeddings=4096,
        )  # fmt: skip

    @property
    def options(self) -> Options:
        return Options(
            lora=LoraOptions(rank=self.rank, targets=self.targets),
            optimizer=OptimizerOptions(name=self.optimizer, lr=1e-2, warmup_steps=1),
            train=TrainOptions(save_every=self.save_every, evaluate_every=self.evaluate_every),
        )

    def go(self, position: Position | None = None, resume: Path | None = None) -> Position:
        """From ``position`` on, with the states of the checkpoint ``resume``."""
        options = self.options
        torch.manual_seed(0)
        model = adapt(LlamaForCausalLM(self.config), options.lora, lambda event: None).model
        optimizer = build_optimizer(options.optimizer, model.named_parameters())
        data = rows(self.lengths)
        schedule = StepSchedule(data.lengths, self.batch_tokens, seed=0, longest_first=True)
        course: Any = Course(data, data[:2], schedule, self.num_steps)  # type: ignore[arg-type]
        governor = Governor(self.rungs, self.budget_bytes, foreseen_bytes=self.foreseen_bytes)
        if self.begin_with is not None:
            governor.begin_with(self.begin_with)
        with ExitStack() as stack:
            self.gauge = stack.enter_context(Gauge(torch.device("cpu"), self.budget_bytes))
            self.gauge.watch_model(model)
            engine = stack.enter_context(Engine(model, optimizer, governor.plan, 0, 1.0))
            recovery = Recovery(engine, self.gauge, governor, self.events.append)
            if resume is not None:
                restore(resume, model, optimizer)
            for mode in self.modes:
                stack.enter_context(mode)
            position = position or Position(0, self.num_steps)
            saver = Saver(self.folder, options.train.keep_checkpoints, self.gauge, 0.9, self.events.append)
            stop = stack.enter_context(StopRequest())
            done = run(recovery, course, options, position, saver, stop, self.events.append)
        self.optimizer_states = [state for state in optimizer.state.values() if "exp_avg" in state]
        return done

    @property
    def steps(self) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone)]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def changes(self) -> list[PlanChanged]:
        return [event for event in self.events if isinstance(event, PlanChanged)]
