"""The causal language model's forward under a plan: with labels, only the loss, and no logits.

It takes what transformers' models take, what their trainers and TRL's add to it, and what our own loop knows besides.
A call without labels is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput

from narrowboat.errors import AnatomyError, ModelError
from narrowboat.memory.arguments import parameters_of
from narrowboat.memory.carry.handover import Handover
from narrowboat.memory.dropout import Whereabouts
from narrowboat.memory.layer_call import CACHE_NAMES
from narrowboat.memory.linear_loss import Measures, linear_loss, shift
from narrowboat.memory.reading import Reading
from narrowboat.memory.router import Routers
from narrowboat.memory.tail import Tail
from narrowboat.model.anatomy import Anatomy
from narrowboat.owner.values import has_values
from narrowboat.owner.weights import Weights

NOT_FOR_BACKBONE = (*CACHE_NAMES, "use_cache", "logits_to_keep", "num_logits_to_keep", "return_dict")


@dataclass
class Given:
    """What the caller says of a micro-batch beside the model's own arguments; without seeds some are drawn."""

    lengths: Sequence[Sequence[int]] | None = None
    seeds: Sequence[int] | None = None
    carry: Handover | Reading | None = None

    @property
    def offset(self) -> int:
        """Place of the first token in its document: dropout follows from it."""
        return 0 if self.carry is None else self.carry.offset


@dataclass
class FusedOutput(ModelOutput):
    """What TRL's trainers expect of ``fused_lm_head``: a number for each predicted token, 0 where nothing is learnt."""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


