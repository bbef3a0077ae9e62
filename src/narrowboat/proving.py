"""Proves each technique exact on this machine, in seconds: compares its gradients with those of plain autograd.

The model is small, random and in float32, so that a difference comes from the technique and not from 16-bit rounding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from narrowboat.memory.install import install
from narrowboat.model.adapters import adapt
from narrowboat.options.schema import LoraOptions
from narrowboat.plan import MemoryPlan

EXACT = 1e-4
"""Largest relative difference of two gradients (by the norm of the true one) that rounding explains."""

NUM_TOKENS = 150
TECHNIQUES = {
    "recompute layers": MemoryPlan(layers="recompute", chunk_tokens=32),
    "stream layers in tiles": MemoryPlan(layers="stream", tile_tokens=32, chunk_tokens=32),
    "keep keys and values": MemoryPlan(layers="stream", tile_tokens=32, keep_keys_values=True),
    "hold one input in two": MemoryPlan(layers="stream", tile_tokens=32, input_stride=2),
    "inputs in host memory": MemoryPlan(layers="stream", tile_tokens=32, inputs="host"),
    "inputs in a scratch file": MemoryPlan(layers="stream", tile_tokens=32, inputs="disk"),
    "weights in host memory": MemoryPlan(layers="stream", tile_tokens=32, weights="host"),
    "weights in a scratch file": MemoryPlan(layers="recompute", weights="disk"),
}


@dataclass(frozen=True)
class Proof:
    """The relative difference of a technique's gradients from the true ones, or why the technique failed."""

    technique: str
    difference: float
    seconds: float
    error: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the difference is only rounding."""
        return not self.error and self.difference <= EXACT

    def line(self) -> str:
        """The proof as one line of text."""
        verdict = self.error or f"{'exact' if self.is_exact else 'NOT exact'}, differs by {self.difference:.0e}"
        return f"{self.technique:<26} {verdict}, {self.seconds:.1f} s"


def prove(device: torch.device) -> list[Proof]:
    """Prove all techniques on ``device``."""
    model, ids = _model(device), torch.randint(0, 512, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    truth = _gradients(model)
    return [_prove(name, plan, model, ids, truth) for name, plan in TECHNIQUES.items()]


def _prove(name: str, plan: MemoryPlan, model: torch.nn.Module, ids: torch.Tensor, truth: torch.Tensor) -> Proof:
    began = time.monotonic()
    try:
        with install(model, plan):
            model(input_ids=ids, labels=ids).loss.backward()
        found = _gradients(model)
    except (RuntimeError, OSError, MemoryError) as error:  # whatever this machine lacks for it
        model.zero_grad()
        return Proof(name, float("nan"), time.monotonic() - began, f"failed: {str(error).splitlines()[0][:120]}")
    difference = float((found - truth).norm() / truth.norm())
    return Proof(name, difference, time.monotonic() - began)


def _model(device: torch.device) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = adapt(LlamaForCausalLM(config).to(device), LoraOptions(rank=4), lambda event: None)
        for name, parameter in adapted.model.named_parameters():
            if ".lora_B." in name:  # at zero, A would have no gradient
                torch.nn.init.normal_(parameter, std=0.02)
    return adapted.model.train()


def _gradients(model: torch.nn.Module) -> torch.Tensor:
    """All gradients in one float64 vector; the model's own are cleared."""
    found = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(found)
