"""Recomputing: hold a layer's input, run the layer again when backward needs what it had inside.

tokens x hidden elements a layer instead of everything that the layer holds (for Llama-3.1-8B in bf16: 8 KiB a token
instead of some 200), for one more forward. Exact: PyTorch's own checkpointing, with dropout drawn by place and not
from a stream of random numbers, so that nothing has to be saved and set back.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from narrowboat.memory.layer_call import LayerCall
from narrowboat.owner.causes import LAYER_INPUTS, account


def recompute_layer(x: torch.Tensor, call: LayerCall) -> tuple[torch.Tensor, ...]:
    """Run a layer and forget its insides: ``[batch, tokens, hidden]`` to the same, and what ``call.collect`` gives."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with call.visit():
            return (call.whole(x), *call.collect())

    account(x, LAYER_INPUTS)
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
