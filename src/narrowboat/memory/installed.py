"""A plan put on a model whose contract is known, undone by leaving the ``with``.

Layers run as the plan says, attention is ours where the contract says so, and the loss comes straight from the last
layer's output without logits. No class of the model is touched: the instances' forwards are replaced while the
``with`` lasts. Whoever wants gradients of something else, such as logits or hidden states, gets the same layers. A call
that trains nothing is the model's own, so generation goes on as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, wraps
from typing import Any

import torch

from narrowboat.errors import AnatomyError, ModelError
from narrowboat.events import Tell
from narrowboat.memory import attention
from narrowboat.memory.arguments import bound, parameters_of
from narrowboat.memory.causal import CausalForward, Given
from narrowboat.memory.contract import Contract
from narrowboat.memory.dropout import PlacedDropout, PlacedFunctions, Whereabouts
from narrowboat.memory.layer_call import CACHE_NAMES, LayerCall
from narrowboat.memory.layer_stream import stream_layer
from narrowboat.memory.micro_batch import MicroBatch, refuse_unseparated, tokens_and_layout
from narrowboat.memory.noise import add_noise
from narrowboat.memory.recompute import recompute_layer, without_checkpointing
from narrowboat.memory.router import Routers
from narrowboat.memory.schemes import Scheme
from narrowboat.memory.surroundings import Surroundings
from narrowboat.memory.tail import Tail
from narrowboat.memory.unread import Unread
from narrowboat.model.anatomy import Anatomy, text_config
from narrowboat.model.forwards import forward_of
from narrowboat.model.inner_bitsandbytes import without_repacking
from narrowboat.owner.owner import Owner
from narrowboat.owner.stride import Strided
from narrowboat.owner.values import has_values
from narrowboat.plan import MemoryPlan
from narrowboat.underway import Underway

INSTALLED = "_narrowboat_installed"


class Installed:
    """A plan on a model; use it as a context manager.

    Args:
        model: stays as it is but for its instances' forwards, which come back at the end of the ``with``.
        plan: what to keep, recompute, stream and move.
        contract: what the model and its layers ask for.
        tell: hears notices, such as memory that could not be pinned.
        drops: whether the model's dropout is on.

    Attributes:
        anatomy: the model's parts.
        owner: of the model's bytes.
        plan: the plan that it runs under.
        scheme: of attention that is not full.
        noise: alpha of NEFTune's noise on the embeddings while training; 0 adds none.
        underway: hears which layer and tile runs.
        run_layer: runs a layer instead of the plan while it is not None: ``(index, call) -> outputs``.

    Raises:
        AnatomyError: when the model's structure is not understood, or the plan would not be right for it.
        ModelError: when a plan is installed on the model already, or the plan does not go with it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: MemoryPlan,
        contract: Contract,
        tell: Tell = lambda event: None,
        drops: bool = True,
    ) -> None:
        self.anatomy, self.contract = Anatomy.of(model), contract
        self._causal, self._layers = self.anatomy.causal, self.anatomy.layers
        self._contracts = [contract.of(layer) for layer in self._layers]
        self._config = text_config(self._causal)
        self._attention = attention.Switch(self.anatomy.backbone)
        self.owner = Owner.of(model, tell)
        self._check(plan)
        self.plan = plan
        self.scheme: Scheme | None = None
        self.noise = 0.0
        self.run_layer: Callable[[int, LayerCall], list[torch.Tensor]] | None = None
        self._undo = ExitStack()
        self.underway = Underway(len(self._layers))
        self._whereabouts = Whereabouts(is_off=not drops)
        self._batch: MicroBatch | None = None
        self._is_on = self._collects = False

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
        if plan.layers in self.contract.refused:
            raise AnatomyError(
                f"{type(self._causal).__name__} cannot run under plans with layers {plan.layers}: "
                f"{self.contract.refused[plan.layers]}"
            )
        if plan.weights != "device" and (plan.layers == "keep" or plan.num_kept_layers):
            raise ModelError(
                f"A plan with weights on {plan.weights} cannot keep layers' activations, which hold on to the "
                "weights; use layers recompute or stream, and num_kept_layers 0."
            )

    def _put_on(self, undo: ExitStack) -> None:
        attention.register()
        undo.callback(self._forget)
        undo.enter_context(without_repacking(self._causal))
        self._routers = Routers(self._causal)
        undo.callback(self._routers.close)
        undo.callback(self.owner.end)
        self.owner.begin(self.anatomy, self.plan)
        tail = Tail(self.anatomy, self.contract.norm)
        self._forward = CausalForward(
            self.anatomy, tail, self._routers, self.owner.weights, self._whereabouts, self.contract.shifts
        )
        undo.callback(self._forward.close)
        undo.enter_context(forward_of(self._causal, self._forward))
        backbone = self.anatomy.backbone
        undo.enter_context(forward_of(backbone, partial(self._run_backbone, backbone.forward)))
        undo.callback(self.anatomy.embedding.register_forward_hook(self._embedded).remove)
        self._unread = [
            Unread(layer.module, contract.unread) for layer, contract in zip(self._layers, self._contracts, strict=True)
        ]
        for i, layer in enumerate(self._layers):
            self._unread[i].put_on(undo)
            undo.enter_context(forward_of(layer.module, partial(self._layer, i, layer.module.forward)))
        dropouts = [m for m in self._causal.modules() if type(m) is torch.nn.Dropout]
        for i, dropout in enumerate(dropouts):
            undo.enter_context(forward_of(dropout, PlacedDropout(dropout, i, self._whereabouts)))
        self._has_dropout = self.contract.draws or any(dropout.p > 0 for dropout in dropouts)
        self._is_on = True
        self._forward.chunk_tokens = self.plan.chunk_tokens
        setattr(self._causal, INSTALLED, self)
        undo.callback(delattr, self._causal, INSTALLED)

    def _forget(self) -> None:
        self._batch, self._is_on = None, False

    def _run_backbone(self, own_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The backbone's forward: here a micro-batch begins."""
        given = self._forward.given
        has_cache = any(kwargs.get(name) is not None for name in CACHE_NAMES)
        training = torch.is_grad_enabled() and self._causal.training and not has_cache
        if not self._is_on or self._batch is not None or not (training or given):
            return own_forward(*args, **kwargs)
        names = [name for name, p in parameters_of(own_forward).items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        by_default = getattr(self._config, "output_router_logits", False)
        wants_routers = arguments.pop("output_router_logits", None)
        self._routers.record(by_default if wants_routers is None else wants_routers)
        wants_states = arguments.get("output_hidden_states")
        self._collects = bool(self._config.output_hidden_states if wants_states is None else wants_states)
        self._batch = batch = self._micro_batch(arguments, given or Given())
        known = parameters_of(own_forward)
        quiet = {name: False for name in ("use_cache", "output_router_logits") if name in known or "kwargs" in known}
        try:
            with self._attention(is_ours=not self.contract.own_masks), self._placed():
                out = own_forward(**arguments | quiet)
        finally:
            self._batch = None
            self._whereabouts.leave()
        if batch.further_outputs:
            out["router_logits"] = tuple(batch.further_outputs)
        return out

    def _micro_batch(self, arguments: dict[str, Any], given: Given) -> MicroBatch:
        tokens, layout = tokens_and_layout(arguments, given.lengths)
        if not self.contract.separates:
            refuse_unseparated(layout, type(self._causal).__name__)
        given.seeds = seeds = self._draw_seeds(tokens) if given.seeds is None else list(given.seeds)
        self._at(seeds, given.offset, 0, layout.num_tokens)
        stride, store = self.plan.input_stride, self.owner.inputs
        return MicroBatch(layout, seeds, Strided(store, stride) if stride > 1 else store, given)

    def _embedded(self, _: torch.nn.Module, __: Any, embeddings: torch.Tensor) -> None:
        if self.noise and self._batch is not None and self._causal.training:
            batch = self._batch
            add_noise(embeddings, self.noise, batch.layout, batch.seeds, batch.given.offset)

    def _layer(self, index: int, own_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A decoder layer's forward."""
        if self._batch is None:
            with self.owner.weights.visit_layer(index):
                return own_forward(*args, **kwargs)
        batch, layer = self._batch, self._layers[index]
        x, arguments = bound(own_forward, args, kwargs)
        call = LayerCall(
            layer.module,
            self._under_our_rules(index, own_forward),
            x,
            arguments,
            self._contracts[index],
            self._surroundings(index, batch),
        )
        if self.run_layer is not None:
            return call.returned(self.run_layer(index, call))[0]
        out, further = call.returned(self._run(index, call, batch, is_ours=x is batch.latest))
        batch.further_outputs += further
        batch.latest = out[0] if isinstance(out, tuple) else out
        self._forward.tail.latest = batch.latest
        return out

    def _run(self, index: int, call: LayerCall, batch: MicroBatch, is_ours: bool) -> list[torch.Tensor]:
        """As the plan says; ``is_ours``: the input is another layer's output."""
        plan, contract = self.plan, self._contracts[index]
        link = None if batch.given.carry is None else batch.given.carry.links[index]
        is_kept = plan.layers == "keep" or index >= len(self._layers) - plan.num_kept_layers
        if is_kept:
            outputs = call.whole(call.inputs)
            self._notice_backwards(index, outputs[0])
        elif plan.layers == "recompute" or contract.tiles == "none":
            outputs = recompute_layer(call, batch.store)
        else:
            overwrite = is_ours and contract.token_dim == 1 and not self._is_read_later(index)
            whole = link is not None and link.takes_whole_segments
            tile_tokens = max(plan.tile_tokens, call.num_tokens) if whole else plan.tile_tokens
            outputs = stream_layer(call, tile_tokens, batch.store, plan.keep_keys_values, overwrite)
        if link is not None:
            link.hand_on(is_last_use=is_kept or not torch.is_grad_enabled())
        return outputs

    def _is_read_later(self, index: int) -> bool:
        """Whether somebody may look at the layer's input after it has run."""
        return self.contract.keeps_inputs or self._collects or bool(self._layers[index].module._forward_hooks)

    def _surroundings(self, index: int, batch: MicroBatch) -> Surroundings:
        module = self._layers[index].module
        link = None if batch.given.carry is None else batch.given.carry.links[index]
        return Surroundings(
            layout=batch.layout if link is None else link.layout,
            before=partial(self._before_tile, index, batch.seeds, batch.given.offset, batch.layout.num_tokens),
            draws=self._whereabouts.draw if self._causal.training and not self._whereabouts.is_off else None,
            collect=partial(self._routers.collect, module),
            visit=partial(self.owner.weights.visit_layer, index),
            window=self._layers[index].window,
            chunk=self._layers[index].chunk,
            link=link,
            scheme=self._scheme_now,
            leaving_out=self._unread[index].left_out,
        )

    @property
    def _scheme_now(self) -> Scheme | None:
        shifted = self.scheme is not None and self.scheme.is_shifted
        return None if shifted and not self._causal.training else self.scheme

    def _under_our_rules(self, index: int, own_forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's own forward, with our attention and without its own checkpointing.

        Backward runs a layer again when the model's own attention is in place again.
        """
        module, is_ours = self._layers[index].module, self._contracts[index].attention == "ours"

        @wraps(own_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._attention(is_ours), without_checkpointing(module), self._placed():
                return own_forward(*args, **kwargs)

        return forward

    def _placed(self) -> AbstractContextManager[Any]:
        """Dropout by functions follows from where a token stands, if there is any."""
        here = self._whereabouts
        is_wanted = here.is_off or (self.contract.draws and self._causal.training and bool(here.seeds))
        return PlacedFunctions(here) if is_wanted else nullcontext()

    def _before_tile(
        self, index: int, seeds: Sequence[int], offset: int, num_tokens: int, start: int, stop: int
    ) -> None:
        self._at(seeds, offset, start, stop, layer=index)
        if torch.is_grad_enabled() or not self.underway.is_backwards:  # else keys and values are made again
            self.underway.at(index, start, stop, num_tokens)

    def _notice_backwards(self, index: int, out: torch.Tensor) -> None:
        """A layer that was kept is not called again; its output's gradient says when it is its turn."""
        if out.requires_grad and out.grad_fn is not None:
            out.register_hook(lambda _: self.underway.at(index, 0, 1, 1))

    def _at(self, seeds: Sequence[int], offset: int, start: int, stop: int, layer: int = -1) -> None:
        self._whereabouts.seeds = seeds
        self._whereabouts.move(offset + start, offset + stop, layer=layer)

    def _draw_seeds(self, tokens: torch.Tensor) -> list[int]:
        """From PyTorch's own generator, so that ``torch.manual_seed`` decides; none are drawn without dropout."""
        if not (self._has_dropout and self._causal.training and has_values(tokens)):
            return [0] * tokens.shape[0]
        return torch.randint(0, 2**62, (tokens.shape[0],)).tolist()