class CausalForward:
    """Stands in for a causal language model's forward.

    Attributes:
        chunk_tokens: tokens whose logits are alive together.
        tail: final norm and head.
        given: what was said of the micro-batch while it is on its way through the backbone.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        tail: Tail,
        routers: Routers,
        weights: Weights,
        whereabouts: Whereabouts,
        shifts: bool = True,
    ) -> None:
        self._own_forward: Callable[..., Any] = anatomy.causal.forward
        self._causal, self._backbone, self.tail = anatomy.causal, anatomy.backbone, tail
        self._routers, self._weights, self._whereabouts = routers, weights, whereabouts
        self._closed, self._shifts = False, shifts
        self.chunk_tokens = 1
        self.given: Given | None = None

    def _targets(self, labels: torch.Tensor) -> torch.Tensor:
        """What each position has to predict, as the model itself understands labels."""
        return shift(labels) if self._shifts else labels

    def close(self) -> None:
        """From here on pass calls on: somebody may have put his own forward around this one."""
        self._closed = True

    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        loss_weights: torch.Tensor | None = None,
        lengths: Sequence[Sequence[int]] | None = None,
        dropout_seeds: Sequence[int] | None = None,
        fused_lm_head: bool = False,
        by_token: bool = False,
        learnt: torch.Tensor | None = None,
        carry: Handover | Reading | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model; with labels, only as far as the loss.

        Most arguments are transformers' own. ``shift_labels`` are labels that are targets already, and by
        ``num_items_in_batch`` the summed loss is divided. Ours are ``loss_weights``, ``[batch, tokens]``, a factor for
        the loss of each target; ``lengths``, those of each row's documents; ``dropout_seeds``, a number for each row,
        from which its dropout follows; ``learnt``, flat positions of targets that are learnt, which spares asking the
        device for them; ``by_token``, for a loss of each target, ``[batch, tokens]``; and ``carry``,
        where the one row is a segment that sees what earlier segments of its document left, or, without labels, what
        has been read: then the last token's logits are given. ``fused_lm_head`` is TRL's: it wants each token's
        log-probability, entropy and whether it is the likeliest.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        if isinstance(carry, Reading):
            return self._read_on(inputs, carry, kwargs)
        if self._closed or (labels is None and shift_labels is None):
            theirs = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            with self._head_for_logits():
                return self._own_forward(**{k: v for k, v in (inputs | theirs).items() if v is not None}, **kwargs)
        targets = self._targets(cast(torch.Tensor, labels)) if shift_labels is None else shift_labels
        self.given = given = Given(lengths, dropout_seeds, carry)
        try:
            with self.tail.left_to_the_loss():
                out = self._backbone(**self._for_backbone(inputs | kwargs))
        finally:
            self.given = self.tail.latest = None
        measures = Measures.like(targets) if fused_lm_head else None
        at = partial(self._at_chunk, given, targets.shape[1])
        with self._weights.visit_head():
            losses = linear_loss(out[0], targets, self.tail, self.chunk_tokens, loss_weights, at, measures, learnt)
        self._whereabouts.leave()
        auxiliary = self._routers.auxiliary_loss(out.get("router_logits"), attention_mask)
        if measures is not None:
            return _fused(losses, measures, targets, auxiliary, whole=shift_labels is not None)
        if by_token:
            return CausalLMOutputWithPast(loss=losses)
        loss = losses.sum() / _denominator(targets >= 0, num_items_in_batch, loss_weights)
        if auxiliary is not None:
            loss = loss + self._routers.coefficient * auxiliary
        return CausalLMOutputWithPast(loss=loss)

    def _for_backbone(self, given: dict[str, Any]) -> dict[str, Any]:
        """What the backbone takes of it."""
        known = parameters_of(self._backbone.forward)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
        found = {name: value for name, value in given.items() if name not in NOT_FOR_BACKBONE and value is not None}
        positions = found.get("position_ids")
        if positions is not None and not takes_all and "position_ids" not in known:
            _refuse_moved(positions, type(self._causal).__name__)
            del found["position_ids"]
        return {name: value for name, value in found.items() if takes_all or name in known}

    def _read_on(self, inputs: dict[str, Any], reading: Reading, kwargs: dict[str, Any]) -> CausalLMOutputWithPast:
        """Logits ``[rows, 1, vocabulary]`` of the last token."""
        self.given = Given(None, [0] * reading.num_rows, reading)
        try:
            with self.tail.left_to_the_loss():
                out = self._backbone(**self._for_backbone(inputs | kwargs))
        finally:
            self.given = self.tail.latest = None
        self._whereabouts.leave()
        with self._weights.visit_head():
            logits = self.tail.logits(self.tail.norm(out[0][:, -1:]))
        return CausalLMOutputWithPast(logits=logits)

    @contextmanager
    def _head_for_logits(self) -> Iterator[None]:
        if self._weights.copies and torch.is_grad_enabled() and self._causal.training:
            raise ModelError(
                "Gradients of logits need the head for longer than its visit, and the plan's weights do not rest on "
                "the device; give the model labels, or choose a plan with weights on the device."
            )
        with self._weights.visit_head():
            yield

    def _at_chunk(self, given: Given, num_tokens: int, row: int, where: torch.Tensor | slice) -> None:
        self._whereabouts.seeds = given.seeds or ()
        if isinstance(where, slice):  # else the head is frozen and drops nothing
            first = row * num_tokens - given.offset
            self._whereabouts.move(where.start - first, where.stop - first, slice(row, row + 1))


def _fused(
    losses: torch.Tensor, measures: Measures, targets: torch.Tensor, auxiliary: torch.Tensor | None, whole: bool
) -> FusedOutput:
    """TRL leaves out the last position, which predicts nothing, unless it shifted the labels itself."""
    kept = slice(None) if whole else slice(-1)
    return FusedOutput(
        log_probs=-losses[:, kept],
        entropy=measures.entropy[:, kept],
        is_top1=measures.correct[:, kept],
        label_mask=(targets >= 0)[:, kept],
        aux_loss=auxiliary,
    )


def _refuse_moved(positions: torch.Tensor, name: str) -> None:
    """Tokens that do not count from 0 are more than a model without position ids can be told."""
    if has_values(positions) and not bool(
        (positions == torch.arange(positions.shape[-1], device=positions.device)).all()
    ):
        raise AnatomyError(
            f"{name} takes no position ids, so that each row has to be one document; set packing.enabled: false."
        )


def _denominator(
    learnt: torch.Tensor, num_items: torch.Tensor | int | None, weights: torch.Tensor | None
) -> torch.Tensor | int:
    """By what the summed loss is divided; a batch in which nothing is learnt has a loss of 0."""
    if num_items is not None:
        return num_items.to(learnt.device) if isinstance(num_items, torch.Tensor) else num_items
    if weights is None:
        return learnt.sum().clamp(min=1)
    total = (weights * learnt).sum()
    return torch.where(total == 0, torch.ones_like(total), total)
