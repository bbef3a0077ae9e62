"""A plan put on a model: in anybody's loop, undone by leaving the ``with``.

    with install(model, plan):
        model(input_ids=ids, labels=labels).loss.backward()

Layers run as the plan says, attention is ours, and the loss comes straight from the last layer's output without
logits. No class of the model is touched: the instance's forwards are replaced while the ``with`` lasts. A call without
labels is the model's own, so evaluation and generation go on as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from narrowboat.errors import AnatomyError, ModelError
from narrowboat.events import Tell
from narrowboat.memory import attention
from narrowboat.memory.carry.handover import Handover
from narrowboat.memory.dropout import PlacedDropout, Whereabouts
from narrowboat.memory.layer_stream import LayerCall, stream_layer
from narrowboat.memory.layout import Layout
from narrowboat.memory.linear_loss import Tail, linear_loss, shift
from narrowboat.memory.offload import InputStore, StridedInputs, input_store
from narrowboat.memory.recompute import recompute_layer
from narrowboat.memory.router import Routers
from narrowboat.model.anatomy import Anatomy, text_config
from narrowboat.plan import MemoryPlan

INSTALLED = "_narrowboat_installed"


def install(model: torch.nn.Module, plan: MemoryPlan, tell: Tell = lambda event: None) -> Installed:
    """Make ``model``, any transformers causal language model with or without PEFT, run under ``plan``.

    Args:
        model: stays as it is but for its instances' forwards, which come back at the end of the ``with``.
        plan: what to keep, recompute, stream and move.
        tell: hears notices, such as memory that could not be pinned.

    Raises:
        AnatomyError: when the model's structure is not understood or a layer cannot be tiled.
        ModelError: when a plan is installed on the model already, or the plan does not go with it.
    """
    return Installed(model, plan, tell)


@dataclass
class _MicroBatch:
    """What all layers need to know of the micro-batch that is on its way."""

    layout: Layout
    seeds: Sequence[int]
    inputs: InputStore
    carry: Handover | None = None
    further_outputs: list[torch.Tensor] = field(default_factory=list)


class Installed:
    """A plan on a model; use it as a context manager."""

    def __init__(self, model: torch.nn.Module, plan: MemoryPlan, tell: Tell) -> None:
        self.anatomy = Anatomy.of(model)
        self._causal, self._layers = self.anatomy.causal, self.anatomy.layers
        self._tell = tell
        self._check(plan)
        self.plan = plan
        self._replaced: list[torch.nn.Module] = []
        self._whereabouts = Whereabouts()
        self._batch: _MicroBatch | None = None
        self._store: InputStore | None = None
        self._routers: Routers | None = None
        self._tail: Tail | None = None

    def __enter__(self) -> Installed:
        if getattr(self._causal, INSTALLED, None) is not None:
            raise ModelError("A plan is installed on this model already; leave its `with` first, or use its replan().")
        attention.register()
        self._own_forward = self._causal.forward
        self._tail = self._make_tail()
        self._replace(self._causal, self._forward)
        for i, layer in enumerate(self._layers):
            self._replace(layer.module, partial(self._layer, i, layer.module.forward))
        dropouts = [m for m in self._causal.modules() if type(m) is torch.nn.Dropout]
        for i, dropout in enumerate(dropouts):
            self._replace(dropout, PlacedDropout(dropout, i, self._whereabouts))
        self._has_dropout = any(dropout.p > 0 for dropout in dropouts)
        self._routers = Routers(self._causal)
        self._store = input_store(self.plan.inputs, self._tell)
        setattr(self._causal, INSTALLED, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module in self._replaced:
            del module.__dict__["forward"]
        self._replaced.clear()
        if self._routers is not None:
            self._routers.close()
        if self._store is not None:
            self._store.close()
        self._batch = self._store = self._routers = self._tail = None
        del self._causal.__dict__[INSTALLED]

    def replan(self, plan: MemoryPlan) -> None:
        """Go on under another plan, between two micro-batches; the result stays the same."""
        self._check(plan)
        if self._store is not None and plan.inputs != self.plan.inputs:
            self._store.close()
            self._store = input_store(plan.inputs, self._tell)
        self.plan = plan

    def _check(self, plan: MemoryPlan) -> None:
        if plan.num_kept_layers > len(self._layers):
            raise ModelError(f"The plan keeps {plan.num_kept_layers} layers; this model has {len(self._layers)}.")
        if plan.layers == "stream" and self.anatomy.untileable_layers:
            raise AnatomyError(
                f"{len(self.anatomy.untileable_layers)} layers cannot be tiled, the first is "
                f"{self.anatomy.untileable_layers[0]}; use the plan recompute."
            )

    def _refuse_unseparated(self, layout: Layout) -> None:
        """A state that runs along the tokens would carry one document into the next."""
        most = max((len(documents) for documents in layout.rows), default=0)
        if most > 1 and self.anatomy.untileable_layers:
            raise AnatomyError(
                f"A row holds {most} documents, and they would see each other through "
                f"{self.anatomy.untileable_layers[0]}; give such a model one document a row."
            )

    def _replace(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        module.__dict__["forward"] = forward
        self._replaced.append(module)

    def _forward(
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
        carry: Handover | None = None,
        **kwargs: Any,
    ) -> Any:
        """The causal language model's forward: with labels, only the loss.

        Beside transformers' arguments it takes ``loss_weights`` ``[batch, tokens]``, aligned with the targets;
        ``lengths``, the documents of each row; ``dropout_seeds``, a number for each row; and ``carry``, where the one
        row is a segment that sees what earlier segments of its document left.
        """
        if labels is None and shift_labels is None:
            return self._own_forward(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                inputs_embeds=inputs_embeds, **kwargs,
            )  # fmt: skip
        tokens = input_ids if input_ids is not None else inputs_embeds
        assert tokens is not None and self._store is not None and self._tail is not None and self._routers is not None
        layout = Layout.of(*tokens.shape[:2], attention_mask, position_ids, lengths)
        self._refuse_unseparated(layout)
        seeds = list(dropout_seeds) if dropout_seeds is not None else self._draw_seeds(tokens)
        stride = self.plan.input_stride
        store = StridedInputs(self._store, stride) if stride > 1 else self._store
        self._batch = _MicroBatch(layout, seeds, store, carry)
        offset = 0 if carry is None else carry.offset
        self._at(seeds, offset, 0, layout.num_tokens)
        by_default = getattr(text_config(self._causal), "output_router_logits", False)
        self._routers.record(kwargs.pop("output_router_logits", by_default))
        try:
            with self._our_attention(), self._without_norm():
                hidden = self.anatomy.backbone(
                    input_ids=input_ids, inputs_embeds=inputs_embeds, position_ids=position_ids, use_cache=False,
                    output_router_logits=False, **_without_cache(kwargs),
                ).last_hidden_state  # fmt: skip
            further = tuple(self._batch.further_outputs)
        finally:
            self._batch = None
        targets = shift_labels if shift_labels is not None else shift(labels)
        loss = linear_loss(hidden, targets, self._tail_for(seeds, offset, layout), self.plan.chunk_tokens, loss_weights)
        loss = loss / _denominator(targets, num_items_in_batch, loss_weights)
        auxiliary = self._routers.auxiliary_loss(further, attention_mask)
        if auxiliary is not None:
            loss = loss + auxiliary
        return CausalLMOutputWithPast(loss=loss)

    def _layer(self, index: int, own_forward: Callable[..., Any], x: torch.Tensor, **arguments: Any) -> Any:
        """A decoder layer's forward."""
        if self._batch is None:
            return own_forward(x, **arguments)
        batch, plan, routers = self._batch, self.plan, self._routers
        assert routers is not None
        module = self._layers[index].module
        link = None if batch.carry is None else batch.carry.links[index]
        call = LayerCall(
            module,
            self._with_attention(own_forward),
            arguments,
            batch.layout if link is None else Layout.of(1, link.num_tokens),
            before=partial(self._at, batch.seeds, 0 if batch.carry is None else batch.carry.offset),
            collect=partial(routers.collect, module),
            attends=self._layers[index].attention is not None,
            link=link,
        )
        is_kept = plan.layers == "keep" or index >= len(self._layers) - plan.num_kept_layers
        if is_kept:
            out, *further = (call.whole(x), *call.collect())
        elif plan.layers == "recompute":
            out, *further = recompute_layer(x, call)
        else:
            out, *further = stream_layer(x, call, plan.tile_tokens, batch.inputs, plan.keep_keys_values)
        if link is not None:
            link.hand_on(is_last_use=is_kept or not torch.is_grad_enabled())
        batch.further_outputs += further
        return out

    def _with_attention(self, own_forward: Callable[..., Any]) -> Callable[..., Any]:
        """Backward runs a layer again when the model's own attention is in place again."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._our_attention():
                return own_forward(*args, **kwargs)

        forward.__wrapped__ = own_forward  # type: ignore[attr-defined]
        return forward

    @contextmanager
    def _our_attention(self) -> Iterator[None]:
        config = text_config(self._causal)
        before = config._attn_implementation
        config._attn_implementation = attention.ATTENTION_NAME
        try:
            yield
        finally:
            config._attn_implementation = before

    @contextmanager
    def _without_norm(self) -> Iterator[None]:
        """The final norm belongs to the loss's chunks."""
        norm = self.anatomy.final_norm
        if norm is None:
            yield
            return
        norm.__dict__["forward"] = lambda x: x
        try:
            yield
        finally:
            del norm.__dict__["forward"]

    def _at(self, seeds: Sequence[int], offset: int, start: int, stop: int) -> None:
        self._whereabouts.seeds = seeds
        self._whereabouts.move(offset + start, offset + stop)

    def _draw_seeds(self, tokens: torch.Tensor) -> list[int]:
        """From PyTorch's own generator, so that ``torch.manual_seed`` decides; none are drawn without dropout."""
        if not (self._has_dropout and self._causal.training) or is_fake(tokens):
            return [0] * tokens.shape[0]
        return torch.randint(0, 2**62, (tokens.shape[0],)).tolist()

    def _tail_for(self, seeds: Sequence[int], offset: int, layout: Layout) -> Tail:
        assert self._tail is not None

        def at(row: int, where: torch.Tensor | slice) -> None:
            self._whereabouts.seeds = seeds
            if isinstance(where, slice):
                first = row * layout.num_tokens - offset
                self._whereabouts.move(where.start - first, where.stop - first, slice(row, row + 1))

        return Tail(
            self._tail.norm, self._tail.head, self._tail.weight, self._tail.bias, self._tail.softcap,
            self._tail.parameters, at,
        )  # fmt: skip

    def _make_tail(self) -> Tail:
        anatomy = self.anatomy
        norm = anatomy.final_norm
        parts = [part for part in (norm, anatomy.head) if part is not None]
        parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
        head = anatomy.head
        softcap = getattr(text_config(self._causal), "final_logit_softcapping", None)
        tail = Tail(norm or (lambda x: x), self._logits, None, None, softcap, parameters)
        if type(head) is not torch.nn.Linear or any(p.requires_grad for p in head.parameters()):
            return tail
        by_hand = Tail(tail.norm, tail.head, head.weight, head.bias, softcap, parameters)
        return by_hand if self._does_no_more(by_hand) else tail

    @torch.no_grad()
    def _does_no_more(self, tail: Tail) -> bool:
        """Whether the model's logits are its head's, capped or not, and nothing else."""
        weight = tail.weight
        assert weight is not None
        if is_fake(weight):
            return True
        probe = torch.linspace(-1, 1, 2 * weight.shape[1], device=weight.device, dtype=weight.dtype).view(1, 2, -1)
        mine = F.linear(probe, weight, tail.bias).float()
        if tail.softcap is not None:
            mine = torch.tanh(mine / tail.softcap) * tail.softcap
        own = self._logits(probe).float()
        return bool(torch.allclose(mine, own, rtol=2e-2, atol=1e-2 * float(own.abs().max())))

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        """What the model makes of ``[batch, tokens, hidden]``, by its own forward with the backbone left out."""
        backbone = self.anatomy.backbone
        backbone.__dict__["forward"] = lambda *_, **__: _Backbone(normed)
        try:
            return self._own_forward(inputs_embeds=normed, use_cache=False).logits
        finally:
            del backbone.__dict__["forward"]


class _Backbone:
    """Stands for a backbone's output: the hidden states and nothing else."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    left_out = ("use_cache", "cache", "past_key_values", "logits_to_keep", "return_dict")
    return {name: value for name, value in kwargs.items() if name not in left_out and value is not None}


def _denominator(
    targets: torch.Tensor, num_items: torch.Tensor | int | None, weights: torch.Tensor | None
) -> torch.Tensor | int:
    if num_items is not None:
        return num_items.to(targets.device) if isinstance(num_items, torch.Tensor) else num_items
    learnt = targets >= 0
    return learnt.sum() if weights is None else (weights * learnt).sum()
