"""A plan put on a model: in anybody's loop, undone by leaving the ``with``.

    with install(model, plan):
        model(input_ids=ids, labels=labels).loss.backward()

Layers run as the plan says, attention is ours, and the loss comes straight from the last layer's output without
logits. No class of the model is touched: the instances' forwards are replaced while the ``with`` lasts. Whoever wants
gradients of something else, such as logits or hidden states, gets the same layers. A call that trains nothing is the
model's own, so generation goes on as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch

from narrowboat.errors import AnatomyError, ModelError
from narrowboat.events import Tell
from narrowboat.memory import attention
from narrowboat.memory.causal import CausalForward, Given
from narrowboat.memory.dropout import PlacedDropout, Whereabouts
from narrowboat.memory.layer_call import LayerCall
from narrowboat.memory.layer_stream import stream_layer
from narrowboat.memory.layout import Layout
from narrowboat.memory.recompute import recompute_layer
from narrowboat.memory.router import Routers
from narrowboat.memory.schemes import Scheme
from narrowboat.memory.unread import Unread
from narrowboat.model.anatomy import Anatomy, text_config
from narrowboat.model.forwards import forward_of
from narrowboat.owner.inputs import Store
from narrowboat.owner.owner import Owner
from narrowboat.owner.stride import Strided
from narrowboat.owner.values import has_values
from narrowboat.plan import MemoryPlan
from narrowboat.underway import Underway

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
    store: Store
    given: Given
    further_outputs: list[torch.Tensor] = field(default_factory=list)
    latest: torch.Tensor | None = None


class Installed:
    """A plan on a model; use it as a context manager.

    Attributes:
        anatomy: the model's parts.
        owner: of the model's bytes.
        plan: the plan that it runs under.
        scheme: of attention that is not full.
        underway: hears which layer and tile runs.
        run_layer: runs a layer instead of the plan while it is not None: ``(index, call, input) -> output``.
    """

    def __init__(self, model: torch.nn.Module, plan: MemoryPlan, tell: Tell) -> None:
        self.anatomy = Anatomy.of(model)
        self._causal, self._layers = self.anatomy.causal, self.anatomy.layers
        self._config = text_config(self._causal)
        self.owner = Owner.of(model, tell)
        self._check(plan)
        self.plan = plan
        self.scheme: Scheme | None = None
        self.run_layer: Callable[[int, LayerCall, torch.Tensor], torch.Tensor] | None = None
        self._undo = ExitStack()
        self._whereabouts = Whereabouts()
        self.underway = Underway(len(self._layers))
        self._batch: _MicroBatch | None = None
        self._is_on = False

    def __enter__(self) -> Installed:
        if getattr(self._causal, INSTALLED, None) is not None:
            raise ModelError("A plan is installed on this model already; leave its `with` first, or use its replan().")
        with ExitStack() as undo:
            self._put_on(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def replan(self, plan: MemoryPlan) -> None:
        """Go on under another plan, between two micro-batches; the result stays the same."""
        self._check(plan)
        self.owner.arrange(plan)
        self.plan = plan
        self._forward.chunk_tokens = plan.chunk_tokens

    def _check(self, plan: MemoryPlan) -> None:
        if plan.num_kept_layers > len(self._layers):
            raise ModelError(f"The plan keeps {plan.num_kept_layers} layers; this model has {len(self._layers)}.")
        if plan.layers == "stream" and self.anatomy.untileable_layers:
            raise AnatomyError(
                f"{len(self.anatomy.untileable_layers)} layers cannot be tiled, the first is "
                f"{self.anatomy.untileable_layers[0]}; use the plan recompute."
            )
        if plan.weights != "device" and (plan.layers == "keep" or plan.num_kept_layers):
            raise ModelError(
                f"A plan with weights on {plan.weights} cannot keep layers' activations, which hold on to the "
                "weights; use layers recompute or stream, and num_kept_layers 0."
            )

    def _put_on(self, undo: ExitStack) -> None:
        attention.register()
        undo.callback(self._forget)
        self._routers = Routers(self._causal)
        undo.callback(self._routers.close)
        undo.callback(self.owner.end)
        self.owner.begin(self.anatomy, self.plan)
        self._forward = CausalForward(self.anatomy, self._routers, self.owner.weights, self._whereabouts)
        undo.callback(self._forward.close)
        undo.enter_context(forward_of(self._causal, self._forward))
        backbone = self.anatomy.backbone
        undo.enter_context(forward_of(backbone, partial(self._run_backbone, backbone.forward)))
        known: dict[Hashable, frozenset[str]] = {}
        self._unread = [Unread(layer.module, known) for layer in self._layers]
        for i, layer in enumerate(self._layers):
            self._unread[i].put_on(undo)
            undo.enter_context(forward_of(layer.module, partial(self._layer, i, layer.module.forward)))
        dropouts = [m for m in self._causal.modules() if type(m) is torch.nn.Dropout]
        for i, dropout in enumerate(dropouts):
            undo.enter_context(forward_of(dropout, PlacedDropout(dropout, i, self._whereabouts)))
        self._has_dropout = any(dropout.p > 0 for dropout in dropouts)
        self._is_on = True
        self._forward.chunk_tokens = self.plan.chunk_tokens
        setattr(self._causal, INSTALLED, self)
        undo.callback(delattr, self._causal, INSTALLED)

    def _forget(self) -> None:
        self._batch, self._is_on = None, False

    def _run_backbone(self, own_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The backbone's forward: here a micro-batch begins."""
        given = self._forward.given
        training = torch.is_grad_enabled() and self._causal.training and kwargs.get("past_key_values") is None
        if not self._is_on or self._batch is not None or not (training or given):
            return own_forward(*args, **kwargs)
        arguments = inspect.signature(own_forward).bind_partial(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        by_default = getattr(self._config, "output_router_logits", False)
        wants_routers = arguments.pop("output_router_logits", None)
        self._routers.record(by_default if wants_routers is None else wants_routers)
        self._batch = batch = self._micro_batch(arguments, given or Given())
        try:
            with self._our_attention():
                out = own_forward(**arguments | {"use_cache": False, "output_router_logits": False})
        finally:
            self._batch = None
            self._whereabouts.leave()
        if batch.further_outputs:
            out["router_logits"] = tuple(batch.further_outputs)
        return out

    def _micro_batch(self, arguments: dict[str, Any], given: Given) -> _MicroBatch:
        tokens = arguments.get("input_ids")
        tokens = arguments["inputs_embeds"] if tokens is None else tokens
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        layout = Layout.of(tokens.shape[0], tokens.shape[1], mask, positions, given.lengths)
        self._refuse_unseparated(layout)
        given.seeds = seeds = self._draw_seeds(tokens) if given.seeds is None else list(given.seeds)
        self._at(seeds, given.offset, 0, layout.num_tokens)
        stride, store = self.plan.input_stride, self.owner.inputs
        return _MicroBatch(layout, seeds, Strided(store, stride) if stride > 1 else store, given)

    def _refuse_unseparated(self, layout: Layout) -> None:
        """A state that runs along the tokens would carry one document into the next."""
        most = max((len(documents) for documents in layout.rows), default=0)
        if most > 1 and self.anatomy.untileable_layers:
            raise AnatomyError(
                f"A row holds {most} documents, and they would see each other through "
                f"{self.anatomy.untileable_layers[0]}; give such a model one document a row."
            )

    def _layer(self, index: int, own_forward: Callable[..., Any], x: torch.Tensor, **arguments: Any) -> Any:
        """A decoder layer's forward."""
        if self._batch is None:
            with self.owner.weights.visit_layer(index):
                return own_forward(x, **arguments)
        batch, plan = self._batch, self.plan
        module = self._layers[index].module
        link = None if batch.given.carry is None else batch.given.carry.links[index]
        call = LayerCall(
            module,
            self._under_our_rules(module, own_forward),
            arguments,
            batch.layout if link is None else Layout.of(1, link.num_tokens),
            before=partial(self._before_tile, index, batch),
            collect=partial(self._routers.collect, module),
            visit=partial(self.owner.weights.visit_layer, index),
            attends=self._layers[index].attention is not None,
            link=link,
            scheme=self._scheme_now,
            unread=self._unread[index],
        )
        if self.run_layer is not None:
            return self.run_layer(index, call, x)
        is_kept = plan.layers == "keep" or index >= len(self._layers) - plan.num_kept_layers
        if is_kept:
            out, *further = (call.whole(x), *call.collect())
            self._notice_backwards(index, out)
        elif plan.layers == "recompute":
            out, *further = recompute_layer(x, call, batch.store)
        else:
            ours = x is batch.latest and not module._forward_hooks  # else someone may read it later
            out, *further = stream_layer(x, call, plan.tile_tokens, batch.store, plan.keep_keys_values, ours)
            batch.latest = out
        if link is not None:
            link.hand_on(is_last_use=is_kept or not torch.is_grad_enabled())
        batch.further_outputs += further
        return out

    @property
    def _scheme_now(self) -> Scheme | None:
        shifted = self.scheme is not None and self.scheme.is_shifted
        return None if shifted and not self._causal.training else self.scheme

    def _under_our_rules(self, module: torch.nn.Module, own_forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's own forward, with our attention and without its own checkpointing.

        Backward runs a layer again when the model's own attention is in place again.
        """

        @wraps(own_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._our_attention(), _without_checkpointing(module):
                return own_forward(*args, **kwargs)

        return forward

    @contextmanager
    def _our_attention(self) -> Iterator[None]:
        config = self._config
        before = config._attn_implementation
        config._attn_implementation = attention.ATTENTION_NAME
        try:
            yield
        finally:
            config._attn_implementation = before

    def _before_tile(self, index: int, batch: _MicroBatch, start: int, stop: int) -> None:
        self._at(batch.seeds, batch.given.offset, start, stop)
        if torch.is_grad_enabled() or not self.underway.is_backwards:  # else keys and values are made again
            self.underway.at(index, start, stop, batch.layout.num_tokens)

    def _notice_backwards(self, index: int, out: torch.Tensor) -> None:
        """A layer that was kept is not called again; its output's gradient says when it is its turn."""
        if out.requires_grad and out.grad_fn is not None:
            out.register_hook(lambda _: self.underway.at(index, 0, 1, 1))

    def _at(self, seeds: Sequence[int], offset: int, start: int, stop: int) -> None:
        self._whereabouts.seeds = seeds
        self._whereabouts.move(offset + start, offset + stop)

    def _draw_seeds(self, tokens: torch.Tensor) -> list[int]:
        """From PyTorch's own generator, so that ``torch.manual_seed`` decides; none are drawn without dropout."""
        if not (self._has_dropout and self._causal.training and has_values(tokens)):
            return [0] * tokens.shape[0]
        return torch.randint(0, 2**62, (tokens.shape[0],)).tolist()


@contextmanager
def _without_checkpointing(module: Any) -> Iterator[None]:
    """The plan says what is recomputed, whatever ``gradient_checkpointing_enable`` said."""
    if not getattr(module, "gradient_checkpointing", False):
        yield
        return
    module.gradient_checkpointing = False
    try:
        yield
    finally:
        module.gradient_checkpointing = True
