"""Recomputing: hold a layer's input, run the layer again when backward needs what it had inside.

tokens x hidden elements a layer instead of everything that the layer holds (for Llama-3.1-8B in bf16: 8 KiB a token
instead of some 200), for one more forward. Exact: dropout is drawn by place and not from a stream of random numbers, so
that nothing has to be saved and set back. The layer's weights may leave between its two runs: nothing of the first one
is held, and the second one lasts as long as its backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from narrowboat.memory.layer_call import LayerCall, Tensors
from narrowboat.owner.inputs import Store


def recompute_layer(call: LayerCall, store: Store) -> list[torch.Tensor]:
    """Run a layer and forget its insides: its outputs.

    Args:
        call: the layer.
        store: takes its input.
    """
    if not torch.is_grad_enabled():
        return _run(call, call.inputs)
    parameters = [p for p in call.layer.parameters() if p.requires_grad]
    return list(_Recompute.apply(call, store, len(call.inputs), *call.inputs, *parameters))


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: LayerCall, store: Store, num_inputs: int, *given: torch.Tensor) -> Any:
        inputs = given[:num_inputs]
        if any(ctx.needs_input_grad):
            further = list(inputs[1:])
            ctx.held = store.put(inputs[0], lambda x: _run(call, [x, *further])[0])
            ctx.call, ctx.further = call, further
            ctx.set_materialize_grads(False)
        return tuple(_run(call, inputs))

    @staticmethod
    def backward(ctx: Any, *seeds: torch.Tensor | None) -> Any:
        call, held, further = ctx.call, ctx.held, ctx.further
        ctx.call = ctx.held = ctx.further = None
        needs = ctx.needs_input_grad[3:]
        with call.visit():
            inputs = [held.tile(0, call.num_tokens), *further]
            leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=False)]
            grads = call.whole_backward(leaves, seeds)
        held.release()
        return None, None, None, *grads


def _run(call: LayerCall, inputs: Tensors) -> list[torch.Tensor]:
    """Without a graph."""
    with torch.no_grad(), call.visit():
        return call.whole(inputs)


@contextmanager
def without_checkpointing(module: Any) -> Iterator[None]:
    """The plan says what is recomputed, whatever ``gradient_checkpointing_enable`` said."""
    if not getattr(module, "gradient_checkpointing", False):
        yield
        return
    module.gradient_checkpointing = False
    try:
        yield
    finally:
        module.gradient_checkpointing = True
