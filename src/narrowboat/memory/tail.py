"""What follows the last layer: final norm and head, as the loss needs them, a chunk of tokens at a time.

Where the model's logits are its head's, capped or not, and nothing else, and nothing of the head is trained, the
loss may take the head's weight and do the rest by hand. Any other model is asked for its logits by its own forward
with the backbone left out, so that whatever it does to them is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import cast

import torch
from torch.nn import functional as F

from narrowboat.model.anatomy import Anatomy, stated, text_config
from narrowboat.model.forwards import forward_of
from narrowboat.owner.values import has_values


class Tail:
    """Final norm and head of one model.

    Args:
        anatomy: the model's parts.
        norm: the final norm's name in the backbone, empty where there is none to be left to the loss.

    Attributes:
        latest: the latest layer's output; what the norm is given after the last one.
        softcap: logits are ``softcap * tanh(logits / softcap)``, or None.
        parameters: the trainable parameters of norm and head, and of whatever else follows the backbone.
        by_hand: whether logits are ``weight``, ``bias`` and ``softcap`` applied to the normed hidden states.
    """

    def __init__(self, anatomy: Anatomy, norm: str) -> None:
        self._norm = anatomy.backbone.get_submodule(norm) if norm else None
        self._head, self._bodies, self._forward = anatomy.head, anatomy.bodies, anatomy.causal.forward
        # looked up once: while a loss is computed the norm's forward may be another
        self._norm_forward = self._norm.forward if self._norm is not None else None
        self.latest: torch.Tensor | None = None
        softcap = stated(text_config(anatomy.causal), "final_logit_softcapping")
        self.softcap: float | None = softcap
        self.parameters = list(_trainable_behind(anatomy, [part for part in (self._norm, self._head) if part]))
        frozen = not any(p.requires_grad for p in self._head.parameters())
        self.by_hand = type(self._head) is torch.nn.Linear and frozen and self._does_no_more()

    @property
    def weight(self) -> torch.Tensor:
        """The head's ``[vocabulary, hidden]``."""
        return cast(torch.Tensor, self._head.weight)

    @property
    def bias(self) -> torch.Tensor | None:
        """The head's ``[vocabulary]``, if it has one."""
        return cast(torch.Tensor | None, self._head.bias)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm: ``[batch, tokens, hidden]`` to the same."""
        if self._norm_forward is None:
            return hidden
        normed: torch.Tensor = self._norm_forward(hidden)
        return normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """What the model makes of ``[batch, tokens, hidden]``: ``[batch, tokens, vocabulary]``."""
        with ExitStack() as stack:
            for body in self._bodies:
                stack.enter_context(forward_of(body, lambda *_, **__: _Backbone(normed)))
            logits: torch.Tensor = self._forward(inputs_embeds=normed, use_cache=False).logits
        return logits

    def left_to_the_loss(self) -> AbstractContextManager[None]:
        """A context in which the backbone leaves out its final norm; the same module may run elsewhere as well."""
        return nullcontext() if self._norm is None else forward_of(self._norm, self._later)

    def _later(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if hidden is self.latest else self.norm(hidden)

    @torch.no_grad()
    def _does_no_more(self) -> bool:
        """Ask the model for the logits of small and of large hidden states, which scales and caps treat differently."""
        weight = self.weight
        if not has_values(weight):
            return True
        small = torch.linspace(-1, 1, weight.shape[1], device=weight.device, dtype=weight.dtype).view(1, 1, -1)
        return all(map(self._agrees, (small, small * 64)))

    def _agrees(self, probe: torch.Tensor) -> bool:
        """Whether the model's logits of ``[1, 1, hidden]`` are the head's, capped."""
        weight = self.weight
        mine = F.linear(probe, weight, self.bias).float()
        if self.softcap is not None:
            mine.div_(self.softcap).tanh_().mul_(self.softcap)
        own = self.logits(probe).float()
        tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 2e-2
        largest = max(abs(float(end)) for end in own.aminmax())
        return float(mine.sub_(own).abs_().max()) <= tolerance * largest


def _trainable_behind(anatomy: Anatomy, parts: list[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """Of ``parts``, and of all that lies outside of the backbone and the towers."""
    towers = [anatomy.causal.get_submodule(name) for name in anatomy.towers]
    elsewhere = {id(p) for part in (anatomy.bodies[0], *towers) for p in part.parameters()}
    inside = {id(p) for part in parts for p in part.parameters()}
    for parameter in anatomy.causal.parameters():
        if parameter.requires_grad and (id(parameter) in inside or id(parameter) not in elsewhere):
            yield parameter


class _Backbone:
    """Stands for a backbone's output: the hidden states and nothing else."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None
