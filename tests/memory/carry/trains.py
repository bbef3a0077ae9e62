"""Trains of random tokens, engines that carry, and what plain autograd makes of the same segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from narrowboat.data.trains import Train
from narrowboat.engine.engine import Engine
from narrowboat.memory.arguments import takes
from narrowboat.memory.carry.carrier import Carrier
from narrowboat.memory.layer_call import CACHE_NAMES
from narrowboat.options.schema import CarryOptions
from narrowboat.plan import MemoryPlan
from tests.memory.families import adapted, gradients

LENGTHS = (13, 9, 16, 7)
CACHE = next(name for name in CACHE_NAMES if takes(LlamaForCausalLM.forward, name))
"""What this transformers calls the argument."""


def train_of(lengths: Sequence[int] = LENGTHS, seed: int = 0, **changes: Any) -> Train:
    ids = np.random.default_rng(seed).integers(3, 96, sum(lengths)).astype(np.int32)
    labels = ids.copy()
    labels[0] = -100
    return Train(ids, labels, tuple(lengths), **changes)


def carry_options(**changes: Any) -> CarryOptions:
    return CarryOptions(**{"policy": "window", "budget": "512", "block_tokens": 4} | changes)


def engine_of(
    plan: MemoryPlan, family: str = "llama", model: torch.nn.Module | None = None, lora: dict[str, Any] | None = None,
    **changes: Any,
) -> Engine:  # fmt: skip
    model = adapted(family, lora=lora, max_position_embeddings=4096) if model is None else model
    trainable = [p for p in model.parameters() if p.requires_grad]
    carrier = Carrier(model, carry_options(**changes), 2**30)
    return Engine(model, torch.optim.SGD(trainable, lr=1.0), plan, pad_id=0, carrier=carrier)


def step_gradients(engine: Engine, trains: Sequence[Train], seed: int = 0) -> tuple[torch.Tensor, float]:
    """All gradients of one step, in one fp64 vector, and its loss."""
    with engine:
        engine.model.train()
        loss, _ = engine._backward(trains, seed)
    found = [p.grad.double().flatten() for p in engine.model.parameters() if p.requires_grad and p.grad is not None]
    engine.forget()
    return torch.cat(found), float(loss)


def plain_gradients(model: torch.nn.Module, train: Train) -> torch.Tensor:
    """Of the whole document at once, by transformers and autograd."""
    ids = torch.from_numpy(train.input_ids.astype(np.int64))[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return gradients(model)
