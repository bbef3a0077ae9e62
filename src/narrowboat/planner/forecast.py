"""The forecast: the real step, run on tensors that have shapes but no memory, and metered.

It is not a formula kept beside the code: ``Engine.step`` itself runs under ``FakeTensorMode``, so it cannot drift from
what it forecasts. Seconds of arithmetic-free Python; no weight is read.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowboat.data.examples import Row
from narrowboat.engine.engine import Engine
from narrowboat.memory.meter import Meter, Reading
from narrowboat.model.adapters import adapt
from narrowboat.model.base import empty_base
from narrowboat.optimizers.build import build_optimizer
from narrowboat.options.schema import Options
from narrowboat.plan import MemoryPlan


@dataclass(frozen=True)
class Workload:
    """What has to fit: a model with its adapter and optimizer, and its longest row.

    Attributes:
        config: the transformers configuration.
        options: the run's.
        dtype: of the base weights.
        row_tokens: tokens of the longest row.
    """

    config: Any
    options: Options
    dtype: torch.dtype
    row_tokens: int


def forecast(work: Workload, plan: MemoryPlan) -> Reading:
    """The peak of the second step over one row of ``work.row_tokens``: optimizer states are there by then."""
    row = Row(np.zeros(work.row_tokens, dtype=np.int32), np.zeros(work.row_tokens, dtype=np.int32), (work.row_tokens,))
    model = adapt(
        empty_base(work.config, work.dtype, quantize=work.options.model.quantize), work.options.lora, lambda event: None
    ).model  # on meta
    with FakeTensorMode(), ExitStack() as stack:
        _give_shapes(model)
        meter = stack.enter_context(Meter())
        meter.watch_model(model)
        optimizer = build_optimizer(work.options.optimizer, model.named_parameters())
        with Engine(model, optimizer, plan, pad_id=0, clip_norm=work.options.optimizer.clip_norm) as engine:
            engine.step([row], learning_rate=1e-4, seed=0)
            meter.reset_peak()
            engine.step([row], learning_rate=1e-4, seed=0)
        return meter.peak


def _give_shapes(model: torch.nn.Module) -> None:
    """Replace the tensors of a model on ``meta`` by fake ones of the CPU; tied ones stay tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
