"""Recomputing: hold a layer's input, run the layer again when backward needs what it had inside.

tokens x hidden elements a layer instead of everything that the layer holds (for Llama-3.1-8B in bf16: 8 KiB a token
instead of some 200), for one more forward. Exact: dropout is drawn by place and not from a stream of random numbers, so
that nothing has to be saved and set back. The layer's weights may leave between its two runs: nothing of the first one
is held, and the second one lasts as long as its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from narrowboat.memory.layer_call import LayerCall
from narrowboat.owner.inputs import Held, Store


def recompute_layer(x: torch.Tensor, call: LayerCall, store: Store) -> tuple[torch.Tensor, ...]:
    """Run a layer and forget its insides.

    Args:
        x: ``[batch, tokens, hidden]``.
        call: the layer.
        store: takes its input.

    Returns:
        The same shape as ``x``, and whatever ``call.collect`` gives.
    """
    if not torch.is_grad_enabled():
        return _run(call, x)
    parameters = [p for p in call.layer.parameters() if p.requires_grad]
    return _Recompute.apply(x, call, store, len(call.learning), *call.learning, *parameters)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call, store, num_arguments, *others):  # type: ignore[no-untyped-def]
        if any(ctx.needs_input_grad):
            ctx.held = store.put(x, lambda x: _run(call, x)[0])
            ctx.call, ctx.num_arguments, ctx.num_others = call, num_arguments, len(others)
        return _run(call, x)

    @staticmethod
    def backward(ctx, *seeds):  # type: ignore[no-untyped-def]
        call, held = ctx.call, ctx.held
        ctx.call = ctx.held = None
        with call.visit():
            grads = _again(call, held, ctx.needs_input_grad[0], ctx.num_arguments, seeds)
        held.release()
        return grads[0], None, None, None, *grads[1:]


def _run(call: LayerCall, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Without a graph."""
    with torch.no_grad(), call.visit():
        return (call.whole(x), *call.collect())


def _again(
    call: LayerCall, held: Held, needs_input_grad: bool, num_arguments: int, seeds: Sequence[torch.Tensor | None]
) -> list[Any]:
    """The gradients of the input, of arguments that learn, and of the layer's trainable parameters."""
    leaf = held.tile(0, call.num_tokens).detach().requires_grad_(needs_input_grad)
    arguments = [t.detach().requires_grad_() for t in call.learning]
    assert len(arguments) == num_arguments
    with torch.enable_grad():
        out = [call.whole(leaf, arguments), *call.collect()]
    pairs = [(o, s) for o, s in zip(out, seeds, strict=True) if s is not None and o.requires_grad]
    wanted = [t for t in (leaf, *arguments, *call.layer.parameters()) if t.requires_grad]
    found = torch.autograd.grad([o for o, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True)
    return [*found] if needs_input_grad else [None, *found]
