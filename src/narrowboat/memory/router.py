"""Mixture of experts: each layer's router logits, collected tile by tile, and the auxiliary loss over all of them.

The load-balancing loss needs every layer's router logits for every token at once (tokens x experts each), so they are
a second output of the layer beside the hidden states, and get their own gradient back. Exact.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from narrowboat.errors import AnatomyError
from narrowboat.model.anatomy import text_config


class Routers:
    """Listens to a model's routers while it is told to record."""

    def __init__(self, causal: torch.nn.Module) -> None:
        self._causal = causal
        self._recording = False
        self._caught: dict[torch.nn.Module, torch.Tensor] = {}
        self._index, kind = _router_of(causal)
        self._routers = [m for m in causal.modules() if kind is not None and isinstance(m, kind)]
        self._handles = [m.register_forward_hook(self._catch) for m in self._routers]
        if any(getattr(m, "jitter_noise", 0) for m in causal.modules()):
            raise AnatomyError(
                "The routers add random jitter, which no two ways of cutting the work draw alike; set it to 0."
            )

    def record(self, on: bool) -> None:
        """From the next layer on, record or do not."""
        self._recording = on and bool(self._routers)
        self._caught.clear()

    def collect(self, layer: torch.nn.Module) -> tuple[torch.Tensor, ...]:
        """The logits ``[batch * tokens, experts]`` that the routers of ``layer`` gave in its last run."""
        if not self._recording:
            return ()
        return tuple(self._caught.pop(m) for m in layer.modules() if m in self._caught)

    @property
    def coefficient(self) -> float:
        """By what the model multiplies its auxiliary loss."""
        return float(getattr(self._causal, "router_aux_loss_coef", 0.0))

    def auxiliary_loss(
        self, logits: Sequence[torch.Tensor] | None, attention_mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The model's own load-balancing loss; None when nothing was recorded."""
        if not logits:
            return None
        function = getattr(sys.modules[type(self._causal).__module__], "load_balancing_loss_func", None)
        if function is None:
            raise AnatomyError(
                f"{type(self._causal).__name__} wants router logits but has no auxiliary loss to use them."
            )
        experts, chosen = self._causal.num_experts, self._causal.num_experts_per_tok
        loss: torch.Tensor = function(tuple(logits), experts, chosen, attention_mask)
        return loss

    def close(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()

    def _catch(self, router: torch.nn.Module, _: Any, output: Any) -> None:
        if self._recording:
            self._caught[router] = output[self._index] if isinstance(output, tuple) else output


def _router_of(causal: torch.nn.Module) -> tuple[int, type[torch.nn.Module] | None]:
    """Which class transformers takes router logits from, and which of its outputs they are."""
    recorded = (getattr(causal, "_can_record_outputs", None) or {}).get("router_logits")
    if recorded is None or not hasattr(text_config(causal), "output_router_logits"):
        return 0, None
    if isinstance(recorded, type):
        return 0, recorded
    return recorded.index, recorded.target_class
